"""``config.json`` of a run."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tepo_core.config import Study
from tepo_core.runs.folder import ENGINE, FORMAT


def run_config(study: Study, kind: str, task: str, seed: int, method: str | None = None, **extra: Any) -> dict[str, Any]:
    """What ``config.json`` holds: everything that determines the run, and the versions it ran with."""
    return {
        "format": FORMAT,
        "kind": kind,
        "engine": ENGINE,
        "profile": study.profile,
        "task": task,
        "method": method,
        "seed": seed,
        "policy": study.policy.model_dump(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        **extra,
    }
