"""Loss and gradient of EVERY registered method must not depend on micro-batches, padding, order or packing.

Parametrised over the registry: a new method is covered without a new line.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from all_methods import NAMES, VARIANTS

from tepo_core.objectives.invariance import (
    chunks,
    left_padded,
    micro_batch_error,
    minibatch_gradient,
    random_batch,
    relative_error,
    shift_columns,
    with_selection,
)
from tepo_core.objectives.methods import PRESETS, MiniBatchTotals, TokenBatch, register, resolve
from tepo_core.objectives.options import Common
from tepo_core.objectives.surrogates import Surrogate

TINY = {"responses": 7, "longest": 9}


@pytest.fixture(params=NAMES)
def method(request):
    return resolve(request.param, VARIANTS)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches(method, size):
    assert micro_batch_error(method, size, responses=12, longest=60) <= 1e-10


def test_micro_batches_in_float32(method):
    assert micro_batch_error(method, 2, responses=12, longest=60, dtype=torch.float32) <= 1e-5


def test_the_measure_sees_a_local_mean():
    """The same measure on an objective that divides by its micro-batch's own length, as several libraries do."""

    @register("local_mean_for_test", Common, source="none")
    def local_mean(batch, options):
        terms_BT = batch.advantages_BT * batch.log_ratio_BT.exp()
        return Surrogate(terms_BT / batch.mask_BT.sum(), batch.log_ratio_BT.exp())

    try:
        assert micro_batch_error(resolve("local_mean_for_test"), 2, **TINY) > 0.1
    finally:
        del PRESETS["local_mean_for_test"]


def test_padding_side_width_and_content(method):
    """Left, right and extra padding that holds NaN: the loss is equal, and padding gets gradient exactly 0."""
    batch = random_batch(method, **TINY)
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=9.0)
    loss, expected = minibatch_gradient(method, batch, totals=totals)
    left = left_padded(batch)
    for moved in (shift_columns(batch, 0, 4), shift_columns(batch, 3, 2), left, shift_columns(left, 2, 0, fill=1e30)):
        found_loss, found = minibatch_gradient(method, moved, totals=totals)
        assert float(found_loss) == pytest.approx(float(loss), rel=1e-12, abs=1e-15)
        assert all((x[~moved.mask_BT] == 0).all() for x in found.values())
        on_tokens = {name: x[moved.mask_BT] for name, x in found.items()}
        assert relative_error(on_tokens, {name: x[batch.mask_BT] for name, x in expected.items()}) <= 1e-10


def test_order_of_responses(method):
    """Permuted rows give permuted gradients; the choice of tokens is made anew and must be the same tokens."""
    batch = random_batch(method, responses=12, longest=60)
    loss, expected = minibatch_gradient(method, batch)
    order_B = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    permuted = with_selection(method, batch.rows(order_B))
    found_loss, found = minibatch_gradient(method, permuted, chunks(12, 4))
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-12, abs=1e-15)
    assert relative_error(found, {name: x[order_B] for name, x in expected.items()}) <= 1e-10


def test_packed_against_padded(method):
    """One row of tokens after another, without padding, gives the same loss and the same gradient a token."""
    batch = random_batch(method, **TINY)
    lengths = batch.mask_BT.sum(-1).tolist()
    loss, expected = minibatch_gradient(method, batch)
    packed = {name: x[batch.mask_BT] for name, x in batch.tensors().items() if name != "mask_BT"}
    packed["logprobs_BT"] = packed["logprobs_BT"].clone().requires_grad_()
    rows = TokenBatch.from_packed(lengths, **packed)
    out = method.loss(rows, MiniBatchTotals.from_mask(rows.mask_BT, constant=float(batch.mask_BT.shape[1])))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(float(loss), rel=1e-12, abs=1e-15)
    found = {"logprobs_BT": packed["logprobs_BT"].grad}
    assert relative_error(found, {"logprobs_BT": expected["logprobs_BT"][batch.mask_BT]}) <= 1e-10


def test_choice_over_the_mini_batch_ignores_padding_and_row_order():
    for name in ("clip_cov_more", "kl_cov_more", "tepo_cov"):
        method = resolve(name, VARIANTS)
        batch = random_batch(method, responses=20, longest=60)
        chosen = batch.selected_BT[batch.mask_BT]
        assert 0 < chosen.sum() < chosen.numel()
        left = with_selection(method, dataclasses.replace(left_padded(batch), selected_BT=None))
        assert torch.equal(left.selected_BT[left.mask_BT], chosen)
        backwards = with_selection(method, batch.rows(torch.arange(19, -1, -1)))
        assert torch.equal(backwards.selected_BT.flip(0), batch.selected_BT)


def test_random_choice_follows_its_seed_only():
    method = resolve("clip_cov_more", VARIANTS)
    batch = random_batch(method, responses=20, longest=60)
    torch.manual_seed(1)
    again = with_selection(method, batch, seed=0).selected_BT
    other = with_selection(method, batch, seed=1).selected_BT
    assert torch.equal(again, batch.selected_BT) and not torch.equal(other, batch.selected_BT)
    assert again.sum() == other.sum() == int(0.05 * batch.mask_BT.sum())


def test_leaving_out_responses_without_advantage_is_exact_where_a_method_says_so(method):
    """``inert_without_advantage``: rows with A = 0 get no gradient, and leaving them out changes no other row's."""
    batch = random_batch(method, responses=12, longest=30)
    advantages_BT = batch.advantages_BT.clone()
    advantages_BT[::3] = 0
    batch = with_selection(method, dataclasses.replace(batch, advantages_BT=advantages_BT, selected_BT=None))
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=30.0)
    _, everything = minibatch_gradient(method, batch, totals=totals)
    idle = all(bool((x[::3] == 0).all()) for x in everything.values())
    assert idle or not method.inert_without_advantage
    if method.inert_without_advantage:
        rest = torch.tensor([i for i in range(12) if i % 3])
        _, kept = minibatch_gradient(method, batch.rows(rest), totals=totals)
        assert relative_error(kept, {name: x[rest] for name, x in everything.items()}) <= 1e-12


def test_methods_that_need_every_response_say_so():
    needy = {"reinforce": False, "tepo_kl": False, "kl_cov": True, "clip_cov": True, "grpo_ref": True, "tepo_cov": True}
    assert {name: not resolve(name, VARIANTS).inert_without_advantage for name in needy} == needy


def test_no_method_reads_a_value_in_the_loss(method):
    """On the meta device tensors have no values: a loss that looked at one, and so waited for a GPU, would raise here."""
    batch = random_batch(method, **TINY)
    meta = {name: value.to("meta") for name, value in batch.tensors().items()}
    meta["logprobs_BT"].requires_grad_()
    out = method.loss(TokenBatch(**meta), MiniBatchTotals(tokens=30.0, responses=7.0, constant=9.0))
    out.loss.backward()
    assert meta["logprobs_BT"].grad.is_meta and all(x.is_meta for pair in out.sums.values() for x in pair)
    with pytest.raises(RuntimeError):
        method.validate(TokenBatch(**meta))
