"""The run folder: what a run writes, in the format that every later stage reads.

``config.json``, ``metrics.jsonl`` (one JSON object an event; ratios as [numerator, denominator]), tables, ``policy/`` and, last,
``done.json`` with a hash of every file. No times are written: equal parameters and seed give equal bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from tepo_core.config import Study
from tepo_core.files import mark_done

FORMAT = 1


def run_name(task: str, seed: int, method: str | None = None) -> str:
    """Folder name of a run: ``facts-grpo-s0``, or ``facts-s0`` for a base policy."""
    return f"{task}-{method}-s{seed}" if method else f"{task}-s{seed}"


def run_folder(root: Path, kind: str, task: str, seed: int, method: str | None = None) -> Path:
    """Standard place of a run; ``kind`` is ``warmup``, ``train`` or ``evaluate``."""
    return root / "runs" / kind / run_name(task, seed, method)


def run_config(study: Study, kind: str, task: str, seed: int, method: str | None = None, **extra: Any) -> dict[str, Any]:
    """What ``config.json`` holds: everything that determines the run, and the versions it ran with."""
    return {
        "format": FORMAT,
        "kind": kind,
        "engine": "tepo",
        "profile": study.profile,
        "task": task,
        "method": method,
        "seed": seed,
        "policy": study.policy.model_dump(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        **extra,
    }


def metric_line(kind: str, step: int, sums: Mapping[str, Any], values: Mapping[str, Any], **extra: Any) -> str:
    """One line of ``metrics.jsonl``. Nine digits; numbers that are not finite become ``null``."""
    event = {
        "kind": kind,
        "step": step,
        **extra,
        "sums": {name: [_number(n), _number(d)] for name, (n, d) in sums.items()},
        "values": {name: _number(value) for name, value in values.items()},
    }
    return json.dumps(event, sort_keys=True) + "\n"


def _number(value: Any) -> float | int | None:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def metrics_frame(folder: Path, kind: str) -> pd.DataFrame:
    """Events of one kind as a table: a column a ratio (numerator / denominator) or value."""
    rows = []
    for event in read_metrics(folder):
        if event["kind"] == kind:
            ratios = {name: n / d if n is not None and d else math.nan for name, (n, d) in event["sums"].items()}
            rows.append({"step": event["step"], "update": event.get("update", 0), **ratios, **event["values"]})
    return pd.DataFrame(rows)


def finish(folder: Path, stopped: str | None = None) -> None:
    """Mark a run done, with all its files but the notebook, which is still being written."""
    paths = [p for p in folder.rglob("*") if p.is_file() and p.name not in ("done.json", "notebook.ipynb")]
    mark_done(folder, [p.relative_to(folder).as_posix() for p in paths], stopped)
