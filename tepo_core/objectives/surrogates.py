"""Surrogates: what is done with ratio and advantage. Each returns the terms of J (to maximise) and what was clipped.

Events are counted as 0 and 1 in the dtype of the tensors: several times faster on a CPU than bool tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tepo_core.objectives.ratios import exp_ratio, response_mean

Bounds = tuple[float | None, float | None]


class Surrogate(NamedTuple):
    """terms_BT: summands of J before aggregation. ratio_BT: the ratio as the method uses it, [B, T] or [B, 1].
    clip_low_BT / clip_high_BT: 1 on tokens on which the lower / upper bound acts; None when there is no such bound.
    dropped_BT: 1 on tokens left out for another reason. A token is in at most one of the two clip masks."""

    terms_BT: Tensor
    ratio_BT: Tensor
    clip_low_BT: Tensor | None = None
    clip_high_BT: Tensor | None = None
    dropped_BT: Tensor | None = None


def positive(values: Tensor) -> Tensor:
    """1 where the value is above 0, else 0, without gradient."""
    return values.detach().sign().clamp_(min=0)


def clip_events(ratio_BT: Tensor, advantages_BT: Tensor, bounds: Bounds) -> tuple[Tensor | None, Tensor | None]:
    """Where min(r A, clip(r) A) takes the clipped side: low where A < 0 and r < low, high where A > 0 and r > high."""
    low, high = bounds
    return (
        None if low is None else positive(low - ratio_BT) * positive(-advantages_BT),
        None if high is None else positive(ratio_BT - high) * positive(advantages_BT),
    )


def held_at(values_BT: Tensor, *events: tuple[Tensor | None, float | None]) -> Tensor:
    """The values, and on the tokens of each (event, bound) that bound, which has no gradient. Events do not overlap."""
    given = [(event_BT, bound) for event_BT, bound in events if event_BT is not None]
    if not given:
        return values_BT
    held_BT = values_BT * (1 - sum(event_BT for event_BT, _ in given))
    for event_BT, bound in given:
        held_BT = torch.add(held_BT, event_BT, alpha=bound)
    return held_BT


def around_one(clip: Bounds | None) -> Bounds:
    """(eps_low, eps_high) -> bounds of the ratio (1 - eps_low, 1 + eps_high)."""
    low, high = clip or (None, None)
    return (None if low is None else 1 - low, None if high is None else 1 + high)


def ppo_clip(ratio_BT: Tensor, advantages_BT: Tensor, clip: Bounds | None, dual_clip: float | None = None) -> Surrogate:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), written as (r, held at the bound where the bound acts) * A.

    With ``dual_clip`` c also >= c A where A < 0 (arXiv 1912.09729): r is held at c there."""
    low, high = bounds = around_one(clip)
    low_BT, high_BT = clip_events(ratio_BT, advantages_BT, bounds)
    beyond_BT = None if dual_clip is None else positive(ratio_BT - dual_clip) * positive(-advantages_BT)
    held_BT = held_at(ratio_BT, (low_BT, low), (high_BT, high), (beyond_BT, dual_clip))
    if beyond_BT is not None:
        high_BT = beyond_BT if high_BT is None else high_BT + beyond_BT
    return Surrogate(held_BT * advantages_BT, ratio_BT, low_BT, high_BT)


def geometric_clip(log_ratio_BT: Tensor, advantages_BT: Tensor, valid_BT: Tensor, clip: Bounds | None) -> Surrogate:
    """A_i exp(mean_t d'_it), d' = d held at -eps_low where A < 0, at eps_high where A > 0, once beyond it (GMPO)."""
    low, high = clip or (None, None)
    low = None if low is None else -low
    low_BT, high_BT = clip_events(log_ratio_BT, advantages_BT, (low, high))
    ratio_B1 = exp_ratio(response_mean(held_at(log_ratio_BT, (low_BT, low), (high_BT, high)), valid_BT))
    return Surrogate(ratio_B1 * advantages_BT, ratio_B1, low_BT, high_BT)


def weighted_log_likelihood(ratio_BT: Tensor, logprobs_BT: Tensor, advantages_BT: Tensor, clip: Bounds | None) -> Surrogate:
    """sg[clip(r)] A log pi: every token keeps a gradient, only its weight is limited (CISPO, arXiv 2506.13585 eq. 4)."""
    low, high = around_one(clip)
    weight_BT = ratio_BT.detach() if (low, high) == (None, None) else ratio_BT.detach().clamp(low, high)
    low_BT = None if low is None else positive(low - ratio_BT)
    high_BT = None if high is None else positive(ratio_BT - high)
    return Surrogate(weight_BT * advantages_BT * logprobs_BT, ratio_BT, low_BT, high_BT)


def soft_gate(ratio_BT: Tensor, advantages_BT: Tensor, tau_positive: float, tau_negative: float) -> Surrogate:
    """(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (SAPO, arXiv 2511.20347): slope A at r = 1, then fading."""
    tau_BT = tau_negative + (tau_positive - tau_negative) * positive(advantages_BT)
    return Surrogate(4.0 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1.0)) * advantages_BT, ratio_BT)
