"""All that figures, tables and the report read of an analysis: the study, its methods in order, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.tables import reference_method
from tepo_core.config import Study
from tepo_core.runs.folder import BASE

MOST_LINES = 10
"""Curves in one picture, beyond which variants are left to the sensitivity figure."""


@dataclass
class Book:
    """All that figures read: the study, the methods in order, and the tables of the analysis."""

    study: Study
    tasks: list[str]
    methods: list[str]
    tables: dict[str, pd.DataFrame]
    presets: dict[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str | None:
        return reference_method(self.methods)

    @cached_property
    def _curves(self) -> dict[tuple, pd.DataFrame]:
        frame = self.tables["curves"]
        groups = frame.groupby(["task", "source", "metric", "method"], observed=True, sort=False)
        return {key: part for key, part in groups}

    def curve(self, task: str, method: str, source: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and values of shape (seeds, steps): NaN where a seed has no such step. Empty arrays where nothing was
        measured."""
        part = self._curves.get((task, source, metric, method))
        if part is None or not len(part):
            return np.array([]), np.empty((0, 0))
        table = part.pivot_table(index="seed", columns="step", values="value", aggfunc="last", dropna=False)
        values = table.to_numpy(dtype=float)
        return (table.columns.to_numpy(), values) if np.isfinite(values).any() else (np.array([]), np.empty((0, 0)))

    def trained(self, task: str) -> list[str]:
        """Methods with at least one training run on the task."""
        return [m for m in self.methods if (task, "rollout", "reward", m) in self._curves]

    def variants(self, task: str) -> list[str]:
        """Trained methods that vary a preset which was trained too, grouped by preset."""
        trained = self.trained(task)
        found = [m for m in trained if m in self.study.variants and self.presets.get(m, m) in trained and self.presets[m] != m]
        return sorted(found, key=lambda m: (trained.index(self.presets[m]), trained.index(m)))

    def overlaid(self, task: str) -> list[str]:
        """Methods whose curves share one picture: all of them, or, where they are more than ten, without the variants."""
        trained, variants = self.trained(task), self.variants(task)
        return [m for m in trained if m not in variants] if len(trained) > MOST_LINES and variants else trained

    def seeds(self, task: str, method: str, metric: str) -> np.ndarray:
        """A run-level metric, one value a seed, finite ones."""
        runs = self.tables["runs"]
        values = runs.loc[(runs["task"] == task) & (runs["method"] == method), metric].to_numpy(dtype=float)
        return values[np.isfinite(values)]

    def level(self, task: str, method: str, metric: str) -> pd.Series | None:
        """The row of the methods table, with estimate, low, high, n; ``None`` if there is none."""
        return self._row("methods", task=task, method=method, metric=metric)

    def pair(self, task: str, method: str, against: str, metric: str) -> pd.Series | None:
        """The row of the pairs table."""
        return self._row("pairs", task=task, method=method, against=against, metric=metric)

    def _row(self, name: str, **where: str) -> pd.Series | None:
        if name not in self._indexed:
            keys = list(where)
            table = self.tables[name]
            self._indexed[name] = {k: i for i, k in enumerate(zip(*(table[key] for key in keys), strict=True))}
        position = self._indexed[name].get(tuple(where.values()))
        return None if position is None else self.tables[name].iloc[position]

    @cached_property
    def _indexed(self) -> dict[str, dict]:
        return {}


def label(metric: str) -> str:
    """Axis label of a run-level metric."""
    return METRICS[metric].label


def with_base(methods: Sequence[str]) -> list[str]:
    """The base policy first."""
    return [BASE, *methods]


EVIDENCE = ("full", "gpu-1.5b", "paper-7b")
"""Profiles whose figures carry no watermark: the only ones meant to convince anybody."""


def is_evidence(study: Study) -> bool:
    """Whether the profile is meant as evidence: a full profile with at least two seeds."""
    return study.profile in EVIDENCE and len(study.seeds) >= 2
