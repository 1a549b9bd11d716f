"""CISPO: clipped importance weights on the log-likelihood."""

from __future__ import annotations

from tepo_core.objectives.options import Weighted
from tepo_core.objectives.ratios import token_ratio
from tepo_core.objectives.registry import register
from tepo_core.objectives.surrogates import Surrogate, weighted_log_likelihood
from tepo_core.objectives.types import TokenBatch


@register(
    "cispo",
    Weighted,
    title="CISPO",
    source="arXiv 2506.13585",
    status="reconstructed",
    equation=r"\frac{1}{N}\sum_{i,t} \mathrm{sg}\big[\min(r_{it}, 1+\varepsilon_+)\big]\, A_i \log\pi_\theta(o_{it})",
    aggregate="token_mean",
    clip=(None, 0.28),
)
def cispo(batch: TokenBatch, options: Weighted) -> Surrogate:
    """sg[clip(r)] A log pi."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    return weighted_log_likelihood(ratio_BT, batch.logprobs_BT, batch.advantages_BT, options.clip)
