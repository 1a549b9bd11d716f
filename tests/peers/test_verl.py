"""Parity with verl 0.9.1 on random inputs, and the discrepancies that are expected: a fixed peer makes these tests fail."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="run by tests/peers/run.sh verl, in an environment of its own")
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_rloo_outcome_advantage, kl_penalty
from verl_losses import PAPER, RECORD, measure, plain_batch, verl_gradient

from tepo_core.advantages import compute_advantages
from tepo_core.objectives.invariance import chunks, minibatch_gradient, relative_error
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.penalties import kl_estimate

pytestmark = pytest.mark.peers
RTOL = 1e-5


def compare(name: str, ours: dict, theirs: tuple[str, str, dict], batch: TokenBatch, parts=None) -> None:
    """Loss and gradient of our method and of verl's, relative difference at most 1e-5."""
    method = resolve("x", {"x": {"preset": name, **ours}})
    method.validate(batch)
    totals = MiniBatchTotals.from_mask(batch.mask_BT, constant=float(batch.mask_BT.shape[1]))
    loss, gradients = minibatch_gradient(method, batch, parts, totals)
    verl_loss, verl_grad = verl_gradient(*theirs, batch, parts)
    assert float(loss) == pytest.approx(verl_loss, rel=RTOL, abs=1e-7)
    assert relative_error({"g": gradients["logprobs_BT"]}, {"g": verl_grad}) <= RTOL


@pytest.mark.parametrize("name", [name for name in PAPER if not name.endswith("_cov")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_micro_batch(name, dtype):
    ours = {"clip": [None, 0.28]} if name == "cispo" else {}
    compare(name, ours, PAPER[name], plain_batch(name, dtype=dtype))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "reinforce"])
def test_micro_batches_where_verl_is_right_too(name):
    ours = {"clip": [None, 0.28]} if name == "cispo" else {}
    compare(name, ours, PAPER[name], plain_batch(name), chunks(32, 8))


def test_dual_clip():
    compare(
        "dapo",
        {"dual_clip": 1.35},
        ("vanilla", "token-mean", {"clip_ratio_high": 0.28, "clip_ratio_c": 1.35}),
        plain_batch("dapo"),
    )


def test_tepo_is_verls_gspo_aggregated_by_token_mean():
    """verl's gspo takes the aggregation as an option, and by token-mean it is J_v1."""
    compare("tepo", {"clip": [3e-4, 4e-4]}, ("gspo", "token-mean", PAPER["gspo"][2]), plain_batch("tepo"))


def test_kl_cov_chooses_the_same_tokens():
    """Above one token in floor(k N) the two choices are the same, and so are loss and gradient."""
    compare("kl_cov", {}, PAPER["kl_cov"], plain_batch("kl_cov"))


def test_clip_cov_with_verls_own_draw():
    """verl draws from the global random state; its choice is read off its zero gradients and given to ours."""
    batch = plain_batch("clip_cov")
    settings = {**PAPER["clip_cov"][2], "clip_cov_ratio": 5e-3}
    torch.manual_seed(1)
    verl_loss, verl_grad = verl_gradient("clip_cov", "token-mean", settings, batch)
    dropped_BT = (verl_grad == 0) & batch.mask_BT
    method = resolve("x", {"x": {"preset": "clip_cov", "share": 5e-3}})
    tokens = int(batch.mask_BT.sum())
    assert int(dropped_BT.sum()) == int(5e-3 * tokens)
    centred = [x - x[batch.mask_BT].mean() for x in (batch.logprobs_BT, batch.advantages_BT)]
    covariance = (centred[0] * centred[1])[dropped_BT]
    assert covariance.min() > 1 and covariance.max() < 5
    chosen = TokenBatch(batch.logprobs_BT, batch.old_logprobs_BT, batch.mask_BT, batch.advantages_BT, selected_BT=dropped_BT)
    loss, gradients = minibatch_gradient(method, chosen)
    assert float(loss) == pytest.approx(verl_loss, rel=RTOL)
    assert relative_error({"g": gradients["logprobs_BT"]}, {"g": verl_grad}) <= RTOL


# Where verl is wrong, or differs on purpose


@pytest.mark.parametrize("size", [16, 8, 1])
def test_expected_geo_mean_scales_with_the_number_of_micro_batches(size):
    batch = plain_batch("gmpo")
    _, whole = verl_gradient(*PAPER["gmpo"], batch)
    _, split = verl_gradient(*PAPER["gmpo"], batch, chunks(32, size))
    assert torch.allclose(split, whole * (32 // size), rtol=1e-4)


def test_expected_kl_cov_chooses_per_micro_batch():
    batch = plain_batch("kl_cov")
    _, whole = verl_gradient(*PAPER["kl_cov"], batch)
    _, split = verl_gradient(*PAPER["kl_cov"], batch, chunks(32, 2))
    assert 0.02 < relative_error({"g": split}, {"g": whole}) < 0.1


def test_expected_clip_cov_draws_anew_at_every_call():
    batch = plain_batch("clip_cov")
    torch.manual_seed(0)
    _, first = verl_gradient(*PAPER["clip_cov"], batch)
    _, second = verl_gradient(*PAPER["clip_cov"], batch)
    assert 0.005 < relative_error({"g": second}, {"g": first}) < 0.2


def test_expected_small_budgets_are_rounded_up_to_one_token():
    """floor(k N) = 0 selects nothing in the papers' formula and here; verl takes max(1, .)."""
    batch = plain_batch("kl_cov", responses=4, longest=20)
    assert not batch.selected_BT.any()
    method = resolve("kl_cov")
    _, gradients = minibatch_gradient(method, batch)
    _, verl_grad = verl_gradient(*PAPER["kl_cov"], batch)
    assert ((gradients["logprobs_BT"] - verl_grad).abs() > 1e-7).sum() == 1


def test_expected_defaults_that_are_not_the_papers():
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1)
    assert (config.policy_loss.kl_cov_ratio, config.policy_loss.ppo_kl_coef, config.clip_ratio) == (2e-4, 0.1, 0.2)
    assert config.clip_ratio_c == 3.0


def test_the_record_beside_the_notebook_is_what_verl_gives():
    record, now = json.loads(RECORD.read_text()), measure()
    assert (record["verl"], record["case"]) == (now["verl"], now["case"])
    for name, errors in now["relative_gradient_error"].items():
        assert record["relative_gradient_error"][name] == pytest.approx(errors, rel=0.05, abs=1e-6), name


def test_kl_estimators():
    """verl also limits k3 to at most 10; these differences stay below."""
    x, y = 0.5 * torch.randn(2, 50, dtype=torch.float64)
    for ours, theirs in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")):
        assert torch.allclose(kl_estimate(x - y, ours), kl_penalty(x, y, theirs))


def test_advantages():
    """verl divides by std + 1e-6; the difference is of that size. Leave-one-out has no epsilon."""
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.3, 0.2, 0.9, 0.1]])
    scores, mask = rewards_PG.flatten()[:, None], torch.ones(8, 1)
    index = np.repeat([0, 1], 4)
    grpo, _ = compute_grpo_outcome_advantage(scores, mask, index)
    assert torch.allclose(compute_advantages(rewards_PG, "group").flatten(), grpo[:, 0], rtol=1e-5)
    rloo, _ = compute_rloo_outcome_advantage(scores, mask, index)
    assert torch.allclose(compute_advantages(rewards_PG, "loo").flatten(), rloo[:, 0], rtol=1e-5)
