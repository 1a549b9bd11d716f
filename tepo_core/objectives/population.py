"""Choices that need the whole mini-batch: the covariance of log-probability and advantage, and the tokens picked by it.

Called once a mini-batch, before the backward passes, outside the loss. The population is the tokens of every micro-batch and
rank whose advantage is not 0: the paper filters groups of equal rewards before it forms a batch. A choice does not depend on
padding, on the order of responses or on their split.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

ROUNDING = 1e-12  # of float64 sums, against the product of the largest values


def centred_products(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Cov_n = (log pi_n - mean log pi)(A_n - mean A), means over the N tokens given (arXiv 2505.22617).

    Means are taken over sorted values, so that the order of the batch moves no digit; what is below rounding is exactly 0."""
    logprobs_N, advantages_N = logprobs_N.detach().double(), advantages_N.detach().double()
    if not logprobs_N.numel():
        return logprobs_N
    centred_N = [values_N - values_N.sort().values.mean() for values_N in (logprobs_N, advantages_N)]
    covariance_N = centred_N[0] * centred_N[1]
    noise = ROUNDING * logprobs_N.abs().max() * advantages_N.abs().max()
    return torch.where(covariance_N.abs() > noise, covariance_N, 0.0)


def identities(logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """A number of every token that follows from its response and its place in it, int64 [B, T]; 0 at padding.

    Hashes of the response's own numbers, summed as integers: padding, order and split of the responses change nothing.
    Tokens of two responses that are equal in every number have equal identities, and it does not matter which is chosen."""
    place_BT = mask_BT.cumsum(-1) * mask_BT
    bits = [x.detach().double().masked_fill(~mask_BT, 0.0).view(torch.int64) for x in (logprobs_BT, advantages_BT)]
    tokens_BT = _mixed(_mixed(bits[0]) + 3 * _mixed(bits[1]) + 7 * _mixed(place_BT)) * mask_BT
    return _mixed(tokens_BT + _mixed(tokens_BT.sum(-1, keepdim=True))) * mask_BT


def _mixed(values: Tensor) -> Tensor:
    """A hash of each int64; products wrap around (constants of splitmix64)."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> 31)


def _all_equal(covariance_N: Tensor) -> bool:
    return not covariance_N.numel() or bool(covariance_N.min() == covariance_N.max())


def largest(covariance_N: Tensor, share: float, identities_N: Tensor) -> Tensor:
    """The floor(share * N) tokens with the largest covariance, bool [N] (KL-Cov). None where all covariances are equal.

    Among equal ones at the edge the identity decides, not the place in the batch."""
    chosen_N = torch.zeros_like(covariance_N, dtype=torch.bool)
    budget = math.floor(share * covariance_N.numel())
    if not budget or _all_equal(covariance_N):
        return chosen_N
    edge = covariance_N.topk(budget).values[-1]
    chosen_N |= covariance_N > edge
    tied = (covariance_N == edge).nonzero()[:, 0]
    first = identities_N[tied].argsort(stable=True)[: budget - int(chosen_N.count_nonzero())]
    chosen_N[tied[first]] = True
    return chosen_N


def random_in_band(
    covariance_N: Tensor, share: float, low: float, high: float, generator: torch.Generator, identities_N: Tensor
) -> Tensor:
    """At most floor(share * N) tokens drawn from those with low < Cov < high, bool [N] (Clip-Cov). None where all
    covariances are equal.

    The draw runs over candidates sorted by covariance and identity, so it does not depend on where a token sits in the batch."""
    chosen_N = torch.zeros_like(covariance_N, dtype=torch.bool)
    if _all_equal(covariance_N):
        return chosen_N
    order_N = identities_N.argsort(stable=True)
    order_N = order_N[covariance_N[order_N].argsort(stable=True)]
    candidates = order_N[((covariance_N > low) & (covariance_N < high))[order_N]]
    budget = min(math.floor(share * covariance_N.numel()), candidates.numel())
    draw = torch.randperm(candidates.numel(), generator=generator, device=generator.device)[:budget]
    chosen_N[candidates[draw.to(candidates.device)]] = True
    return chosen_N


def gather_tokens(values_N: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, slice]:
    """The tokens of all ranks in order of rank, and where this rank's own lie. Without a group: the tokens themselves."""
    if group is None:
        return values_N, slice(0, values_N.numel())
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.long, device=values_N.device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([values_N.numel()], device=values_N.device), group=group)
    sizes = [int(size) for size in sizes]
    parts = [values_N.new_zeros(max(sizes)) for _ in sizes]
    padded = torch.nn.functional.pad(values_N, (0, max(sizes) - values_N.numel()))
    dist.all_gather(parts, padded, group=group)
    start = sum(sizes[:rank])
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]), slice(start, start + sizes[rank])
