"""RMS normalisation with a gradient of its own, for training in float32 on a CPU.

The forms in transformers are five elementwise operations; autograd keeps the result of each and walks back through
fifteen. A tiny policy spends a third of an update there. With x of D units, r = (mean(x^2) + eps)^(-1/2), n = r x and y = w n:

    dL/dx = r (w g - n mean(w g n)),    dL/dw = sum over rows of g n,    where g = dL/dy

so one number a row is kept beside the input. Values are those of the original up to rounding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Classes of transformers that compute w * x / sqrt(mean(x^2) + variance_epsilon). Others (1 + w, gated) are left alone.
PLAIN_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}


class RMSNormFunction(torch.autograd.Function):
    """``apply(x, weight_D, epsilon)`` for x [..., D]: weight * x / sqrt(mean(x^2, -1) + epsilon). Differentiable once."""

    @staticmethod
    def forward(ctx, x, weight_D, epsilon):
        scale = x.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight_D, scale = ctx.saved_tensors
        D = x.shape[-1]
        normal_ND = (x * scale).reshape(-1, D)
        grad_ND = grad.reshape(-1, D)
        product_ND = grad_ND * normal_ND
        grad_weight_D = product_ND.sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight_D, None
        along_N1 = torch.mv(product_ND, weight_D).div_(D)[:, None]
        grad_ND = (grad_ND * weight_D).addcmul_(normal_ND, along_N1, value=-1).mul_(scale.reshape(-1, 1))
        return grad_ND.view(x.shape), grad_weight_D, None


def use_lean_norms(model: Any) -> int:
    """Give every plain RMS norm of the model the gradient above; returns how many there are.

    It is used where input and weight are float32 on a CPU, and the module's own form everywhere else."""
    found = [module for module in model.modules() if _is_plain(type(module))]
    for module in found:
        module.forward = functools.partial(_forward, module)  # copies and pickles with its module, unlike a closure
    return len(found)


def _is_plain(kind: type) -> bool:
    return kind.__name__ in PLAIN_NORMS and kind.__module__.startswith("transformers.")


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    if not hidden_states.dtype == self.weight.dtype == torch.float32 or hidden_states.device.type != "cpu":
        return type(self).forward(self, hidden_states)
    if torch.is_inference_mode_enabled():  # sampling, many small calls
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
    return RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)
