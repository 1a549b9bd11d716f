"""One kind of record of a run in columns, and reading metrics.jsonl into them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

try:  # four times as fast; comes with DVC, and nothing depends on it
    from orjson import loads as fast_loads
except ImportError:
    fast_loads = json.loads


class RunError(ValueError):
    """A run folder is not in the run format."""


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


def parse_metrics(path: Path) -> tuple[Series, Series, Series, str | None]:
    """Rollout, update and validation records of metrics.jsonl, and why the run stopped early (``None`` if it did not).

    Raises :class:`RunError` naming the file and line that is cut, malformed or of an unknown kind."""
    with _no_collection():
        return _parse(path)


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


def _record(line: str) -> dict:
    try:
        return fast_loads(line)
    except ValueError:
        return json.loads(line)  # accepts NaN, which other trainers write


def _parse(path: Path) -> tuple[Series, Series, Series, str | None]:
    rows: dict[str, list[dict]] = {"rollout": [], "update": [], "validation": []}
    stopped = None
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1] != "":
        raise RunError(f"{path.name}, line {len(lines)}: cut in the middle of a line")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = _record(line)
            kind = record["kind"]
            if kind == "stop":
                stopped = str(record["reason"])
                continue
            rows[kind].append(record)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path.name}, line {number}: not a metrics record ({type(error).__name__}: {error})") from None
    try:
        return _series(rows["rollout"]), _series(rows["update"], updates=True), _series(rows["validation"]), stopped
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RunError(f"{path.name}: a record lacks a field or has a wrong type ({type(error).__name__}: {error})") from None


OVER_ALL_TOKENS = ("clip", "clip_low", "clip_high", "mask", "kl_penalty")
"""Shares of ALL tokens of a mini-batch. An update may leave out responses without advantage (``computed``: tokens that
went through the model, all tokens); nothing is clipped or charged on those, and methods that leave out none must stay
comparable."""


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
