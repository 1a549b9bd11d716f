"""``metrics.jsonl``: one JSON object an event, written by :func:`metric_line` and read by :func:`read_metrics`.

An event has a kind (``warmup``, ``rollout``, ``update``, ``validation``, ``stop``), a step, ``sums`` (name -> [numerator, denominator]:
ratios are divided as late as possible) and ``values`` (plain numbers). ``null`` stands for what is not finite.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tepo_core.runs.folder import RunError

try:  # four times as fast; comes with DVC, and nothing depends on it
    from orjson import loads as fast_loads
except ImportError:
    fast_loads = json.loads

METRICS_FILE = "metrics.jsonl"
EVENT_KINDS = ("warmup", "rollout", "update", "validation")


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


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run; ``path`` is its folder or the file.

    Raises :class:`RunError` naming the file and line that is cut, malformed or of an unknown kind, FileNotFoundError where
    there is none."""
    path = path / METRICS_FILE if path.is_dir() else path
    with _no_collection():
        return _read(path)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Reading makes millions of small objects and no cycles; looking for cycles again and again costs a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _event(line: str) -> dict:
    try:
        return fast_loads(line)
    except ValueError:
        return json.loads(line)  # accepts NaN, which other trainers write


def _read(path: Path) -> Metrics:
    metrics = Metrics(path.name, {kind: [] for kind in EVENT_KINDS})
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1] != "":
        raise RunError(f"{path.name}, line {len(lines)}: cut in the middle of a line")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = _event(line)
            if event["kind"] == "stop":
                metrics.stopped = str(event["reason"])
            else:
                metrics.events[event["kind"]].append(event)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path.name}, line {number}: not a metrics record ({type(error).__name__}: {error})") from None
    return metrics


@dataclass
class Metrics:
    """A run's events by kind, in their order. ``stopped``: why it stopped early, None if it did not."""

    file: str
    events: dict[str, list[dict]]
    stopped: str | None = None

    @cached_property
    def rollout(self) -> Series:
        return self._columns("rollout")

    @cached_property
    def update(self) -> Series:
        return self._columns("update")

    @cached_property
    def validation(self) -> Series:
        return self._columns("validation")

    def _columns(self, kind: str) -> Series:
        try:
            return _series(self.events[kind], updates=kind == "update")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RunError(
                f"{self.file}: a record lacks a field or has a wrong type ({type(error).__name__}: {error})"
            ) from None

    def frame(self, kind: str) -> pd.DataFrame:
        """Events of one kind as a table: a column a ratio (numerator / denominator) or value."""
        rows = []
        for event in self.events[kind]:
            ratios = {name: n / d if n is not None and d else math.nan for name, (n, d) in event["sums"].items()}
            rows.append({"step": event["step"], "update": event.get("update", 0), **ratios, **event["values"]})
        return pd.DataFrame(rows)


@dataclass
class Series:
    """One kind of record of a run in columns. ``num[name][i] / den[name][i]`` is the mean at row i; ``values`` are plain
    numbers."""

    steps: np.ndarray
    num: dict[str, np.ndarray] = field(default_factory=dict)
    den: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    updates: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, name: str) -> bool:
        return name in self.num or name in self.values

    def mean(self, name: str) -> np.ndarray:
        """The metric at every row; NaN where it was not measured or its denominator is 0."""
        if name in self.values:
            return self.values[name]
        if name not in self.num:
            return np.full(len(self), np.nan)
        return _divide(self.num[name], self.den[name])

    def total(self, name: str) -> float:
        """Sum of numerators over sum of denominators over all rows; NaN if never measured."""
        if name not in self.num:
            return float("nan")
        good = np.isfinite(self.num[name]) & np.isfinite(self.den[name])
        return float(_divide(self.num[name][good].sum(), self.den[name][good].sum()))

    def per_step(self) -> Series:
        """Rows of one step merged: numerators and denominators summed, plain values averaged (max and min kept for *_max,
        *_min)."""
        steps, first = np.unique(self.steps, return_index=True)
        if not len(steps):
            return self
        out = Series(steps)
        for name in self.num:
            out.num[name] = np.add.reduceat(self.num[name], first)
            out.den[name] = np.add.reduceat(self.den[name], first)
        counts = np.diff(np.append(first, len(self.steps)))
        for name, value in self.values.items():
            if name.endswith("_max"):
                out.values[name] = np.maximum.reduceat(value, first)
            elif name.endswith("_min"):
                out.values[name] = np.minimum.reduceat(value, first)
            else:
                out.values[name] = np.add.reduceat(value, first) / counts
        return out


def _divide(num: np.ndarray | float, den: np.ndarray | float) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.asarray(den) == 0, np.nan, np.asarray(num) / np.asarray(den))


OVER_ALL_TOKENS = ("clip", "clip_low", "clip_high", "mask", "kl_penalty")
"""Shares of ALL tokens of a mini-batch. In older records the sums of an update left out responses without advantage
(``computed``: tokens that went through the model, all tokens); nothing was clipped or charged on those. Newer ones are over
all tokens already."""


def _series(records: list[dict], updates: bool = False) -> Series:
    series = Series(np.array([r["step"] for r in records], dtype=int))
    if updates:
        series.updates = np.array([r["update"] for r in records], dtype=int)
    pairs = _columns([r.get("sums", {}) for r in records], (0.0, 0.0))
    for name, values in pairs.items():
        series.num[name], series.den[name] = values[:, 0].copy(), values[:, 1].copy()
    series.values.update(_columns([r.get("values", {}) for r in records], np.nan))
    return _finished(series)


def _columns(rows: list[dict], missing: float | tuple[float, float]) -> dict[str, np.ndarray]:
    """Column arrays of rows of numbers (or pairs); ``missing`` stands where a row lacks a name, NaN where it holds null.

    Rows of one kind mostly have the same names in the same order: then all of them become one array at once."""
    if not rows:
        return {}
    names = list(rows[0])
    if all(list(row) == names for row in rows):
        table = np.array([list(row.values()) for row in rows], dtype=float)
        return {name: table[:, i] for i, name in enumerate(names)}
    every = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, missing) for row in rows], dtype=float) for name in every}


def _finished(series: Series) -> Series:
    if np.any(np.diff(series.steps) < 0):
        raise ValueError("steps go backwards")
    for name in OVER_ALL_TOKENS if "computed" in series.den else ():
        if name in series.den:
            series.den[name] = series.den["computed"].copy()
    return series
