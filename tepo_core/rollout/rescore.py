"""The trainer's view of sampled tokens: its own log-probs and exact entropies.

An engine other than the trainer's model computes log-probs with other kernels, and vLLM gives no exact entropies. How far
both are apart is measured by :mod:`tepo_core.objectives.correction`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tepo_core.model.batching import micro_batches
from tepo_core.model.logprobs import sequence_logprobs
from tepo_core.rollout.types import Rollouts


@torch.no_grad()
def rescore(
    model: Any, rollouts: Rollouts, *, pad_id: int, temperature: float, micro_batch_tokens: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probs and exact entropies (nats, float32) of every response token under ``model`` at ``temperature``.

    Rows are batched by length, so that padding is small, and returned in their given order. ``micro_batch_tokens``
    bounds rows x padded length of a forward pass."""
    lengths = [len(p) + len(r) for p, r in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)]
    logprobs: list[Any] = [None] * len(lengths)
    entropies: list[Any] = [None] * len(lengths)
    was_training = model.training
    model.eval()
    try:
        for rows in micro_batches(lengths, micro_batch_tokens):
            logprobs_BT, entropy_BT, _ = sequence_logprobs(
                model,
                [rollouts.prompt_ids[i] for i in rows],
                [rollouts.response_ids[i] for i in rows],
                pad_id=pad_id,
                temperature=temperature,
            )
            logprobs_BT, entropy_BT = logprobs_BT.float().cpu().numpy(), entropy_BT.float().cpu().numpy()
            for b, row in enumerate(rows):
                size = len(rollouts.response_ids[row])
                logprobs[row], entropies[row] = logprobs_BT[b, :size].copy(), entropy_BT[b, :size].copy()
    finally:
        model.train(was_training)
    return logprobs, entropies
