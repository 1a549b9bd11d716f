"""Choices that need the whole mini-batch: the covariance of log-probability and advantage, and the tokens picked by it.

Called once a mini-batch, before the backward passes, outside the loss. Covariances are taken over the N valid tokens of
every micro-batch and rank; a choice does not depend on padding, on the order of responses or on their split.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def centred_products(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """Cov_n = (log pi_n - mean log pi)(A_n - mean A), means over the N tokens given (arXiv 2505.22617)."""
    logprobs_N, advantages_N = logprobs_N.detach().double(), advantages_N.detach().double()
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def largest(covariance_N: Tensor, share: float) -> Tensor:
    """The floor(share * N) tokens with the largest covariance, bool [N] (KL-Cov)."""
    chosen_N = torch.zeros_like(covariance_N, dtype=torch.bool)
    chosen_N[covariance_N.topk(math.floor(share * covariance_N.numel())).indices] = True
    return chosen_N


def random_in_band(covariance_N: Tensor, share: float, low: float, high: float, generator: torch.Generator) -> Tensor:
    """At most floor(share * N) tokens drawn from those with low < Cov < high, bool [N] (Clip-Cov).

    The draw runs over candidates sorted by covariance, so it does not depend on where a token sits in the batch."""
    order_N = covariance_N.argsort()
    candidates = order_N[((covariance_N > low) & (covariance_N < high))[order_N]]
    budget = min(math.floor(share * covariance_N.numel()), candidates.numel())
    draw = torch.randperm(candidates.numel(), generator=generator, device=generator.device)[:budget]
    chosen_N = torch.zeros_like(covariance_N, dtype=torch.bool)
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
