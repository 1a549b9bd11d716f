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
    ends: str,
    normalised: bool = True,
    ahead_log_ratio_BTK: Tensor | None = None,
) -> Tensor:
    """R_it = exp(sum_n beta_n d_i,t+n), n = 0..K-1, [B, T] (MPO, arXiv 2602.14386).

    weights: beta_n before normalisation; ``normalised`` makes their sum 1. ``disjoint``: tokens of one block share the ratio
    of the block's first token; otherwise a window slides with the token. ahead_log_ratio_BTK: d of the multi-token heads,
    [..., n - 1] for token t+n; without it the model's own d_i,t+n is used. Responses must be contiguous in their rows.

    ``ends``, where tokens t+n do not exist (our choice; Z = sum of all beta_n; the last column is what the tokens of a
    response weigh in the gradient at ratio 1, sliding, K = 5, uniform):
      wrap         min(K, T_i) tokens, t+n modulo T_i: the window goes on at the start of the response   1 everywhere
      fold         sum over those that exist, and d_it once more for every n > t, the windows that
                   would have begun before the response                                                 1 everywhere
      truncate     sum over those that exist / Z                                                        .2 .4 .6 .8 1 ... 1
      renormalise  sum over those that exist / the sum of their beta_n                                  .2 .4 ... 1.28 2.28
    With ``disjoint`` the ring of wrap is the block, and a token reads its block from itself on."""
    if ends == "wrap" and disjoint and len(set(weights)) == 1:
        ends = "renormalise" if normalised else "truncate"  # with equal weights a ring is its block: the same, faster
    if ends == "wrap":
        return exp_ratio(_wrapped(log_ratio_BT, valid_BT, weights, disjoint, normalised))
    total_BT = _window_sums(log_ratio_BT, valid_BT, weights, ahead_log_ratio_BTK)
    if ends == "fold":
        place_BT = _places(valid_BT)
        before = [sum(weights[first + 1 :]) for first in range(len(weights))]  # [t]: beta_n with n > t, 0 from K - 1 on
        total_BT = total_BT + log_ratio_BT * valid_BT.new_tensor(before)[place_BT.clamp(max=len(weights) - 1)]
    if normalised:
        # renormalise: a token exists in its own window, so the bound changes padding only
        exist_BT = WindowSum.apply(valid_BT, weights).clamp(min=weights[0]) if ends == "renormalise" else sum(weights)
        total_BT = total_BT / exist_BT
    if disjoint:
        column_T = torch.arange(valid_BT.shape[-1], device=valid_BT.device)
        first_BT = (column_T - _places(valid_BT) % len(weights)).clamp(min=0)
        total_BT = total_BT.gather(-1, first_BT)
    return exp_ratio(total_BT)


def _places(valid_BT: Tensor) -> Tensor:
    """Place of each token in its response, 0.., [B, T]; something >= 0 at padding."""
    return (valid_BT.cumsum(dim=-1).long() - 1).clamp(min=0)


def _window_sums(log_ratio_BT: Tensor, valid_BT: Tensor, weights: list[float], ahead_log_ratio_BTK: Tensor | None) -> Tensor:
    """sum_n beta_n d_i,t+n over the tokens that exist."""
    if ahead_log_ratio_BTK is None:
        return WindowSum.apply(log_ratio_BT, weights)
    total_BT = weights[0] * log_ratio_BT
    for n, beta in enumerate(weights[1 : valid_BT.shape[-1]], start=1):
        total_BT = total_BT + beta * pad(valid_BT[:, n:], (0, n)) * ahead_log_ratio_BTK[..., n - 1]
    return total_BT


def _wrapped(values_BT: Tensor, valid_BT: Tensor, weights: list[float], disjoint: bool, normalised: bool) -> Tensor:
    """sum_n beta_n x[t + n round a ring], n < min(K, size of the ring), over their sum where ``normalised``.

    The ring is the response, or the token's block. Every token is read once with every beta_n, so its weights add up to 1."""
    length_B1 = valid_BT.sum(-1, keepdim=True).long().clamp(min=1)
    if disjoint:
        total_BT, size_BT = _round_blocks(values_BT, _places(valid_BT), length_B1, weights)
    else:
        total_BT, size_BT = WindowSum.apply(values_BT, weights), length_B1
        if width := min(len(weights), valid_BT.shape[-1]) - 1:
            total_BT = _add_starts(total_BT, values_BT, valid_BT.argmax(-1, keepdim=True), length_B1, weights, width)
    if not normalised:
        return total_BT
    upto = [sum(weights[: max(size, 1)]) for size in range(len(weights) + 1)]
    return total_BT / valid_BT.new_tensor(upto)[size_BT.clamp(max=len(weights))]


def _add_starts(
    total_BT: Tensor, values_BT: Tensor, start_B1: Tensor, length_B1: Tensor, weights: list[float], width: int
) -> Tensor:
    """To the window of the j-th token from the end, what it reads of the first tokens m: beta_j+m, j + m < min(K, T_i)."""
    count_K = torch.arange(width, device=values_BT.device)
    steps_KK = count_K[:, None] + 1 + count_K  # j + m, j = 1.. and m = 0..
    padded = values_BT.new_tensor([*weights[: width + 1], *[0.0] * width])
    beta_BKK = padded[steps_KK] * (steps_KK < length_B1[..., None])
    first_BK = values_BT.gather(-1, (start_B1 + count_K).clamp(max=values_BT.shape[-1] - 1))
    tail_BK = (beta_BKK * first_BK[:, None, :]).sum(-1)
    return total_BT.scatter_add(-1, (start_B1 + length_B1 - 1 - count_K).clamp(min=0), tail_BK)


def _round_blocks(values_BT: Tensor, place_BT: Tensor, length_B1: Tensor, weights: list[float]) -> tuple[Tensor, Tensor]:
    """The sum of every token over its block, from itself on, and the size of the block, [B, T]."""
    inside_BT = place_BT % len(weights)
    size_BT = (length_B1 - place_BT + inside_BT).clamp(1, len(weights))
    first_BT = (torch.arange(place_BT.shape[-1], device=values_BT.device) - inside_BT).clamp(min=0)
    total_BT = weights[0] * values_BT
    for n, beta in enumerate(weights[1 : values_BT.shape[-1]], start=1):
        column_BT = (first_BT + (inside_BT + n) % size_BT).clamp(max=values_BT.shape[-1] - 1)
        total_BT = total_BT + beta * (size_BT > n) * values_BT.gather(-1, column_BT)
    return total_BT, size_BT


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
        ends=block.ends,
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
