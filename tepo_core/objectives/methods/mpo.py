"""MPO: K consecutive tokens are one action."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tepo_core.objectives.clipped import Clipped, clip_term, clipped, ratio
from tepo_core.objectives.ratios import exp_ratio
from tepo_core.objectives.registry import register
from tepo_core.objectives.types import TokenBatch


def block_ratio(
    log_ratio_BT: Tensor,
    valid_BT: Tensor,
    weights: list[float],
    *,
    disjoint: bool,
    normalised: bool = True,
    ahead_log_ratio_BTK: Tensor | None = None,
) -> Tensor:
    """R_it = exp(sum_n beta_n d_i,t+n), n = 0..K-1, [B, T] (MPO, arXiv 2602.14386).

    weights: beta_n before normalisation. ``normalised`` divides by the sum of the beta_n whose token exists, so that the
    end of a response needs no special case. ``disjoint``: tokens of one block share the ratio of the block's first token;
    otherwise a window slides with the token. ahead_log_ratio_BTK: d of the multi-token heads, [..., n - 1] for token t+n;
    without it the model's own d_i,t+n is used. Responses must be contiguous in their rows."""
    if ahead_log_ratio_BTK is None:
        total_BT = WindowSum.apply(log_ratio_BT, weights)
    else:
        total_BT = weights[0] * log_ratio_BT
        for n, beta in enumerate(weights[1 : valid_BT.shape[-1]], start=1):
            total_BT = total_BT + beta * pad(valid_BT[:, n:], (0, n)) * ahead_log_ratio_BTK[..., n - 1]
    if normalised:
        weight_BT = WindowSum.apply(valid_BT, weights)
        total_BT = total_BT / weight_BT.clamp(min=weights[0])  # a token exists in its own window: this changes padding only
    if disjoint:
        position_BT = (valid_BT.cumsum(dim=-1).long() - 1).clamp(min=0)
        column_T = torch.arange(valid_BT.shape[-1], device=valid_BT.device)
        first_BT = (column_T - position_BT % len(weights)).clamp(min=0)
        total_BT = total_BT.gather(-1, first_BT)
    return exp_ratio(total_BT)


class WindowSum(torch.autograd.Function):
    """sum_n beta_n x[t + n] with zeros beyond the end, [B, T]; its derivative is the same sum looking back."""

    @staticmethod
    def forward(ctx: Any, values_BT: Tensor, weights: list[float]) -> Tensor:
        ctx.weights = weights
        total_BT = weights[0] * values_BT
        for n, beta in enumerate(weights[1 : values_BT.shape[-1]], start=1):
            total_BT[:, :-n].add_(values_BT[:, n:], alpha=beta)
        return total_BT

    @staticmethod
    def backward(ctx: Any, upstream_BT: Tensor) -> tuple[Tensor, None]:
        gradient_BT = ctx.weights[0] * upstream_BT
        for n, beta in enumerate(ctx.weights[1 : upstream_BT.shape[-1]], start=1):
            gradient_BT[:, n:].add_(upstream_BT[:, :-n], alpha=beta)
        return gradient_BT, None


@ratio("block")
def _block(batch: TokenBatch, options: Clipped) -> Tensor:
    block = options.block
    ahead_BTK = batch.mtp_logprobs_BTK - batch.old_mtp_logprobs_BTK if block.logprobs == "mtp" else None
    return block_ratio(
        batch.log_ratio_BT,
        batch.valid_BT,
        block.beta(),
        disjoint=block.kind == "disjoint",
        normalised=block.form == "normalised",
        ahead_log_ratio_BTK=ahead_BTK,
    )


register(
    "mpo",
    Clipped,
    title="MPO",
    source="arXiv 2602.14386",
    status="reconstructed",
    equation=rf"\frac{{1}}{{N}}\sum_{{i,t}} {clip_term('R_{it}')}, \quad "
    r"R_{it} = \exp\Big(\sum_{n=0}^{K-1} \beta_n d_{i,t+n}\Big), \quad \sum_n \beta_n = 1",
    ratio="block",
    block={"size": 5},
    aggregate="token_mean",
    clip=(0.2, 0.2),
)(clipped)
