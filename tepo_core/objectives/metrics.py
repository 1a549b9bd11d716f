"""Metrics of an update as sums that add over micro-batches and ranks: name -> (numerator, denominator).

Everything stays a tensor on the device; :func:`merge` is the one place where numbers come to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_core.objectives.surrogates import Surrogate, positive
from tepo_core.objectives.types import LossOutput, TokenBatch

Sums = dict[str, tuple[Tensor, Tensor]]
FAR = 1e30  # beyond every ratio: exp_ratio ends at e^20


def token_sums(batch: TokenBatch, surrogate: Surrogate, clipped_BT: Tensor, kl_BT: Tensor | None, charged_BT: Tensor) -> Sums:
    """Sums over the tokens of a prepared micro-batch, without gradient. ``charged_BT``: 1 on tokens that pay the KL penalty.

    kl_old is the k3 estimate of KL(old || policy) on tokens sampled from old. covariance starts as sum(log pi * A);
    :func:`merge` centres it. ratio_dev_sq is the sum of (ratio - 1)^2, from which a spread of 1e-4 can be told, as it cannot from the
    squares of numbers near 1. Entropy sums appear when the batch has entropies."""
    d_BT, advantages_BT, valid_BT = batch.log_ratio_BT, batch.advantages_BT, batch.valid_BT
    tokens, drift = valid_BT.sum(), d_BT.sum()
    ratio, ratio_dev_sq = _ratio_sums(surrogate.ratio_BT, valid_BT)
    sums = {
        "log_ratio": drift,
        "abs_log_ratio": d_BT.abs().sum(),
        "log_ratio_sq": _dot(d_BT, d_BT),
        "kl_old": d_BT.clamp(max=20.0).expm1_().sum() - drift,
        "ratio": ratio,
        "ratio_dev_sq": ratio_dev_sq,
        "logprob": batch.logprobs_BT.sum(),
        "advantage": advantages_BT.sum(),
        "covariance": _dot(batch.logprobs_BT, advantages_BT),
        "clip_low": _total(surrogate.clip_low_BT, valid_BT),
        "clip_high": _total(surrogate.clip_high_BT, valid_BT),
        "clip": clipped_BT.sum(),
        "mask": charged_BT.sum(),
    }
    if kl_BT is not None:
        sums["kl_penalty"] = _dot(kl_BT, charged_BT)
    if batch.entropy_BT is not None:
        sums["entropy"] = batch.entropy_BT.sum()
    shares = {}
    if batch.entropy_BT is not None and batch.old_entropy_BT is not None:
        change_BT, positive_BT = batch.entropy_BT - batch.old_entropy_BT, positive(advantages_BT)
        sums |= {"entropy_change": change_BT.sum(), "positive": positive_BT.sum()}
        shares["positive_entropy_fell"] = (_dot(positive_BT, positive(-change_BT)), sums["positive"])
    if kl_BT is not None:
        shares["mask_kl"] = (sums["kl_penalty"], sums["mask"])
    return {name: (value, tokens) for name, value in sums.items()} | shares


def penalty_sums(like: Tensor, kl_gradient_BT: Tensor | None, gradient_BT: Tensor | None) -> Sums:
    """kl_gradient_sq: sums of squares of dpenalty/dlogprob and of the rest of dJ/dlogprob; :func:`merge` takes the root of
    their ratio, |g_KL| / |g_objective|, which is what beta is chosen by. What is not there counts 0, a scalar like ``like``."""
    own, other = (torch.zeros_like(like) if part is None else _dot(part, part) for part in (kl_gradient_BT, gradient_BT))
    return {"kl_gradient_sq": (own, other)}


def clipped_tokens(surrogate: Surrogate, valid_BT: Tensor) -> Tensor:
    """1 on tokens that a bound acts on or that the method drops, [B, T]."""
    parts = (surrogate.clip_low_BT, surrogate.clip_high_BT, surrogate.dropped_BT)
    given = [part_BT for part_BT in parts if part_BT is not None]
    return sum(given).clamp(max=1) * valid_BT if given else torch.zeros_like(valid_BT)


def extremes(ratio_BT: Tensor, valid_BT: Tensor) -> dict[str, Tensor]:
    """Largest and smallest ratio of the micro-batch, as the method uses it ([B, T] or [B, 1])."""
    absent_BT = 1 - _weights(ratio_BT, valid_BT).clamp(max=1)
    return {
        "ratio_max": torch.sub(ratio_BT, absent_BT, alpha=FAR).amax(),
        "ratio_min": torch.add(ratio_BT, absent_BT, alpha=FAR).amin(),
    }


def merge(
    outputs: Sequence[LossOutput], group: dist.ProcessGroup | None = None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Metrics of a mini-batch from those of its micro-batches (and ranks): ``sums`` {name: [numerator, denominator]} and
    ``values`` {loss, ratio_max, ratio_min, with a sampled penalty kl_gradient_ratio}. One transfer to the host.
    ``sums["covariance"]`` is the centred covariance."""
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
    values = {"loss": loss_value, **dict(zip(limits, (high_value, -low_value), strict=True))}
    own, other = sums.get("kl_gradient_sq", (0.0, 0.0))
    if other:  # beside an objective without gradient there is no ratio
        values["kl_gradient_ratio"] = math.sqrt(own / other)
    return sums, values


def _dot(a_BT: Tensor, b_BT: Tensor) -> Tensor:
    return torch.dot(a_BT.flatten(), b_BT.flatten())


def _total(events_BT: Tensor | None, valid_BT: Tensor) -> Tensor:
    return valid_BT.new_zeros(()) if events_BT is None else _dot(events_BT.expand_as(valid_BT), valid_BT)


def _weights(ratio_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """How many tokens each entry of the ratio stands for: T_i for one ratio a response."""
    return valid_BT if ratio_BT.shape == valid_BT.shape else valid_BT.sum(-1, keepdim=True)


def _ratio_sums(ratio_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
    """sum r, in float64, and sum (r - 1)^2 over the tokens. Near 1 the difference is exact."""
    weights_BT, beyond_BT = _weights(ratio_BT, valid_BT), ratio_BT - 1
    weighted_BT = beyond_BT * weights_BT
    return weighted_BT.sum(dtype=torch.float64) + weights_BT.sum(dtype=torch.float64), _dot(weighted_BT, beyond_BT)
