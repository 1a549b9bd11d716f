"""Which tokens Clip-Cov, KL-Cov and TEPO's covariance test choose: never by place in the batch, and none where nothing differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from all_methods import VARIANTS

from tepo_core.objectives.invariance import minibatch_gradient, random_batch
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.penalties import kl_estimate
from tepo_core.seeding import torch_generator

CHOOSERS = ("kl_cov_more", "clip_cov_more", "clip_cov_wide", "tepo_cov")
WIDE = {**VARIANTS, "clip_cov_wide": {"preset": "clip_cov", "share": 0.1, "band": [-9.0, 9.0]}}


def choose(name: str, logprobs_BT, advantages_BT, mask_BT) -> torch.Tensor:
    return resolve(name, WIDE).select(logprobs_BT, advantages_BT, mask_BT, torch_generator("choice", 0))


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("advantage", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("name", CHOOSERS)
def test_where_all_covariances_are_equal_nothing_is_chosen(name, advantage):
    """All advantages equal (0.1 has a mean that rounds), so every covariance is 0 up to rounding."""
    logprobs_BT = -torch.rand(6, 11, dtype=torch.float64)
    mask_BT = torch.ones(6, 11, dtype=torch.bool)
    assert not choose(name, logprobs_BT, torch.full((6, 11), advantage, dtype=torch.float64), mask_BT).any()


@pytest.mark.parametrize("name", CHOOSERS)
def test_where_all_log_probs_are_equal_nothing_is_chosen(name):
    advantages_BT = rows([1.0], [-1.0], [0.3]).expand(3, 7)
    assert not choose(name, torch.full((3, 7), -0.7, dtype=torch.float64), advantages_BT, torch.ones(3, 7).bool()).any()


def tied_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Responses that share their first tokens and then differ: more ties than KL-Cov's budget of floor(.2 N) has room for."""
    generator = torch.Generator().manual_seed(3)
    shared_T, own_BT = torch.tensor([-0.0, -0.01, -0.02]), -1.0 - torch.rand(10, 2, generator=generator)
    logprobs_BT = torch.cat([shared_T.expand(10, 3), own_BT], dim=1).double()
    advantages_BT = torch.where(torch.arange(10) % 2 == 0, 1.0, -1.0).double()[:, None].expand(10, 5).clone()
    return logprobs_BT, advantages_BT, torch.ones(10, 5, dtype=torch.bool)


@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.parametrize("seed", range(4))
def test_permuted_rows_choose_the_same_tokens_among_ties(name, seed):
    tensors = tied_batch()
    chosen_BT = choose(name, *tensors)
    order_B = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(choose(name, *(x[order_B] for x in tensors)), chosen_BT[order_B])
    wider = [torch.nn.functional.pad(x, (3, 1)) for x in tensors]
    assert torch.equal(choose(name, *wider)[:, 3:-1], chosen_BT)


def test_ties_fill_the_budget():
    chosen_BT = choose("kl_cov_more", *tied_batch())
    assert int(chosen_BT.sum()) == int(0.2 * 50)


@pytest.mark.parametrize("name", CHOOSERS)
def test_flat_groups_leave_the_population(name):
    """As in the source, where groups with equal rewards are filtered: means, budget and choice are those of the rest."""
    batch = random_batch(resolve(name, WIDE), responses=20, longest=30)
    advantages_BT = batch.advantages_BT.clone()
    advantages_BT[::3] = 0.0
    chosen_BT = choose(name, batch.logprobs_BT, advantages_BT, batch.mask_BT)
    rest_B = torch.arange(20) % 3 != 0
    assert not chosen_BT[~rest_B].any() and chosen_BT.any()
    alone_BT = choose(name, batch.logprobs_BT[rest_B], advantages_BT[rest_B], batch.mask_BT[rest_B])
    assert torch.equal(chosen_BT[rest_B], alone_BT)


def test_packed_tokens_with_their_identities_choose_what_rows_choose():
    """The loop packs the tokens of several micro-batches into one row; identities made of the rows keep ties where they were."""
    from tepo_core.objectives.population import identities

    logprobs_BT, advantages_BT, mask_BT = tied_batch()
    method = resolve("kl_cov_more", WIDE)
    keys_BT = identities(logprobs_BT, advantages_BT, mask_BT)
    packed = [x[mask_BT][None] for x in (logprobs_BT, advantages_BT, mask_BT)]
    found = method.select(*packed, torch_generator("choice", 0), identities_BT=keys_BT[mask_BT][None])
    assert torch.equal(found[0], choose("kl_cov_more", logprobs_BT, advantages_BT, mask_BT)[mask_BT])


@pytest.mark.parametrize(("d", "slope"), [(1e-7, 0.0), (-1e-7, 0.0), (-5e-6, 0.0), (0.0, 0.0), (1e-4, 1.0), (-0.2, -1.0)])
def test_absolute_log_ratio_has_no_gradient_below_rounding_noise(d, slope):
    x = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    kl_estimate(x, "abs").sum().backward()
    assert x.grad.tolist() == [slope]


@pytest.mark.parametrize("name", ["kl_cov_more", "kl_cov_weighted"])
def test_rounding_between_sampling_and_training_charges_nothing(name):
    """|d| of 1e-7 has the slope of |d| of 1: on the first update the penalty was pure noise. Now it is exactly absent."""
    method = resolve(name, VARIANTS)
    batch = random_batch(method, responses=8, longest=20)
    noise_BT = 1e-7 * torch.randn(8, 20, dtype=torch.float64)
    noisy = replace(batch, old_logprobs_BT=batch.logprobs_BT + noise_BT)
    off = resolve("off", {"off": {**VARIANTS[name], "kl": {**VARIANTS[name].get("kl", {}), "beta": 0.0}}})
    charged, free = minibatch_gradient(method, noisy)[1], minibatch_gradient(off, noisy)[1]
    assert torch.equal(charged["logprobs_BT"], free["logprobs_BT"])
    totals = MiniBatchTotals.from_mask(batch.mask_BT)
    assert method.loss(TokenBatch(**noisy.tensors()), totals).sums["mask"][0] > 0
