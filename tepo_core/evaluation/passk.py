"""pass@k and maj@k from n samples a problem: unbiased, without drawing subsets.

Both are the expectation over k samples drawn without replacement from the n that exist. Drawing with replacement
("best@k by bootstrap") or plugging the mean into 1 - (1 - p)^k answers another question and is biased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from scipy.stats import binom


def check_k(samples: int, k: Sequence[int] | int) -> list[int]:
    """The requested k as a list. Raises ``ValueError`` unless it is sorted, without repeats, and 1 <= k <= samples."""
    ks = [k] if isinstance(k, (int, np.integer)) else list(k)
    if samples < 1:
        raise ValueError(f"samples = {samples}: at least one sample a problem is needed; raise evaluate.samples")
    if not ks:
        raise ValueError("k is empty; give at least one number, for example k = [1]")
    if any(isinstance(value, bool) or int(value) != value or value < 1 for value in ks):
        raise ValueError(f"k = {ks}: every k must be a whole number of at least 1")
    if ks != sorted(set(ks)):
        raise ValueError(f"k = {ks} must be sorted and without repeats")
    if ks[-1] > samples:
        raise ValueError(f"k = {ks[-1]} is larger than n = {samples} samples; pass@k needs k <= n: raise n or lower k")
    return [int(value) for value in ks]


def pass_at_k(samples: int, correct: np.ndarray | Sequence[int] | int, k: int) -> np.ndarray | float:
    """Unbiased pass@k = 1 - C(n-c, k) / C(n, k) of ``n = samples`` samples of which ``c = correct`` are right.

    Source: Chen et al., arXiv 2107.03374, section 2.1. The quotient is the product over i = n-c+1..n of (1 - k/i), so
    no binomial is formed and nothing overflows. ``correct`` may be an array of any shape; the result has that shape.
    Raises ``ValueError`` for k > n, k < 1, or c outside [0, n].
    """
    check_k(samples, k)
    counts = np.asarray(correct)
    if counts.size and (counts.min() < 0 or counts.max() > samples or np.any(counts != counts.astype(int))):
        raise ValueError(f"correct = {counts.tolist()} must be whole numbers between 0 and n = {samples}")
    # miss[c] = C(n-c, k) / C(n, k); the factor for i = n-c+1 turns miss[c-1] into miss[c] and is 0 once n-c < k.
    i = np.arange(samples, 0, -1)
    miss = np.concatenate([[1.0], np.cumprod(np.maximum(1.0 - k / i, 0.0))])
    value = 1.0 - miss[counts.astype(int)]
    return float(value) if value.ndim == 0 else value


def majority_at_k(votes: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Expected accuracy of a majority vote among k of the n samples drawn without replacement.

    ``votes`` (length n) holds each sample's answer, ``None`` for a sample without one; ``correct`` (length n) says
    whether the grader accepted it. All accepted answers are one class, however they are written; other answers are
    classes by equality. A sample without an answer uses up its draw and casts no vote.
    Tie rule: m classes that share the highest count win with probability 1/m each. No vote at all is wrong.

    Computed exactly. Counts of a draw without replacement are independent binomials given their sum (any success
    probability; k/n keeps the numbers near 1), so a convolution over classes replaces the sum over C(n, k) subsets.
    """
    n = len(votes)
    check_k(n, k)
    if len(correct) != n:
        raise ValueError(f"votes has {n} entries and correct {len(correct)}; give one of each a sample")
    right = sum(bool(c) for c in correct)
    rivals = Counter(vote for vote, c in zip(votes, correct, strict=True) if not c and vote is not None)
    silent = n - right - sum(rivals.values())
    if right == 0:
        return 0.0
    if k == n:
        best = max([right, *rivals.values()])
        return 0.0 if right < best else 1.0 / (1 + sum(count == best for count in rivals.values()))
    p = k / n
    pmf = {size: binom.pmf(np.arange(size + 1), size, p) for size in {right, silent, n, *rivals.values()}}
    total = 0.0
    for j in range(1, min(right, k) + 1):  # j = votes for the right answer
        total += pmf[right][j] * _win_share(j, k - j, [pmf[size] for size in sorted(rivals.values())], pmf[silent])
    return float(min(1.0, max(0.0, total / pmf[n][k])))


def _win_share(j: int, rest: int, rivals: list[np.ndarray], silent: np.ndarray) -> float:
    """Sum over draws of ``rest`` samples, no rival above j votes, of probability / (1 + rivals with j votes).

    ``rivals`` and ``silent`` are the probabilities of 0, 1, ... draws from each class of answers."""
    ties = min(sum(len(pmf) > j for pmf in rivals), rest // j)
    weight = np.zeros((ties + 1, rest + 1))  # [rivals at j votes, samples used]
    weight[0, : len(silent)] = silent[: rest + 1]
    for pmf in rivals:
        fresh = np.zeros_like(weight)
        for x, mass in enumerate(pmf[: min(j, rest + 1)]):
            fresh[:, x:] += mass * weight[:, : rest + 1 - x]
        if len(pmf) > j and ties:
            fresh[1:, j:] += pmf[j] * weight[:-1, : rest + 1 - j]
        weight = fresh
    return float((weight[:, rest] / (1 + np.arange(ties + 1))).sum())
