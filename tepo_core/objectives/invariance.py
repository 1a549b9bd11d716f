"""How far loss and gradient depend on what they must not depend on: micro-batches, ranks, padding, order, packing.

Used by the tests of every registered method, by the comparison with other libraries and by the notebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tepo_core.objectives.method import Method
from tepo_core.objectives.types import MiniBatchTotals, TokenBatch
from tepo_core.seeding import torch_generator

GRADIENTS = ("logprobs_BT", "entropy_BT", "mtp_logprobs_BTK", "exact_kl_BT")


def random_batch(
    method: Method, *, responses: int = 40, longest: int = 300, seed: int = 0, dtype: torch.dtype = torch.float64
) -> TokenBatch:
    """A mini-batch with everything any method may ask for: lengths 1..longest, ratios on both sides of the clip bounds.

    Random numbers, not the output of a model; the log-probs spread enough for the covariance band of Clip-Cov."""
    generator = torch_generator("invariance", seed)
    shape = (responses, longest)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    lengths_B = torch.randint(1, longest + 1, (responses,), generator=generator)
    mask_BT = torch.arange(longest) < lengths_B[:, None]
    old_BT = -1.5 * normal(*shape).abs() - 0.01
    ahead = max(method.mtp_modules, 1)
    old_ahead_BTK = -normal(*shape, ahead).abs()
    batch = TokenBatch(
        logprobs_BT=old_BT + 0.2 * normal(*shape) + 0.1 * normal(responses, 1),
        old_logprobs_BT=old_BT,
        mask_BT=mask_BT,
        advantages_BT=normal(responses, 1).expand(shape).clone(),
        entropy_BT=normal(*shape).abs(),
        old_entropy_BT=normal(*shape).abs(),
        ref_logprobs_BT=old_BT + 0.3 * normal(*shape),
        mtp_logprobs_BTK=old_ahead_BTK + 0.2 * normal(*shape, ahead) if method.needs_mtp else None,
        old_mtp_logprobs_BTK=old_ahead_BTK if method.needs_mtp else None,
        exact_kl_BT=normal(*shape).abs(),
        weights_BT=1.0 + 0.1 * normal(*shape),
    )
    return with_selection(method, batch)


def with_selection(method: Method, batch: TokenBatch, seed: int = 0, group: object = None) -> TokenBatch:
    """The batch with ``selected_BT`` where the method needs it."""
    if not method.needs_population:
        return batch
    generator = torch_generator("selection", seed)
    selected_BT = method.select(batch.logprobs_BT, batch.advantages_BT, batch.mask_BT, generator, group)
    return replace(batch, selected_BT=selected_BT)


def minibatch_gradient(
    method: Method, batch: TokenBatch, parts: Sequence[Tensor] | None = None, totals: MiniBatchTotals | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a mini-batch worked through in ``parts`` (row indices of the micro-batches; None: at once)."""
    totals = totals or MiniBatchTotals.from_mask(batch.mask_BT, constant=float(batch.mask_BT.shape[1]))
    leaves = {
        name: getattr(batch, name).detach().clone().requires_grad_() for name in GRADIENTS if getattr(batch, name) is not None
    }
    batch = replace(batch, **leaves)
    loss = torch.zeros((), dtype=torch.float64)
    for rows in parts or [torch.arange(len(batch.mask_BT))]:
        out = method.loss(batch.rows(rows), totals)
        out.loss.backward()
        loss += out.loss.detach()
    return loss, {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|found - expected| / |expected|, Euclidean norm over all gradients together."""
    difference = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    size = sum(float(value.double().square().sum()) for value in expected.values())
    return (difference / size) ** 0.5


def chunks(responses: int, size: int) -> list[Tensor]:
    """Row indices of micro-batches of ``size`` responses."""
    return list(torch.arange(responses).split(size))


def shift_columns(batch: TokenBatch, before: int, after: int, fill: float = float("nan")) -> TokenBatch:
    """The same responses with more padding on both sides; padding holds ``fill``."""

    def pad(value: Tensor) -> Tensor:
        value = value.transpose(1, -1) if value.ndim == 3 else value
        if value.dtype == torch.bool:
            padded = torch.nn.functional.pad(value, (before, after), value=False)
        else:
            padded = torch.nn.functional.pad(value, (before, after), value=fill)
        return padded.transpose(1, -1) if value.ndim == 3 else padded

    return replace(batch, **{name: pad(value) for name, value in batch.tensors().items()})


def left_padded(batch: TokenBatch) -> TokenBatch:
    """The same responses, flush right in their rows."""
    width = batch.mask_BT.shape[1]
    source_BT = (torch.arange(width) + batch.mask_BT.sum(-1, keepdim=True)) % width

    def move(value: Tensor) -> Tensor:
        index = source_BT if value.ndim == 2 else source_BT[..., None].expand_as(value)
        return value.gather(1, index)

    return replace(batch, **{name: move(value) for name, value in batch.tensors().items()})


def micro_batch_error(method: Method, size: int, **case: object) -> float:
    """Relative gradient error of micro-batches of ``size`` responses against the whole mini-batch at once."""
    batch = random_batch(method, **case)
    _, whole = minibatch_gradient(method, batch)
    _, split = minibatch_gradient(method, batch, chunks(len(batch.mask_BT), size))
    return relative_error(split, whole)
