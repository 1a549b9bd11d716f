"""Checks of a mini-batch's tensors before the loss. They read values, so they run once, outside the hot path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tepo_core.objectives.types import BatchError, NonFiniteError, TokenBatch

if TYPE_CHECKING:
    from tepo_core.objectives.method import Method

ONE_ADVANTAGE = {"sequence", "power_mean"}


def validate(method: Method, batch: TokenBatch) -> None:
    """Raise :class:`BatchError` for wrong shapes, missing tensors, bad numbers, or advantages the method cannot take."""
    _check_shapes(batch)
    check_present(method, batch)
    if not bool(batch.mask_BT.any()):
        raise BatchError("mask_BT selects no token in the whole mini-batch; there is nothing to average over")
    for name, tensor in batch.tensors().items():
        if tensor.is_floating_point():
            _check_finite(name, tensor, batch.mask_BT)
    ratio = getattr(method.settings, "ratio", None)
    if ratio in ONE_ADVANTAGE or method.preset == "gmpo":
        _check_constant(method.name, ratio or "geometric mean", batch)
    if ratio == "block":
        _check_contiguous(batch.mask_BT)


def _check_shapes(batch: TokenBatch) -> None:
    shape = tuple(batch.mask_BT.shape)
    if batch.mask_BT.dtype != torch.bool or len(shape) != 2:
        raise BatchError(f"mask_BT must be bool [B, T]; it is {batch.mask_BT.dtype} {list(shape)}")
    for name, tensor in batch.tensors().items():
        expected = shape + tuple(tensor.shape[2:]) if name.endswith("_BTK") else shape
        if tuple(tensor.shape) != expected:
            raise BatchError(f"{name} has shape {list(tensor.shape)}, mask_BT {list(shape)}; they must agree in [B, T]")


def check_present(method: Method, batch: TokenBatch) -> None:
    """Raise :class:`BatchError` naming a tensor that the method needs and that is missing. Reads no value: costs nothing."""
    kl = method.settings.kl
    estimators = () if kl is None else (kl.estimator, kl.gradient)
    wanted = {
        "ref_logprobs_BT": (
            method.needs_reference and set(estimators) != {"exact"},
            "kl.reference = ref; configure a reference policy or use kl.reference: old",
        ),
        "exact_kl_BT": (method.needs_exact_kl, "kl.estimator or kl.gradient = exact"),
        "selected_BT": (method.needs_population, "tokens chosen over the mini-batch; call Method.select first"),
        "entropy_BT": (method.needs_entropy, "the entropy of the current policy"),
        "old_entropy_BT": (method.settings.entropy_test == "exact", "entropy_test = exact"),
        "mtp_logprobs_BTK": (method.needs_mtp, "block.logprobs = mtp; build the policy with MTP modules"),
        "old_mtp_logprobs_BTK": (method.needs_mtp, "block.logprobs = mtp; build the policy with MTP modules"),
    }
    for name, (needed, why) in wanted.items():
        if needed and getattr(batch, name) is None:
            raise BatchError(f"method {method.name} needs {name}, which is missing: {why}")
    if method.needs_mtp and batch.mtp_logprobs_BTK.shape[-1] < method.mtp_modules:
        given = batch.mtp_logprobs_BTK.shape[-1]
        raise BatchError(
            f"method {method.name} needs {method.mtp_modules} MTP heads (block.size - 1), mtp_logprobs_BTK has {given}"
        )


def _check_finite(name: str, tensor: Tensor, mask_BT: Tensor) -> None:
    bad_BT = ~tensor.isfinite()
    bad_BT = (bad_BT.any(dim=-1) if tensor.ndim == 3 else bad_BT) & mask_BT
    if bool(bad_BT.any()):
        response, token = (int(i) for i in bad_BT.nonzero()[0])
        raise NonFiniteError(
            f"{name} of response {response}, column {token} is {tensor[response, token].tolist()}; "
            f"{int(bad_BT.any(-1).sum())} of {len(mask_BT)} responses hold NaN or infinite values"
        )


def _check_constant(method: str, ratio: str, batch: TokenBatch) -> None:
    low_B = batch.advantages_BT.masked_fill(~batch.mask_BT, torch.inf).amin(-1)
    high_B = batch.advantages_BT.masked_fill(~batch.mask_BT, -torch.inf).amax(-1)
    varying = (low_B < high_B).nonzero().flatten()
    if varying.numel():
        raise BatchError(
            f"advantages_BT varies inside response {int(varying[0])}; method {method} has one {ratio} ratio a response and "
            "needs one advantage a response; for an advantage per token use preset gspo_token (ratio: sequence_token)"
        )


def _check_contiguous(mask_BT: Tensor) -> None:
    starts_B = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).sum(-1) + mask_BT[:, 0]
    broken = (starts_B > 1).nonzero().flatten()
    if broken.numel():
        raise BatchError(f"mask_BT of response {int(broken[0])} has holes; blocks of tokens need contiguous responses")
