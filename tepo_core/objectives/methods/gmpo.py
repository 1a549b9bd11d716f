"""GMPO: the geometric mean with the clip inside."""

from __future__ import annotations

from tepo_core.objectives.options import Weighted
from tepo_core.objectives.registry import register
from tepo_core.objectives.surrogates import Surrogate, geometric_clip
from tepo_core.objectives.types import TokenBatch


@register(
    "gmpo",
    Weighted,
    title="GMPO",
    source="arXiv 2507.20673",
    status="known",
    equation=r"\frac{1}{B}\sum_i A_i \exp\Big(\frac{1}{T_i}\sum_t \tilde d_{it}\Big), \quad "
    r"\tilde d_{it} = \begin{cases} \min(d_{it}, \varepsilon_+) & A_i > 0 \\"
    r" \max(d_{it}, -\varepsilon_-) & A_i < 0 \end{cases}",
    aggregate="seq_mean_token_mean",
    clip=(0.4, 0.4),
)
def gmpo(batch: TokenBatch, options: Weighted) -> Surrogate:
    """A_i (prod_t r'_it)^(1/T_i), log r' limited to [-eps_low, eps_high] by the sign of A. Bounds are log-ratios."""
    return geometric_clip(batch.log_ratio_BT, batch.advantages_BT, batch.valid_BT, options.clip)
