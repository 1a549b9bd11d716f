"""Advantages from the rewards of a group of responses to one prompt. Shapes: P prompts, G responses a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

ADVANTAGES = ("group", "centred", "loo")


def compute_advantages(rewards_PG: Tensor, kind: str = "group", graded_PG: Tensor | None = None) -> Tensor:
    """Advantages [P, G] in the dtype of the rewards (float32 for integers); a group of equal rewards gives exactly 0.

    ``graded_PG`` (booleans; None: all) says which responses have a reward. The others are in no mean or std, whatever stands in
    their place, and have advantage 0: what a group of fewer responses would give. Fewer than two graded: all 0.

    group: (r - mean) / std, std with G - 1 (GRPO, arXiv 2402.03300 sec. 4.1.2; as in verl and TRL, without their epsilon).
    centred: r - mean (Dr. GRPO, arXiv 2503.20783). loo: r - mean of the others (RLOO, arXiv 2402.14740).
    Raises ValueError for an unknown kind, a shape other than [P, G], a group of one, or a graded reward that is not finite."""
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage = {kind!r}; allowed: {', '.join(ADVANTAGES)}")
    rewards_PG = torch.as_tensor(rewards_PG)
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards_PG must be [P, G]; its shape is {list(rewards_PG.shape)}")
    if rewards_PG.shape[1] < 2:
        raise ValueError("a group of one response has no advantage: its mean is itself; use group_size >= 2")
    graded_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if graded_PG is None else torch.as_tensor(graded_PG)
    if graded_PG.dtype != torch.bool or graded_PG.shape != rewards_PG.shape:
        raise ValueError(f"graded_PG must be booleans of the shape of rewards_PG, {list(rewards_PG.shape)}")
    unusable_PG = graded_PG & ~rewards_PG.isfinite()
    if bool(unusable_PG.any()):
        prompt, sample = (int(i) for i in unusable_PG.nonzero()[0])
        raise ValueError(
            f"reward of prompt {prompt}, response {sample} is {float(rewards_PG[prompt, sample])}; rewards must be finite"
        )
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.float32
    exact_PG = rewards_PG.double().masked_fill(~graded_PG, 0.0)
    count_P1 = graded_PG.sum(dim=1, keepdim=True).double()
    centred_PG = (exact_PG - exact_PG.sum(dim=1, keepdim=True) / count_P1.clamp(min=1)) * graded_PG
    others_P1 = (count_P1 - 1).clamp(min=1)
    if kind == "loo":
        centred_PG = centred_PG * (count_P1 / others_P1)
    if kind == "group":
        centred_PG = centred_PG / (centred_PG.square().sum(dim=1, keepdim=True) / others_P1).sqrt()
    # By value: a rounded mean would leave 1e-17, not 0.
    least_P1 = exact_PG.masked_fill(~graded_PG, torch.inf).amin(dim=1, keepdim=True)
    most_P1 = exact_PG.masked_fill(~graded_PG, -torch.inf).amax(dim=1, keepdim=True)
    return centred_PG.masked_fill((least_P1 >= most_P1) | ~graded_PG, 0.0).to(dtype)
