"""Intervals of avg@n and pass@k contain the truth as often as they say: 500 simulated studies with a known truth.

The truth of a benchmark number is its expectation over training seeds and over problems like these. Ten seeds answer one shared
set of problems, n samples each; the interval is Student's t over seeds with the variance over problems added, or the
hierarchical percentile bootstrap over seeds and problems."""

import numpy as np
import pytest

from tepo_core.analysis.statistics import SeedProblemBootstrap, seed_interval, shared_problem_variance
from tepo_core.evaluation.passk import pass_at_k

SEEDS, PROBLEMS, SAMPLES, STUDIES = 10, 80, 16, 500


def probabilities(rng, seeds, problems):
    """Probability of a right sample, (seeds, problems): problems differ widely, seeds a little, and each in its own way."""
    level = rng.normal(-0.5, 1.5, problems) + rng.normal(0, 0.5, (seeds, 1)) + rng.normal(0, 0.4, (seeds, problems))
    return 1 / (1 + np.exp(-level))


@pytest.mark.parametrize("k", [1, 8])  # pass@1 is avg@n
def test_intervals_cover_the_truth(k):
    rng = np.random.default_rng(20260 + k)
    truth = float((1 - (1 - probabilities(rng, 2000, 2000)) ** k).mean())
    inside = {"t": 0, "bootstrap": 0}
    for _ in range(STUDIES):
        counts = rng.binomial(SAMPLES, probabilities(rng, SEEDS, PROBLEMS))
        values = pass_at_k(SAMPLES, counts, k)
        found = seed_interval(values.mean(axis=1), 0.95, problem_variance=shared_problem_variance(values))
        inside["t"] += found.low <= truth <= found.high
        bootstrap = SeedProblemBootstrap([PROBLEMS] * SEEDS, reps=400, rng=rng, shared=True)
        found = bootstrap.interval(list(values), 0.95)
        inside["bootstrap"] += found.low <= truth <= found.high
    assert 0.92 <= inside["t"] / STUDIES <= 0.98, inside
    assert 0.92 <= inside["bootstrap"] / STUDIES <= 0.98, inside


def test_the_estimate_itself_is_unbiased():
    rng = np.random.default_rng(7)
    p = np.array([0.02, 0.2, 0.9])
    counts = rng.binomial(SAMPLES, p, size=(40_000, 3))
    expected = (1 - (1 - p) ** 8).mean()
    assert pass_at_k(SAMPLES, counts, 8).mean() == pytest.approx(expected, abs=2e-3)
    plugged_in = (1 - (1 - counts / SAMPLES) ** 8).mean()
    assert abs(plugged_in - expected) > 0.01  # the usual shortcut is biased
