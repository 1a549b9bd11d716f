"""The methods: every preset of the study, a file a family. To add one, add a file here: see docs/adding_a_method.md.

A surrogate gets a prepared batch (zeros at padding, ``log_ratio_BT`` and ``valid_BT`` filled in) and the method's options,
and returns the terms of J, the objective to maximise. Penalty, aggregation, denominators and metrics are common to all.

DVC sees a family, not all of them: a change in one file trains the methods of that file again (:func:`modules_of`).
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tepo_core.objectives.clipped import RATIOS
from tepo_core.objectives.method import Method, Preset
from tepo_core.objectives.registry import PRESETS, register, resolve
from tepo_core.objectives.types import BatchError, LossOutput, MiniBatchTotals, TokenBatch, TokenOutput

__all__ = [
    "PRESETS",
    "BatchError",
    "LossOutput",
    "Method",
    "MiniBatchTotals",
    "Preset",
    "TokenBatch",
    "TokenOutput",
    "modules_of",
    "register",
    "resolve",
]

# In the order of tables and figures; files that are not named here follow.
FAMILIES = ("reinforce", "grpo", "gspo", "gmpo", "cispo", "sapo", "covariance", "holder", "tepo", "mpo")
HOMES: dict[str, str] = {}
"""Preset -> the module that registers it."""


def load(module: str) -> None:
    """Import a module and remember which presets it brought."""
    before = set(PRESETS)
    import_module(module)
    HOMES.update(dict.fromkeys(set(PRESETS) - before, module))


def modules_of(method: Method) -> set[str]:
    """Modules that this method runs and others need not: where its preset and its ratio stand."""
    ratio = RATIOS[getattr(method.settings, "ratio", "token")]
    return {HOMES[method.preset], ratio.__module__}


for _name in dict.fromkeys([*FAMILIES, *sorted(module.name for module in pkgutil.iter_modules(__path__))]):
    load(f"{__name__}.{_name}")
