"""Advantages from the rewards of a group of responses to one prompt. Shapes: P prompts, G responses a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

ADVANTAGES = ("group", "centred", "loo")


def compute_advantages(rewards_PG: Tensor, kind: str = "group") -> Tensor:
    """Advantages [P, G] in the dtype of the rewards (float32 for integers); a group of equal rewards gives exactly 0.

    group: (r - mean) / std, std with G - 1 (GRPO, arXiv 2402.03300 sec. 4.1.2; as in verl and TRL, without their epsilon).
    centred: r - mean (Dr. GRPO, arXiv 2503.20783). loo: r - mean of the others (RLOO, arXiv 2402.14740).
    Raises ValueError for an unknown kind, a shape other than [P, G], a group of one, or a reward that is not finite."""
    if kind not in ADVANTAGES:
        raise ValueError(f"advantage = {kind!r}; allowed: {', '.join(ADVANTAGES)}")
    rewards_PG = torch.as_tensor(rewards_PG)
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards_PG must be [P, G]; its shape is {list(rewards_PG.shape)}")
    if rewards_PG.shape[1] < 2:
        raise ValueError("a group of one response has no advantage: its mean is itself; use group_size >= 2")
    if not bool(rewards_PG.isfinite().all()):
        prompt, sample = (int(i) for i in (~rewards_PG.isfinite()).nonzero()[0])
        raise ValueError(
            f"reward of prompt {prompt}, response {sample} is {float(rewards_PG[prompt, sample])}; rewards must be finite"
        )
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.float32
    exact_PG = rewards_PG.double()
    centred_PG = exact_PG - exact_PG.mean(dim=1, keepdim=True)
    if kind == "loo":
        centred_PG = centred_PG * (rewards_PG.shape[1] / (rewards_PG.shape[1] - 1))
    if kind == "group":
        centred_PG = centred_PG / exact_PG.std(dim=1, keepdim=True)
    flat_P1 = (exact_PG == exact_PG[:, :1]).all(dim=1, keepdim=True)  # by value: a rounded mean would leave 1e-17, not 0
    return centred_PG.masked_fill(flat_P1, 0.0).to(dtype)
