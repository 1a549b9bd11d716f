"""Entropy: the law, its extrapolation, the covariance prediction, and which tokens lose it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tepo_core.analysis.entropy import (
    by_kind,
    covariance_prediction,
    entropy_kept,
    extrapolate_law,
    fell_by_surprise,
    fit_law,
)


def test_law_is_recovered_exactly() -> None:
    entropy = np.linspace(1.0, 0.1, 30)
    law = fit_law(entropy, 2.5 - 0.7 * np.exp(entropy))
    assert law.a == pytest.approx(0.7) and law.b == pytest.approx(2.5) and law.ceiling == pytest.approx(1.8)
    assert law.r2 == pytest.approx(1.0) and law.a_se == pytest.approx(0.0, abs=1e-7)
    assert law.predict(np.array([0.0]))[0] == pytest.approx(1.8)


def test_standard_errors_match_repeated_experiments() -> None:
    generator, entropy = np.random.default_rng(0), np.linspace(1.0, 0.1, 40)
    fits = [fit_law(entropy, 2.0 - 0.5 * np.exp(entropy) + 0.05 * generator.normal(size=40)) for _ in range(600)]
    for name, error in (("a", "a_se"), ("b", "b_se"), ("ceiling", "ceiling_se")):
        spread = np.std([getattr(f, name) for f in fits])
        assert np.mean([getattr(f, error) for f in fits]) == pytest.approx(spread, rel=0.1)


def test_law_needs_points_and_spread() -> None:
    assert fit_law([0.5] * 10, np.linspace(0, 1, 10)) is None
    assert fit_law(np.arange(7) / 7, np.arange(7)) is None
    reward = np.arange(8.0)
    assert fit_law(np.arange(8) / 8, reward) is not None
    reward[3] = float("nan")
    assert fit_law(np.arange(8) / 8, reward) is None  # seven points are left


def test_extrapolation_error_is_that_of_the_rest() -> None:
    entropy = np.linspace(1.0, 0.1, 30)
    reward = 2.5 - 0.7 * np.exp(entropy)
    assert extrapolate_law(entropy, reward).rmse == pytest.approx(0.0, abs=1e-9)
    reward[10:] += 0.2  # the law breaks after the first third: predictions are 0.2 too low
    found = extrapolate_law(entropy, reward)
    assert found.rmse == pytest.approx(0.2) and found.bias == pytest.approx(-0.2)
    assert (found.fitted, found.predicted) == (10, 20)


def test_covariance_prediction_finds_the_theory_where_it_holds() -> None:
    generator = np.random.default_rng(1)
    covariance, lr = np.abs(generator.normal(size=60)), np.full(60, 1e-2)
    entropy = np.concatenate([[1.0], 1.0 - np.cumsum(lr * covariance)])
    found = covariance_prediction(entropy, covariance, lr, window=1)
    assert found.correlation == pytest.approx(1.0) and found.sign_agreement == 1.0 and found.n == 60
    opposite = covariance_prediction(entropy, -covariance, lr, window=1)
    assert opposite.correlation == pytest.approx(-1.0) and opposite.sign_agreement == 0.0
    assert covariance_prediction(entropy[:8], covariance[:7], lr[:7]) is None


def test_entropy_kept() -> None:
    assert entropy_kept([2.0] + [1.0] * 8 + [0.5]) == pytest.approx(0.25)
    assert entropy_kept([0.0, 0.0]) is None


def tokens() -> pd.DataFrame:
    rows = [
        # kind, logprob_old, logprob, entropy_old, entropy, advantage
        ("decisive", -1.5, -1.0, 1.0, 1.2, 1.0),  # surprise 0.5, rose
        ("decisive", -0.1, -0.05, 1.0, 0.8, 1.0),  # surprise -0.9, fell
        ("digit", -0.3, -0.2, 0.4, 0.3, 1.0),  # surprise -0.1, fell
        ("digit", -0.3, -0.2, 0.4, 0.5, -1.0),  # negative advantage: not counted
        ("copied", -0.3, -0.3, 0.4, 0.3, 1.0),  # did not move: not counted
    ]
    frame = pd.DataFrame(rows, columns=["kind", "logprob_old", "logprob", "entropy_old", "entropy", "advantage"])
    return frame.assign(mask=[True, False, False, False, False], clipped=False, gradient=[4.0, 2.0, 1.0, 1.0, 0.0], method="m")


def test_tokens_by_kind() -> None:
    table = by_kind(tokens(), ["kind"]).set_index("kind")
    assert table.loc["decisive", "tokens"] == 2
    assert table.loc["decisive", "entropy_change"] == pytest.approx(0.0)  # +0.2 and -0.2
    assert table.loc["decisive", "mask"] == 0.5 and table.loc["decisive", "gradient"] == 3.0
    assert table.loc["digit", "entropy_fell"] == 0.5


def test_share_that_falls_counts_moved_tokens_of_positive_advantage() -> None:
    table = fell_by_surprise(tokens(), ["method"])
    assert table["tokens"].sum() == 3
    assert table.sort_values("surprise")["fell"].tolist() == [1.0, 1.0, 0.0]
    assert table["surprise"].tolist() == pytest.approx([-0.9, -0.1, 0.5])


def test_the_premise_of_the_mask_does_not_hold_for_surprising_tokens() -> None:
    """The exact gradient: raising one token of a softmax lowers its entropy only where log p + H is positive enough."""
    logits = np.log(np.array([0.6, 0.3, 0.1]))

    def entropy(z: np.ndarray) -> float:
        p = np.exp(z) / np.exp(z).sum()
        return float(-(p * np.log(p)).sum())

    rise = entropy(logits + np.array([0, 0, 0.1])) - entropy(logits)  # the least likely token
    fall = entropy(logits + np.array([0.1, 0, 0])) - entropy(logits)  # the most likely one
    p, h = np.exp(logits), entropy(logits)
    assert rise > 0 > fall
    assert np.sign(rise) == np.sign(-p[2] * (logits[2] + h)) and np.sign(fall) == np.sign(-p[0] * (logits[0] + h))
