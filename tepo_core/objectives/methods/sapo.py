"""SAPO: a soft gate in the place of the clip."""

from __future__ import annotations

from tepo_core.objectives.options import SoftGate
from tepo_core.objectives.ratios import token_ratio
from tepo_core.objectives.registry import register
from tepo_core.objectives.surrogates import Surrogate, soft_gate
from tepo_core.objectives.types import TokenBatch


@register(
    "sapo",
    SoftGate,
    title="SAPO",
    source="arXiv 2511.20347",
    status="known",
    equation=r"\frac{1}{B}\sum_i \frac{1}{T_i}\sum_t \frac{4}{\tau_i}\,\sigma\big(\tau_i (r_{it}-1)\big) A_i, \quad "
    r"\tau_i = \begin{cases} \tau_+ & A_i > 0 \\ \tau_- & A_i \le 0 \end{cases}",
    aggregate="seq_mean_token_mean",
)
def sapo(batch: TokenBatch, options: SoftGate) -> Surrogate:
    """(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A."""
    ratio_BT = token_ratio(batch.log_ratio_BT)
    return soft_gate(ratio_BT, batch.advantages_BT, options.tau_positive, options.tau_negative)
