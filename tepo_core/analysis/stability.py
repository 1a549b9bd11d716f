"""How steadily a run trained: volatility, drawdown, spikes, and a stated rule for "collapsed".

All functions take one series with one value a rollout step; values that are not finite are left out where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 5
"""Rollouts of the trailing mean that the collapse rule and the drawdown look at, so that one noisy rollout decides nothing."""


def trailing_mean(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Mean of the last ``window`` values up to each step (fewer at the start); NaN values are left out, all-NaN windows
    stay NaN."""
    array = np.asarray(values, dtype=float)
    good = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(good, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(good)])
    low = np.maximum(np.arange(len(array)) + 1 - window, 0)
    high = np.arange(len(array)) + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def volatility(values: Sequence[float]) -> float | None:
    """Standard deviation of the step-to-step changes. It does not count a trend, and does count sampling noise.

    ``None`` with fewer than three values."""
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    return float(np.diff(array).std(ddof=1)) if len(array) >= 3 else None


@dataclass(frozen=True)
class Drawdown:
    """Largest fall from an earlier peak: depth in the unit of the series, and the steps of peak and trough (indices)."""

    depth: float
    peak: int
    trough: int


def largest_drawdown(values: Sequence[float]) -> Drawdown | None:
    """Largest fall of the series from its running maximum; ``None`` for an empty series."""
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).any():
        return None
    peaks = np.fmax.accumulate(array)
    fall = np.where(np.isfinite(array), peaks - array, -np.inf)
    trough = int(np.argmax(fall))
    return Drawdown(float(fall[trough]), int(np.nanargmax(array[: trough + 1])), trough)


def spikes(values: Sequence[float], *, window: int = 20, factor: float = 6.0) -> list[int]:
    """Indices whose value exceeds the median of the ``window`` values before by ``factor`` times their scaled MAD.

    The MAD is scaled by 1.4826 (a standard deviation for a normal law). Where the window's MAD is 0, one hundredth of the
    median stands in. The first ``window`` values are never spikes. An infinite or NaN value counts as one."""
    array = np.asarray(values, dtype=float)
    found = []
    for i in range(window, len(array)):
        past = array[i - window : i]
        past = past[np.isfinite(past)]
        if not len(past):
            continue
        middle = float(np.median(past))
        spread = 1.4826 * float(np.median(np.abs(past - middle))) or abs(middle) / 100
        if not np.isfinite(array[i]) or array[i] > middle + factor * spread > middle:
            found.append(i)
    return found


@dataclass(frozen=True)
class Collapse:
    """First step at which the rule holds. kind: ``entropy`` or ``reward``; reward: trailing mean reward at that step."""

    kind: str
    step: int
    reward: float | None


def find_collapse(
    steps: Sequence[int],
    entropy: Sequence[float],
    reward: Sequence[float],
    *,
    entropy_share: float,
    reward_share: float,
    window: int = WINDOW,
) -> Collapse | None:
    """The rule for "collapsed", on trailing means over ``window`` rollouts.

    entropy   below ``entropy_share`` of its start (the mean of the first ``window`` rollouts)
    reward    below ``reward_share`` of its highest earlier value
    Whichever comes first; at one and the same step the reward decides, since it is the loss that matters. A run may "collapse"
    in entropy because it has solved its task: the reward at that step is part of the answer. ``None``: neither happened."""
    smooth_entropy, smooth_reward = trailing_mean(entropy, window), trailing_mean(reward, window)
    if not len(smooth_entropy):
        return None
    start = smooth_entropy[min(window, len(smooth_entropy)) - 1]
    peak = np.fmax.accumulate(smooth_reward)
    with np.errstate(invalid="ignore"):
        fallen = (peak > 0) & (smooth_reward < reward_share * peak)
        low = smooth_entropy < entropy_share * start
    for i, step in enumerate(steps):
        if i + 1 < window:
            continue
        if fallen[i] or low[i]:
            at = float(smooth_reward[i])
            return Collapse("reward" if fallen[i] else "entropy", int(step), at if np.isfinite(at) else None)
    return None


def drift(values: Sequence[float], share: float = 0.1) -> float | None:
    """Mean of the last ``share`` of the series over the mean of the first: 1 is no drift. ``None`` if the start is 0 or
    empty."""
    start, end = edge_means(values, share)
    return end / start if start and end is not None else None


def edge_means(values: Sequence[float], share: float = 0.1) -> tuple[float | None, float | None]:
    """Means of the first and of the last ``share`` of the series (at least one value each), finite values only."""
    array = np.asarray(values, dtype=float)
    count = max(1, round(share * len(array)))
    ends = []
    for part in (array[:count], array[-count:]):
        part = part[np.isfinite(part)]
        ends.append(float(part.mean()) if len(part) else None)
    return ends[0], ends[1]
