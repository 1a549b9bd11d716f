"""Optimisers: torch's own, on float32 masters where the policy is in half precision.

AdamW moves a weight by about the learning rate. A bfloat16 weight of 0.02 has neighbours 1e-4 away, so a step of 1e-6 rounds back
to where it was: of 400 equal steps not one is seen. So the optimiser steps on float32 copies, and the policy gets their rounding
after each step.

Memory a trained parameter, AdamW: float32 16 bytes (weight, gradient, two moments); half precision 18 (weight 2, master 4, gradient
4, moments 8): the gradient of a micro-batch is added to the master's as soon as it is there, and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim

from tepo_core.config import Train, Warmup

BETAS = (0.9, 0.95)  # of the warm-up's AdamW
HALF = (torch.bfloat16, torch.float16)


class MasterOptimizer:
    """A torch optimiser that steps on float32 masters of the half-precision parameters, and on the others themselves.

    Args:
        parameters: what is trained; those that need no gradient are left out.
        make: builds the optimiser from the tensors to step on.

    ``tensors`` are what is stepped on, in the order of the parameters: their ``grad`` is what to clip or to look at. Gradients of
    half-precision parameters are moved there, added up in float32, as soon as a backward pass has them. Hyper-parameters are the
    wrapped optimiser's (``param_groups``). A state holds the masters: a policy and its state continue to equal bytes."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[[list[Tensor]], optim.Optimizer]) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.tensors: list[Tensor] = []
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if parameter.dtype in HALF:
                master = nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(_handing_over_to(master))
                self._pairs.append((parameter, master))
                self.tensors.append(master)
            else:
                self.tensors.append(parameter)
        self.inner = make(self.tensors)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """One update; the policy then holds the masters rounded to its own precision."""
        self.inner.step()
        for parameter, master in self._pairs:
            parameter.copy_(master)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.inner.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.inner.state_dict(), "masters": [master.detach() for _, master in self._pairs]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; the policy itself is restored by its own."""
        self.inner.load_state_dict(state["optimizer"])
        for (_, master), saved in zip(self._pairs, state["masters"], strict=True):
            master.copy_(saved)


def _handing_over_to(master: nn.Parameter) -> Callable[[nn.Parameter], None]:
    @torch.no_grad()
    def hand_over(parameter: nn.Parameter) -> None:
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hand_over


def rl_optimizer(model: nn.Module, cfg: Train) -> MasterOptimizer:
    """AdamW over everything of the policy that is trained."""
    return MasterOptimizer(
        model.parameters(),
        lambda tensors: optim.AdamW(
            tensors, lr=cfg.lr, betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=True
        ),
    )


class WarmupOptimizer:
    """AdamW for all parameters, or Muon for the matrices inside the layers and AdamW for the rest.

    Muon (torch's, with updates scaled to the size of AdamW's, arXiv 2502.16982) is what makes the tiny policy's warm-up dependable:
    AdamW leaves one seed in three on a plateau where operands are not copied from the right place."""

    def __init__(self, model: nn.Module, cfg: Warmup) -> None:
        inside = {id(p) for p in _matrices(model)} if cfg.optimizer == "muon" else set()
        common = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
        matrices = [p for p in model.parameters() if id(p) in inside]
        self.parts: list[MasterOptimizer] = []
        self._stepped_on: dict[int, Tensor] = {}
        if rest:
            self._add(rest, lambda tensors: optim.AdamW(tensors, betas=BETAS, fused=True, **common))
        if matrices:
            self._add(matrices, lambda tensors: optim.Muon(tensors, adjust_lr_fn="match_rms_adamw", **common))

    def _add(self, parameters: list[nn.Parameter], make: Callable[[list[Tensor]], optim.Optimizer]) -> None:
        self.parts.append(MasterOptimizer(parameters, make))
        self._stepped_on |= {id(p): tensor for p, tensor in zip(parameters, self.parts[-1].tensors, strict=True)}

    def tensors(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """What is stepped on for these parameters of the model (frozen ones left out): the tensors whose gradients to clip."""
        return [self._stepped_on[id(p)] for p in parameters if id(p) in self._stepped_on]

    def step(self, lr: float) -> None:
        """One update with this learning rate."""
        for part in self.parts:
            part.param_groups[0]["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

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
