"""Importance ratios: how d_it = log pi_theta - log pi_old becomes one positive number a token.

Every function takes d with zeros at padding, ``valid_BT`` with 1 on tokens and 0 at padding, and returns [B, T] or [B, 1]
(one value for the whole response).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import hardtanh, pad

LOG_LIMIT = 20.0  # exp(20) = 5e8: any ratio beyond is clipped by every method; without the limit inf * 0 makes NaN gradients


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """exp(d), finite for every finite d: |d| is limited to 20."""
    return hardtanh(log_ratio, -LOG_LIMIT, LOG_LIMIT).exp()  # clamp, with a backward pass of one kernel instead of five


def response_mean(values_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Mean over the tokens of each response, [B, 1]; 0 for a row without tokens. ``values_BT`` is zero at padding."""
    return values_BT.sum(dim=-1, keepdim=True) / valid_BT.sum(dim=-1, keepdim=True).clamp(min=1)


def token_ratio(log_ratio_BT: Tensor) -> Tensor:
    """r_it = exp(d_it), [B, T] (PPO, GRPO)."""
    return exp_ratio(log_ratio_BT)


def sequence_ratio(log_ratio_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """s_i = exp(mean_t d_it), [B, 1]: the geometric mean of the token ratios (GSPO, arXiv 2507.18071 sec. 4.1; TEPO)."""
    return exp_ratio(response_mean(log_ratio_BT, valid_BT))


def sequence_token_ratio(log_ratio_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """sg[s_i] * pi_theta / sg[pi_theta], [B, T]: the value of s_i with the gradient of the token itself (GSPO-token,
    arXiv 2507.18071 sec. 4.3)."""
    sequence_B1 = sequence_ratio(log_ratio_BT, valid_BT).detach()
    return sequence_B1 * (log_ratio_BT - log_ratio_BT.detach()).exp()


def power_mean_ratio(log_ratio_BT: Tensor, valid_BT: Tensor, p: float) -> Tensor:
    """rho_i = (mean_t r_it^p)^(1/p), [B, 1]; p = 1 arithmetic, p = 0 (the limit) geometric (arXiv 2605.12058).

    Written around the mean of d with expm1 and log1p, so that small p loses no digits."""
    mean_B1 = response_mean(log_ratio_BT, valid_BT)
    if p == 0:
        return exp_ratio(mean_B1)
    limit = LOG_LIMIT / max(1.0, abs(p))
    powers_BT = torch.expm1(p * (log_ratio_BT - mean_B1).clamp(-limit, limit)) * valid_BT
    return exp_ratio(mean_B1 + torch.log1p(response_mean(powers_BT, valid_BT)) / p)


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
