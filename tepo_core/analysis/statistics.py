"""Statistics of a study with few seeds: intervals, paired differences, bootstrap, times to a target.

Which interval for what
    A seed of the study draws its own base policy, planted facts and problems, so the value of a seed already carries the
    noise of its problems, and seeds are independent. The interval used for verdicts is therefore Student's t over the
    seeds' values (paired differences between methods). A percentile bootstrap over three seeds covers the truth in only
    three of four cases where seeds differ by more than the noise of their problems, as base policies do
    (``tests/analysis/test_statistics.py`` measures it), so bootstrap intervals, which are reported too, never decide a verdict.
    Where all seeds share one problem set (a benchmark), seeds say nothing about other problems, and the variance over
    problems is added (:func:`seed_interval`, ``problem_variance``).

Every function is pure; whatever draws takes its generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval. ``low`` and ``high`` are ``None`` where none can be given; ``reason`` says
    why."""

    estimate: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str = ""

    @property
    def known(self) -> bool:
        """Whether the interval has both ends."""
        return self.low is not None and self.high is not None

    def as_dict(self) -> dict:
        """Plain mapping, for JSON."""
        return asdict(self)


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float).ravel()
    return array[np.isfinite(array)]


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean: the mean after cutting a quarter (rounded down) from each end.

    Source: Agarwal et al., arXiv 2108.13264, section 4.3. With fewer than four values nothing is cut: it is the mean."""
    return stats.trim_mean(np.asarray(values, dtype=float), 0.25, axis=axis)


def seed_interval(
    values: Sequence[float],
    confidence: float,
    *,
    bounds: tuple[float, float] | None = None,
    problem_variance: float = 0.0,
) -> Interval:
    """Mean over seeds with Student's t interval.

    ``problem_variance`` is the squared standard error of the mean over problems, to add where all seeds share them.
    ``bounds`` cuts the interval at what the quantity can be. Values that are not finite are left out.
    No interval with fewer than two values, nor where all values are equal: there is nothing to estimate the spread from."""
    array = _finite(values)
    if not len(array):
        return Interval(None, n=0, reason="no value")
    mean = float(array.mean())
    if len(array) < 2:
        return Interval(mean, n=1, reason="one seed")
    variance = float(array.var(ddof=1)) / len(array)
    if variance <= (1e-12 * max(1.0, abs(mean))) ** 2:
        return Interval(mean, n=len(array), reason="no variation between seeds")
    half = _t_quantile(0.5 + confidence / 2, len(array) - 1) * float(np.sqrt(variance + problem_variance))
    low, high = mean - half, mean + half
    if bounds:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(mean, low, high, len(array))


@lru_cache(maxsize=256)
def _t_quantile(level: float, freedom: int) -> float:
    return float(stats.t.ppf(level, freedom))


def paired_interval(
    first: Sequence[float], second: Sequence[float], confidence: float, *, problem_variance: float = 0.0
) -> Interval:
    """Mean of the seed-wise differences ``first - second`` (equal length, same seeds in the same order) with a t interval."""
    if len(first) != len(second):
        raise ValueError(f"paired values need the same seeds; got {len(first)} and {len(second)} values")
    return seed_interval(
        np.asarray(first, dtype=float) - np.asarray(second, dtype=float), confidence, problem_variance=problem_variance
    )


def shared_problem_variance(differences_SP: np.ndarray) -> float:
    """Squared standard error over problems of the grand mean of ``differences_SP`` (S seeds x P problems that all seeds share).

    The variance between problem means contains 1/S of the within-problem noise, which the seeds' t interval already holds:
    it is taken out, and the result is at least 0. 0 with fewer than two problems."""
    table = np.asarray(differences_SP, dtype=float)
    seeds, problems = table.shape
    if problems < 2:
        return 0.0
    between = float(table.mean(axis=0).var(ddof=1))
    noise = float((table - table.mean(axis=0)).var(axis=0, ddof=1).mean()) / seeds if seeds > 1 else 0.0
    return max(between - noise, 0.0) / problems


def bootstrap_interval(
    strata: Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    reps: int,
    confidence: float,
    rng: np.random.Generator,
) -> Interval:
    """Stratified percentile bootstrap: values are redrawn inside each stratum (task), then pooled.

    ``statistic`` maps an array (reps, values) to (reps,). Source: Agarwal et al., arXiv 2108.13264, section 4.1."""
    arrays = [a for a in (_finite(s) for s in strata) if len(a)]
    if not arrays:
        return Interval(None, reason="no value")
    pooled = np.concatenate(arrays)
    estimate = float(statistic(pooled[None, :])[0])
    if min(len(a) for a in arrays) < 2:
        return Interval(estimate, n=len(pooled), reason="one seed")
    if all(np.ptp(a) == 0 for a in arrays):
        return Interval(estimate, n=len(pooled), reason="no variation between seeds")
    draws = np.concatenate([a[rng.integers(len(a), size=(reps, len(a)))] for a in arrays], axis=1)
    low, high = np.quantile(statistic(draws), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(estimate, float(low), float(high), len(pooled))


class SeedProblemBootstrap:
    """Hierarchical bootstrap over seeds and, inside a redrawn seed, over its problems.

    One object holds one set of draws; every method measured with it sees the same seeds and problems, so differences
    between methods are paired. ``shared``: all seeds have the same problems, which are then redrawn once for all seeds.

    sizes: problems per seed. reps: number of draws."""

    def __init__(self, sizes: Sequence[int], *, reps: int, rng: np.random.Generator, shared: bool = False) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes = {list(sizes)}: every seed needs at least one problem")
        if shared and len(set(sizes)) != 1:
            raise ValueError(f"sizes = {list(sizes)}: seeds that share their problems must have equally many")
        self.sizes, self.reps, self.shared = list(sizes), reps, shared
        self.chosen = rng.integers(len(sizes), size=(reps, len(sizes)))
        if shared:
            self._weights = [self._draw(rng, sizes[0], reps)]
        else:
            counts = np.bincount(self.chosen.ravel(), minlength=len(sizes))
            self._weights = [self._draw(rng, size, int(count)) for size, count in zip(sizes, counts, strict=True)]

    @staticmethod
    def _draw(rng: np.random.Generator, size: int, rows: int) -> np.ndarray:
        return rng.multinomial(size, np.full(size, 1.0 / size), size=rows).astype(np.float32)

    def means(self, groups: Sequence[np.ndarray]) -> np.ndarray:
        """Redrawn means, shape (reps,). ``groups``: one array of per-problem values a seed."""
        if [len(g) for g in groups] != self.sizes:
            raise ValueError(f"expected {self.sizes} problems per seed, got {[len(g) for g in groups]}")
        if self.shared:
            columns = np.stack([self._weights[0] @ np.asarray(g, dtype=float) / len(g) for g in groups], axis=1)
            return np.take_along_axis(columns, self.chosen, axis=1).mean(axis=1)
        slots = np.empty(self.chosen.shape)
        for seed, group in enumerate(groups):
            slots[self.chosen == seed] = self._weights[seed] @ np.asarray(group, dtype=float) / len(group)
        return slots.mean(axis=1)

    def interval(self, groups: Sequence[np.ndarray], confidence: float) -> Interval:
        """Grand mean over seeds with its percentile interval. With one seed there is none."""
        estimate = float(np.mean([np.mean(g) for g in groups]))
        if len(groups) < 2:
            return Interval(estimate, n=len(groups), reason="one seed")
        draws = self.means(groups)
        if np.ptp(draws) <= 1e-12 * max(1.0, abs(estimate)):
            return Interval(estimate, n=len(groups), reason="no variation")
        low, high = np.quantile(draws, [0.5 - confidence / 2, 0.5 + confidence / 2])
        return Interval(estimate, float(low), float(high), len(groups))


def probability_of_improvement(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float | None:
    """P(X > Y) for a run of the first and a run of the second method on the same task, ties counting half, mean over tasks.

    ``first`` and ``second`` hold one sequence of values a task. Source: arXiv 2108.13264, section 4.3 (Mann-Whitney U / nm)."""
    shares = []
    for x, y in zip(first, second, strict=True):
        x, y = _finite(x), _finite(y)
        if len(x) and len(y):
            shares.append(float(((x[:, None] > y[None]) + 0.5 * (x[:, None] == y[None])).mean()))
    return float(np.mean(shares)) if shares else None


def paired_improvement(differences: Sequence[float]) -> float | None:
    """Share of seeds in which the difference is positive, ties counting half."""
    array = _finite(differences)
    return float(((array > 0) + 0.5 * (array == 0)).mean()) if len(array) else None


def seeds_needed(differences: Sequence[float], *, confidence: float, power: float = 0.8, most: int = 1000) -> int | None:
    """Fewest seeds with which a paired t test would find a true difference of the observed size with the given power.

    Solves n >= ((t_{1-alpha/2,n-1} + t_{power,n-1}) s / d)^2. ``None`` with fewer than two seeds, a difference of 0, or more
    than ``most`` seeds. An observed difference is itself uncertain: read the number as an order of magnitude."""
    array = _finite(differences)
    if len(array) < 2:
        return None
    mean, spread = abs(float(array.mean())), float(array.std(ddof=1))
    if mean == 0:
        return None
    n, quantiles = _power_quantiles(confidence, power, most)
    enough = n[n >= (quantiles * spread / mean) ** 2]
    return int(enough[0]) if len(enough) else None


@lru_cache(maxsize=16)
def _power_quantiles(confidence: float, power: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    n = np.arange(2, most + 1)
    return n, stats.t.ppf(0.5 + confidence / 2, n - 1) + stats.t.ppf(power, n - 1)


@dataclass(frozen=True)
class TimeToTarget:
    """Rollouts until a curve first reaches a target. ``reached`` False: censored, ``step`` is then the last step observed."""

    step: float
    reached: bool


def rollouts_to_target(steps: Sequence[float], values: Sequence[float], target: float) -> TimeToTarget | None:
    """First step at which the curve reaches ``target``, linear between measurements. ``None`` for an empty curve.

    Points that are not finite are left out. A curve that starts at or above the target needs its first step."""
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    if not len(x):
        return None
    above = np.flatnonzero(y >= target)
    if not len(above):
        return TimeToTarget(float(x[-1]), False)
    i = int(above[0])
    if i == 0 or y[i] == y[i - 1]:
        return TimeToTarget(float(x[i]), True)
    return TimeToTarget(float(x[i - 1] + (target - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1])), True)


def kaplan_meier(times: Sequence[TimeToTarget]) -> tuple[np.ndarray, np.ndarray]:
    """Share of runs that have not reached the target after each distinct event time; censored runs leave the risk set.

    Returns (times, survival), both of equal length, starting with (0, 1). Source: Kaplan and Meier 1958."""
    events = sorted({t.step for t in times if t.reached})
    survival, share = [1.0], 1.0
    for step in events:
        at_risk = sum(t.step >= step for t in times)
        share *= 1.0 - sum(t.reached and t.step == step for t in times) / at_risk
        survival.append(share)
    return np.array([0.0, *events]), np.array(survival)


def restricted_mean_time(times: Sequence[TimeToTarget], horizon: float) -> float:
    """Mean time to target, cut at ``horizon``: the area under :func:`kaplan_meier` from 0 to the horizon.

    Where every censored run was observed to the horizon it is the mean of min(time, horizon)."""
    at, survival = kaplan_meier(times)
    inside = at < horizon
    edges = np.append(at[inside], horizon)
    return float((np.diff(edges) * survival[inside]).sum())


@dataclass(frozen=True)
class TimeRatio:
    """Ratio of times to target, first over second (below 1: the first is sooner)."""

    interval: Interval
    censored_first: int
    censored_second: int
    pairs: int


def time_ratio(first: Sequence[TimeToTarget], second: Sequence[TimeToTarget], horizon: float, confidence: float) -> TimeRatio:
    """Geometric mean over seeds of the ratio of restricted times, min(T, horizon), with a t interval on the log scale.

    A run that never reaches the target enters with the horizon, which pulls the ratio towards 1: with censoring the ratio
    is a bound, not an estimate of the uncensored ratio. Seeds in which neither method reaches the target say nothing
    and are left out; no interval if none is left. The same seeds in the same order are expected."""
    logs = []
    for a, b in zip(first, second, strict=True):
        if a.reached or b.reached:
            time_a = min(a.step, horizon) if a.reached else horizon
            time_b = min(b.step, horizon) if b.reached else horizon
            logs.append(np.log(max(time_a, 1e-9)) - np.log(max(time_b, 1e-9)))
    censored = sum(not t.reached for t in first), sum(not t.reached for t in second)
    if not logs:
        return TimeRatio(Interval(None, reason="no run of either method reached the target"), *censored, 0)
    log = seed_interval(logs, confidence)
    exp = [None if v is None else float(np.exp(v)) for v in (log.estimate, log.low, log.high)]
    return TimeRatio(Interval(exp[0], exp[1], exp[2], log.n, log.reason), *censored, len(logs))
