"""REINFORCE: the policy gradient without a ratio."""

from __future__ import annotations

from tepo_core.objectives.options import Common
from tepo_core.objectives.ratios import token_ratio
from tepo_core.objectives.registry import register
from tepo_core.objectives.surrogates import Surrogate
from tepo_core.objectives.types import TokenBatch


@register(
    "reinforce",
    title="REINFORCE",
    source="Williams 1992",
    status="known",
    equation=r"\frac{1}{N}\sum_{i,t} A_i \log\pi_\theta(o_{it})",
    aggregate="token_mean",
)
def reinforce(batch: TokenBatch, options: Common) -> Surrogate:
    """A log pi: no ratio, no clip. The token ratio is only reported."""
    return Surrogate(batch.advantages_BT * batch.logprobs_BT, token_ratio(batch.log_ratio_BT.detach()))
