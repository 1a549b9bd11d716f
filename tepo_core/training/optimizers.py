"""Optimisers of the warm-up. RL uses AdamW alone (:mod:`tepo_core.training.trainer`)."""

from __future__ import annotations

from typing import Any

from torch import nn, optim

from tepo_core.config import Warmup

BETAS = (0.9, 0.95)


class WarmupOptimizer:
    """AdamW for all parameters, or Muon for the matrices inside the layers and AdamW for the rest.

    Muon (torch's, with updates scaled to the size of AdamW's, arXiv 2502.16982) is what makes the tiny policy's warm-up dependable:
    AdamW leaves one seed in three on a plateau where operands are not copied from the right place."""

    def __init__(self, model: nn.Module, cfg: Warmup) -> None:
        inside = {id(p) for p in _matrices(model)} if cfg.optimizer == "muon" else set()
        common = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
        self.parts: list[optim.Optimizer] = [optim.AdamW(rest, betas=BETAS, fused=True, **common)] if rest else []
        if inside:
            matrices = [p for p in model.parameters() if id(p) in inside]
            self.parts.append(optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **common))

    def step(self, lr: float) -> None:
        """One update with this learning rate."""
        for part in self.parts:
            part.param_groups[0]["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear layers, embeddings and output matrix left out."""
    head = model.get_output_embeddings()
    tied = set() if head is None else {id(head.weight)}
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return [weight for weight in linear if weight.requires_grad and id(weight) not in tied]
