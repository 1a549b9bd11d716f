"""Clip-Cov and KL-Cov: tokens chosen by the covariance of log-probability and advantage (see ``Method.select``)."""

from __future__ import annotations

from tepo_core.objectives.clipped import clip_term
from tepo_core.objectives.options import ClipCov, KLCov
from tepo_core.objectives.ratios import token_ratio
from tepo_core.objectives.registry import register
from tepo_core.objectives.surrogates import Surrogate, ppo_clip
from tepo_core.objectives.types import TokenBatch


@register(
    "clip_cov",
    ClipCov,
    title="Clip-Cov",
    source="arXiv 2505.22617",
    status="known",
    equation=rf"\frac{{1}}{{N}}\sum_{{(i,t)\notin I}} {clip_term('r_{it}')}, \quad "
    r"I \sim \lfloor qN\rfloor \text{ of } \{(i,t): \omega_- < \mathrm{Cov}_{it} < \omega_+\}",
    aggregate="token_mean",
    clip=(None, 1.0),
)
def clip_cov(batch: TokenBatch, options: ClipCov) -> Surrogate:
    """PPO clip, and no gradient at all for the tokens that ``Method.select`` dropped; they still count in N."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    full = ppo_clip(ratio_BT, batch.advantages_BT, options.clip)
    dropped_BT = batch.selected_BT.to(ratio_BT.dtype)
    return full._replace(terms_BT=full.terms_BT * (1 - dropped_BT), dropped_BT=dropped_BT)


@register(
    "kl_cov",
    KLCov,
    title="KL-Cov",
    source="arXiv 2505.22617",
    status="known",
    equation=r"\frac{1}{N}\sum_{i,t} r_{it} A_i - \frac{\beta}{N}\sum_{(i,t)\in I} |d_{it}|, \quad "
    r"I = \text{top } \lfloor kN\rfloor \text{ by } \mathrm{Cov}_{it}",
    aggregate="token_mean",
    kl={"reference": "old", "estimator": "abs", "sampling": "unweighted", "beta": 1.0, "mask": "selected"},
)
def kl_cov(batch: TokenBatch, options: KLCov) -> Surrogate:
    """r A without a clip; the KL to the sampling policy is charged on the tokens that ``Method.select`` chose."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    return Surrogate(ratio_BT * batch.advantages_BT, ratio_BT)
