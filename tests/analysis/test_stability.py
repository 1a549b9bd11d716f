"""Stability measures and the rule for "collapsed" on synthetic series."""

from __future__ import annotations

import numpy as np
import pytest

from tepo_core.analysis.stability import (
    Collapse,
    drift,
    edge_means,
    find_collapse,
    largest_drawdown,
    spikes,
    trailing_mean,
    volatility,
)

RULE = {"entropy_share": 0.1, "reward_share": 0.5, "window": 1}


def test_trailing_mean_by_hand() -> None:
    assert trailing_mean([1, 2, 3, 4], 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    assert trailing_mean([1, float("nan"), 3], 2).tolist() == [1.0, 1.0, 3.0]
    assert np.isnan(trailing_mean([float("nan"), 1.0], 1)[0])


def test_volatility_ignores_a_trend() -> None:
    assert volatility(np.linspace(0, 1, 20)) == pytest.approx(0.0, abs=1e-12)
    # changes +1, -1, +1: mean 1/3, sample variance ((2/3)^2 + (4/3)^2 + (2/3)^2) / 2 = 4/3
    assert volatility([0, 1, 0, 1]) == pytest.approx(np.sqrt(4 / 3))
    assert volatility([1.0, 2.0]) is None


def test_largest_drawdown_by_hand() -> None:
    found = largest_drawdown([0.1, 0.6, 0.4, 0.5, 0.2, 0.9, 0.8])
    assert (found.depth, found.peak, found.trough) == (pytest.approx(0.4), 1, 4)
    assert largest_drawdown([0.1, 0.2, 0.3]).depth == 0.0
    assert largest_drawdown([0.5, float("nan"), 0.3]).depth == pytest.approx(0.2)
    assert largest_drawdown([]) is None


def test_spikes_are_found_and_noise_is_not() -> None:
    series = 1.0 + 0.1 * np.random.default_rng(0).normal(size=200)
    assert spikes(series) == []
    series[120], series[150] = 5.0, float("inf")
    assert spikes(series) == [120, 150]
    assert spikes([1.0] * 30 + [1.05] + [1.0] * 5) == []  # one hundredth stands in for a MAD of 0: 1.05 < 1 + 6 * 0.01
    assert spikes([1.0] * 30 + [1.2] + [1.0] * 5) == [30]


def test_no_collapse_in_a_healthy_run() -> None:
    steps = range(1, 101)
    assert find_collapse(steps, np.linspace(1.0, 0.2, 100), np.linspace(0.2, 0.9, 100), **RULE) is None


def test_entropy_collapse_says_when_and_at_which_reward() -> None:
    entropy = [1.0, 0.5, 0.2, 0.09, 0.05]
    assert find_collapse(range(1, 6), entropy, [0.125, 0.25, 0.25, 0.5, 0.5], **RULE) == Collapse("entropy", 4, 0.5)


def test_reward_collapse_needs_the_stated_share() -> None:
    flat = [1.0] * 5
    assert find_collapse(range(1, 6), flat, [0.2, 0.8, 0.6, 0.5, 0.41], **RULE) is None
    assert find_collapse(range(1, 6), flat, [0.25, 0.75, 0.5, 0.25, 0.125], **RULE) == Collapse("reward", 4, 0.25)


def test_one_noisy_rollout_is_no_collapse() -> None:
    reward = [0.8] * 20
    reward[10] = 0.1
    assert find_collapse(range(20), [1.0] * 20, reward, entropy_share=0.1, reward_share=0.5, window=5) is None
    reward[10:18] = [0.1] * 8
    found = find_collapse(range(20), [1.0] * 20, reward, entropy_share=0.1, reward_share=0.5, window=5)
    # the mean of five is 0.8 - 0.14 k after k low rollouts; it is below half of 0.8 from k = 3 on
    assert found.kind == "reward" and found.step == 12


def test_missing_values_do_not_make_a_collapse() -> None:
    nan = float("nan")
    assert find_collapse(range(4), [1.0, nan, nan, 1.0], [0.5, nan, nan, 0.5], **RULE) is None
    assert find_collapse([], [], [], **RULE) is None


def test_drift_compares_the_ends() -> None:
    values = [10.0] * 10 + [12.0] * 80 + [15.0] * 10
    assert drift(values) == pytest.approx(1.5)
    assert edge_means([1.0, 2.0, 4.0], 0.1) == (1.0, 4.0)
    assert drift([0.0, 1.0]) is None
