"""HölderPO: one ratio a response, a power mean of its token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from tepo_core.objectives.clipped import Clipped, clip_term, clipped, ratio
from tepo_core.objectives.ratios import LOG_LIMIT, exp_ratio, response_mean
from tepo_core.objectives.registry import register
from tepo_core.objectives.types import TokenBatch


def power_mean_ratio(log_ratio_BT: Tensor, valid_BT: Tensor, p: float) -> Tensor:
    """rho_i = (mean_t r_it^p)^(1/p), [B, 1]; p = 1 arithmetic, p = 0 (the limit) geometric (arXiv 2605.12058).

    Written around the mean of d with expm1 and log1p, so that small p loses no digits."""
    mean_B1 = response_mean(log_ratio_BT, valid_BT)
    if p == 0:
        return exp_ratio(mean_B1)
    limit = LOG_LIMIT / max(1.0, abs(p))
    powers_BT = torch.expm1(p * (log_ratio_BT - mean_B1).clamp(-limit, limit)) * valid_BT
    return exp_ratio(mean_B1 + torch.log1p(response_mean(powers_BT, valid_BT)) / p)


@ratio("power_mean")
def _power_mean(batch: TokenBatch, options: Clipped) -> Tensor:
    return power_mean_ratio(batch.log_ratio_BT, batch.valid_BT, options.p)


RHO = r"\rho_i"
register(
    "holder",
    Clipped,
    title="HölderPO",
    source="arXiv 2605.12058",
    status="known",
    equation=rf"\frac{{1}}{{B}}\sum_i {clip_term(RHO)}, \quad "
    r"\rho_i = \Big(\frac{1}{T_i}\sum_t r_{it}^{\,p}\Big)^{1/p}",
    ratio="power_mean",
    p=1.0,
    aggregate="seq_mean_token_mean",
    clip=(0.2, 0.2),
)(clipped)
