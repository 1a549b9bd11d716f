"""Entropy: what is kept, the law R = -a exp(H) + b, the covariance prediction, and which tokens lose it.

Two quantities have two names throughout. ``entropy`` is the exact entropy of the sampling distribution over the whole
vocabulary at the training temperature, in nats, averaged over sampled tokens. ``entropy_sampled`` is the mean surprisal
-log p of the sampled tokens: the same in expectation, noisier in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tepo_core.analysis.stability import edge_means, trailing_mean

SURPRISE_EDGES = np.array([-np.inf, -1.0, -0.5, -0.2, -0.05, 0.0, 0.05, 0.2, 0.5, 1.0, 2.0, np.inf])
"""Bins of surprisal minus entropy, nats: 0 is a token exactly as surprising as the policy expects."""


def entropy_kept(entropy: Sequence[float], share: float = 0.1) -> float | None:
    """Entropy at the end over entropy at the start, each the mean of a tenth of the run; ``None`` if the start is 0."""
    start, end = edge_means(entropy, share)
    return end / start if start and end is not None else None


FEWEST = 8
"""Rollouts below which no law is fitted: two parameters through a handful of points explain anything."""


@dataclass(frozen=True)
class Law:
    """Least-squares fit of R = -a exp(H) + b. ``ceiling`` is b - a, the reward predicted at H = 0; *_se are standard errors."""

    a: float
    b: float
    a_se: float
    b_se: float
    ceiling: float
    ceiling_se: float
    r2: float
    n: int

    def predict(self, entropy: np.ndarray) -> np.ndarray:
        """Predicted reward at the given entropies (nats)."""
        return self.b - self.a * np.exp(np.asarray(entropy, dtype=float))


def fit_law(entropy: Sequence[float], reward: Sequence[float]) -> Law | None:
    """Fit the entropy law of arXiv 2505.22617 (equation 1) to one run's rollouts.

    Ordinary least squares of R on exp(H). The standard errors assume independent residuals; along a run they are not, so
    spread between seeds is the better guide. ``None`` with fewer than :data:`FEWEST`
    finite points or without spread in H."""
    h, r = np.asarray(entropy, dtype=float), np.asarray(reward, dtype=float)
    keep = np.isfinite(h) & np.isfinite(r)
    x, y = np.exp(h[keep]), r[keep]
    n = len(x)
    spread = float(((x - x.mean()) ** 2).sum()) if n else 0.0
    if n < FEWEST or spread <= 1e-18 * n:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    b = float(y.mean() - slope * x.mean())
    residual = y - (b + slope * x)
    variance = float((residual**2).sum()) / (n - 2)
    total = float(((y - y.mean()) ** 2).sum())

    def error_at(x0: float) -> float:  # standard error of the fitted line at exp(H) = x0
        return float(np.sqrt(variance * (1 / n + (x0 - x.mean()) ** 2 / spread)))

    r2 = 1.0 - float((residual**2).sum()) / total if total > 0 else float("nan")
    return Law(
        a=-slope,
        b=b,
        a_se=float(np.sqrt(variance / spread)),
        b_se=error_at(0.0),
        ceiling=b + slope,
        ceiling_se=error_at(1.0),
        r2=r2,
        n=n,
    )


@dataclass(frozen=True)
class Extrapolation:
    """How a fit on the first part of a run predicts the rest: root mean square error, and mean of predicted minus measured."""

    rmse: float
    bias: float
    fitted: int
    predicted: int


def extrapolate_law(entropy: Sequence[float], reward: Sequence[float], share: float = 1 / 3) -> Extrapolation | None:
    """Fit on the first ``share`` of the rollouts, predict the others from their entropy. ``None`` where there is no fit."""
    h, r = np.asarray(entropy, dtype=float), np.asarray(reward, dtype=float)
    cut = round(share * len(h))
    law = fit_law(h[:cut], r[:cut])
    keep = np.isfinite(h[cut:]) & np.isfinite(r[cut:])
    if law is None or not keep.any():
        return None
    error = (law.predict(h[cut:]) - r[cut:])[keep]
    return Extrapolation(float(np.sqrt((error**2).mean())), float(error.mean()), cut, len(error))


@dataclass(frozen=True)
class CovarianceTest:
    """Measured change of entropy a rollout against the covariance prediction dH ~ -lr Cov(log pi, A)."""

    correlation: float
    sign_agreement: float
    n: int


def covariance_prediction(
    entropy: Sequence[float], covariance: Sequence[float], lr: Sequence[float], window: int = 5
) -> CovarianceTest | None:
    """Compare the change of entropy over rollout s, H(s+1) - H(s), with -lr(s) Cov(s), both smoothed over ``window`` rollouts.

    entropy: at each rollout, before its updates. covariance: mean over the rollout's updates of Cov(log pi, A). lr: of the
    rollout. Pearson correlation, and the share of rollouts in which both have the same sign. Source of the prediction: arXiv
    2505.22617, theorem 1 and 2. ``None`` with fewer than ten pairs or without spread."""
    h = np.asarray(entropy, dtype=float)
    size = min(len(h) - 1, len(covariance), len(lr))
    if size < 10:
        return None
    measured = trailing_mean(np.diff(h)[:size], window)[window - 1 :]
    predicted = trailing_mean(-np.asarray(lr, dtype=float)[:size] * np.asarray(covariance, dtype=float)[:size], window)[
        window - 1 :
    ]
    keep = np.isfinite(measured) & np.isfinite(predicted)
    x, y = predicted[keep], measured[keep]
    if len(x) < 5 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return CovarianceTest(float(np.corrcoef(x, y)[0, 1]), float((np.sign(x) == np.sign(y)).mean()), len(x))


def with_changes(tokens: pd.DataFrame) -> pd.DataFrame:
    """Token records with ``entropy_change`` (now minus at sampling) and ``surprise`` (surprisal minus entropy at
    sampling), nats."""
    return tokens.assign(
        entropy_change=tokens["entropy"] - tokens["entropy_old"],
        surprise=-tokens["logprob_old"] - tokens["entropy_old"],
    )


def by_kind(tokens: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """Means of the token records by ``groups``: one row a group with tokens, entropy, change, log-ratio, shares clipped,
    in the mask, falling."""
    table = with_changes(tokens)
    table = table.assign(
        abs_log_ratio=(table["logprob"] - table["logprob_old"]).abs(),
        entropy_fell=table["entropy_change"] < 0,
        tokens=1,
    )
    means = {
        name: (name, "mean")
        for name in (
            "entropy_old",
            "entropy",
            "entropy_change",
            "abs_log_ratio",
            "clipped",
            "mask",
            "entropy_fell",
            "gradient",
        )
    }
    return table.groupby(list(groups), observed=True, sort=True).agg(tokens=("tokens", "sum"), **means).reset_index()


def fell_by_surprise(tokens: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """Share of tokens with positive advantage whose entropy fell, by bins of surprisal minus entropy.

    Raising a sampled token's probability lowers the entropy of its position only where the token is not too surprising
    (the exact gradient over logits is -p (log p + H)); so the share should fall from left to right, and is no constant 1,
    which is what charging every token with A > 0 would assume. Columns: ``groups``, bin (index), surprise (bin mean),
    tokens, fell."""
    table = with_changes(tokens)
    table = table[(table["advantage"] > 0) & (table["logprob"] != table["logprob_old"])]
    table = table.assign(bin=np.digitize(table["surprise"], SURPRISE_EDGES[1:-1]), fell=table["entropy_change"] < 0, tokens=1)
    return (
        table.groupby([*groups, "bin"], observed=True, sort=True)
        .agg(surprise=("surprise", "mean"), tokens=("tokens", "sum"), fell=("fell", "mean"))
        .reset_index()
    )
