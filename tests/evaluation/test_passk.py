"""pass@k and maj@k against enumeration over every subset, exact fractions, and simulation."""

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from tepo_core.evaluation.passk import check_k, majority_at_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_equals_enumeration_over_all_subsets(n):
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            hits = [any(subset) for subset in combinations(right, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(hits) / len(hits), abs=1e-14)


def test_pass_at_k_is_exact_for_1024_samples():
    for c in [0, 1, 2, 37, 512, 1000, 1023, 1024]:
        for k in [1, 2, 8, 64, 512, 1023, 1024]:
            exact = 1 - Fraction(comb(1024 - c, k), comb(1024, k))
            assert pass_at_k(1024, c, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_on_arrays_and_one_of_four():
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # with-replacement bootstrap says 1 - (3/4)^2 = 0.4375
    np.testing.assert_allclose(pass_at_k(4, np.array([[0, 1], [2, 4]]), 2), [[0, 0.5], [5 / 6, 1]])


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    p, n, k = 0.15, 12, 5
    estimates = pass_at_k(n, rng.binomial(n, p, size=200_000), k)
    assert estimates.mean() == pytest.approx(1 - (1 - p) ** k, abs=4 * estimates.std() / 200_000**0.5)


@pytest.mark.parametrize(
    "n, k, message",
    [(4, 5, "larger than n = 4"), (4, 0, "at least 1"), (0, 1, "samples = 0"), (4, [], "empty"), (4, [2, 1], "sorted")],
)
def test_k_that_cannot_be_estimated_is_refused(n, k, message):
    with pytest.raises(ValueError, match=message):
        check_k(n, k)
    if isinstance(k, int):
        with pytest.raises(ValueError, match=message):
            pass_at_k(n, 0, k)


def test_counts_outside_the_samples_are_refused():
    with pytest.raises(ValueError, match="between 0 and n = 4"):
        pass_at_k(4, 5, 1)


def enumerate_majority(votes, correct, k):
    names = ["<right>" if c else v for v, c in zip(votes, correct, strict=True)]
    shares = []
    for subset in combinations(names, k):
        counts = Counter(name for name in subset if name is not None)
        best = max(counts.values(), default=0)
        winners = [name for name, count in counts.items() if count == best]
        shares.append(Fraction("<right>" in winners, len(winners)) if winners else Fraction(0))
    return float(sum(shares) / len(shares))


def test_majority_equals_enumeration_over_all_subsets():
    rng = np.random.default_rng(1)
    for _ in range(60):
        n = int(rng.integers(1, 10))
        votes = [None if v == 4 else int(v) for v in rng.integers(0, 5, n)]
        correct = [v == 0 for v in votes]
        for k in range(1, n + 1):
            assert majority_at_k(votes, correct, k) == pytest.approx(enumerate_majority(votes, correct, k), abs=1e-12)


def test_majority_tie_rule_and_silence():
    assert majority_at_k(["a", "b"], [True, False], 2) == pytest.approx(1 / 2)
    assert majority_at_k(["a", "b", "c"], [True, False, False], 3) == pytest.approx(1 / 3)
    assert majority_at_k(["1/2", "0.5", "7"], [True, True, False], 3) == 1.0  # one answer written in two ways
    assert majority_at_k(["a", None, None], [True, False, False], 3) == 1.0
    assert majority_at_k([None, None], [False, False], 1) == 0.0
    assert majority_at_k(["a", None], [True, False], 1) == pytest.approx(1 / 2)


def test_majority_of_many_samples_does_not_overflow():
    votes = ["r"] * 500 + [f"w{i}" for i in range(524)]
    value = majority_at_k(votes, [v == "r" for v in votes], 64)
    assert 0.999 < value <= 1.0
    with pytest.raises(ValueError, match="one of each a sample"):
        majority_at_k(["a"], [], 1)
