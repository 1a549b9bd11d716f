"""Metrics of an update as sums that add over micro-batches and ranks: name -> (numerator, denominator).

Everything stays a tensor on the device; :func:`merge` is the one place where numbers come to the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_core.objectives.surrogates import Surrogate
from tepo_core.objectives.types import LossOutput, TokenBatch

Sums = dict[str, tuple[Tensor, Tensor]]


def token_sums(batch: TokenBatch, surrogate: Surrogate, clipped_BT: Tensor, kl_BT: Tensor | None, charged_BT: Tensor) -> Sums:
    """Sums over the tokens of a cleaned micro-batch, without gradient. ``charged_BT``: tokens that pay the KL penalty.

    kl_old is the k3 estimate of KL(old || policy) on tokens sampled from old. covariance starts as sum(log pi * A);
    :func:`merge` centres it. Entropy sums appear when the batch has entropies."""
    d_BT, advantages_BT, mask_BT = batch.log_ratio_BT, batch.advantages_BT, batch.mask_BT
    ratio_BT = surrogate.ratio_BT.expand_as(d_BT).masked_fill(~mask_BT, 0.0)
    tokens, drift = _count(mask_BT), d_BT.sum()
    sums = {
        "log_ratio": (drift, tokens),
        "abs_log_ratio": (d_BT.abs().sum(), tokens),
        "log_ratio_sq": (_dot(d_BT, d_BT), tokens),
        "kl_old": (torch.expm1(d_BT.clamp(max=20.0)).sum() - drift, tokens),
        "ratio": (ratio_BT.sum(), tokens),
        "ratio_sq": (_dot(ratio_BT, ratio_BT), tokens),
        "logprob": (batch.logprobs_BT.sum(), tokens),
        "advantage": (advantages_BT.sum(), tokens),
        "covariance": (_dot(batch.logprobs_BT, advantages_BT), tokens),
        "clip_low": (_count_clipped(surrogate.clip_low_BT, mask_BT), tokens),
        "clip_high": (_count_clipped(surrogate.clip_high_BT, mask_BT), tokens),
        "clip": (_count(clipped_BT), tokens),
        "mask": (_count(charged_BT), tokens),
    }
    if kl_BT is not None:
        charged = kl_BT.masked_fill(~charged_BT, 0.0).sum()
        sums |= {"kl_penalty": (charged, tokens), "mask_kl": (charged, sums["mask"][0])}
    if batch.entropy_BT is not None:
        sums["entropy"] = (batch.entropy_BT.sum(), tokens)
    if batch.entropy_BT is not None and batch.old_entropy_BT is not None:
        change_BT = batch.entropy_BT - batch.old_entropy_BT
        positive_BT = advantages_BT > 0
        positive = _count(positive_BT)
        sums |= {
            "entropy_change": (change_BT.sum(), tokens),
            "positive": (positive, tokens),
            "positive_entropy_fell": (_count(positive_BT & (change_BT < 0)), positive),
        }
    return sums


def clipped_tokens(surrogate: Surrogate, mask_BT: Tensor) -> Tensor:
    """Tokens that a bound acts on or that the method drops, bool [B, T]."""
    clipped_BT = torch.zeros_like(mask_BT)
    for part_BT in (surrogate.clip_low_BT, surrogate.clip_high_BT, surrogate.dropped_BT):
        if part_BT is not None:
            clipped_BT = clipped_BT | part_BT
    return clipped_BT & mask_BT


def extremes(surrogate: Surrogate, mask_BT: Tensor) -> dict[str, Tensor]:
    """Largest and smallest ratio of the micro-batch, as the method uses it."""
    ratio_BT = surrogate.ratio_BT.expand_as(mask_BT)
    return {
        "ratio_max": ratio_BT.masked_fill(~mask_BT, -torch.inf).amax(),
        "ratio_min": ratio_BT.masked_fill(~mask_BT, torch.inf).amin(),
    }


def merge(
    outputs: Sequence[LossOutput], group: dist.ProcessGroup | None = None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Metrics of a mini-batch from those of its micro-batches (and ranks): ``sums`` {name: [numerator, denominator]} and
    ``values`` {loss, ratio_max, ratio_min}. One transfer to the host. ``sums["covariance"]`` is the centred covariance."""
    names, limits = sorted(outputs[0].sums), ("ratio_max", "ratio_min")
    pairs = torch.stack([torch.stack([torch.stack(o.sums[n]).double() for n in names]) for o in outputs]).sum(0)
    loss = torch.stack([o.loss.detach().double() for o in outputs]).sum()
    table = torch.cat([pairs.flatten(), loss[None]])
    high = torch.stack([o.extremes["ratio_max"] for o in outputs]).amax().double()
    low = torch.stack([o.extremes["ratio_min"] for o in outputs]).amin().double()
    bounds = torch.stack([high, -low])
    if group is not None:
        dist.all_reduce(table, group=group)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    *flat, loss_value, high_value, low_value = torch.cat([table, bounds]).tolist()
    sums = {name: [flat[2 * i], flat[2 * i + 1]] for i, name in enumerate(names)}
    (logprob, tokens), advantage = sums["logprob"], sums["advantage"][0]
    sums["covariance"][0] -= logprob * advantage / tokens if tokens else 0.0
    return sums, {"loss": loss_value, **dict(zip(limits, (high_value, -low_value), strict=True))}


def _dot(a_BT: Tensor, b_BT: Tensor) -> Tensor:
    return torch.dot(a_BT.flatten(), b_BT.flatten())


def _count(mask_BT: Tensor) -> Tensor:
    return mask_BT.count_nonzero()


def _count_clipped(clipped_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    return mask_BT.new_zeros((), dtype=torch.long) if clipped_BT is None else _count(clipped_BT & mask_BT)
