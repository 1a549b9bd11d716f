"""Parity with verl 0.9.1 on random inputs, and the discrepancies that are expected: a fixed peer makes these tests fail."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="run by tests/peers/run.sh verl, in an environment of its own")
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_rloo_outcome_advantage, kl_penalty
from verl_losses import PAPER, RECORD, actor_config, measure, plain_batch, verl_gradient

from tepo_core.config import ConfigError
from tepo_core.credit.group import compute_advantages
from tepo_core.objectives.invariance import chunks, minibatch_gradient, random_batch, relative_error
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.penalties import kl_estimate
from tepo_core.objectives.penalties import kl_penalty as our_penalty

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


def test_expected_verl_does_not_weigh_its_penalty():
    """verl averages k3 over tokens of the sampling policy; ours does so only when told to, and the two differ off-policy."""
    batch = plain_batch("kl_cov").prepared()
    options = {"reference": "old", "direction": "policy_reference", "estimator": "k3", "gradient": "k3"}
    theirs_BT = kl_penalty(batch.logprobs_BT, batch.old_logprobs_BT, "low_var_kl")
    assert torch.allclose(our_penalty(batch, sampling="unweighted", **options), theirs_BT, atol=1e-6)
    weighted_BT = our_penalty(batch, sampling="weighted", **options)
    assert float((weighted_BT - theirs_BT).abs().sum() / theirs_BT.abs().sum()) > 0.05


def test_advantages():
    """verl divides by std + 1e-6; the difference is of that size. Leave-one-out has no epsilon."""
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.3, 0.2, 0.9, 0.1]])
    scores, mask = rewards_PG.flatten()[:, None], torch.ones(8, 1)
    index = np.repeat([0, 1], 4)
    grpo, _ = compute_grpo_outcome_advantage(scores, mask, index)
    assert torch.allclose(compute_advantages(rewards_PG, "group").flatten(), grpo[:, 0], rtol=1e-5)
    rloo, _ = compute_rloo_outcome_advantage(scores, mask, index)
    assert torch.allclose(compute_advantages(rewards_PG, "loo").flatten(), rloo[:, 0], rtol=1e-5)


# The adapter: verl's own ppo_loss calls our objectives


def actor_step(loss_mode: str, aggregation: str, batch: TokenBatch, rows: torch.Tensor, dp_size: int = 1, entropy: bool = True):
    """Loss, metrics and gradient of ``ppo_loss`` as verl's engine calls it, on nested tensors without padding."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils import losses

    tokens, lengths = batch.rows(rows), batch.mask_BT[rows].sum(-1)
    responses, width = tokens.mask_BT.shape
    leaf_BT = tokens.logprobs_BT.detach().clone().requires_grad_()

    def nested(values_BT):  # one prompt token before every response; the model's output is shifted left by one
        shifted = torch.nn.functional.pad(values_BT, (0, 1))
        return torch.nested.as_nested_tensor(
            [row[: n + 1] for row, n in zip(shifted, lengths, strict=True)], layout=torch.jagged
        )

    attention = torch.cat([torch.ones(responses, 1, dtype=torch.long), tokens.mask_BT.long()], dim=1)
    data = TensorDict(
        {
            "prompts": attention[:, :1],
            "responses": tokens.mask_BT.long(),
            "attention_mask": attention,
            "response_mask": tokens.mask_BT.long(),
            "old_log_probs": tokens.old_logprobs_BT,
            "advantages": tokens.advantages_BT,
            "study_old_entropies": tokens.old_entropy_BT,
        },
        batch_size=responses,
    )
    counts = {"batch_num_tokens": int(batch.mask_BT.sum()), "global_batch_size": len(batch.mask_BT)}
    tu.assign_non_tensor(data, dp_size=dp_size, max_response_len=width, **counts)
    config = actor_config({})
    object.__setattr__(config.policy_loss, "loss_mode", loss_mode)
    object.__setattr__(config, "loss_agg_mode", aggregation)
    output = {"log_probs": nested(leaf_BT), "entropy": nested(tokens.entropy_BT) if entropy else None}
    loss, metrics = losses.ppo_loss(config, output, data)
    loss.backward()
    return loss.item(), metrics, leaf_BT.grad


@pytest.fixture(scope="module")
def adapter():
    return pytest.importorskip("tepo_core.integrations.verl")


@pytest.mark.parametrize(
    ("name", "aggregation"), [("tepo_kl", "token-mean"), ("mpo", "token-mean"), ("gmpo", "seq-mean-token-mean")]
)
def test_adapter_inside_verls_actor_loss(adapter, name, aggregation):
    """Two micro-batches through verl's ppo_loss: our gradient, our metrics; entropies reach TEPO's mask."""
    full = random_batch(resolve(name), responses=10, longest=40, dtype=torch.float32)
    batch = replace(full, weights_BT=None, ref_logprobs_BT=None, exact_kl_BT=None)
    method = resolve(name)
    _, expected = minibatch_gradient(method, batch)
    parts = [actor_step(f"study:{name}", aggregation, batch, rows) for rows in chunks(10, 5)]
    gradient = torch.cat([grad for _, _, grad in parts])
    assert relative_error({"g": gradient}, {"g": expected["logprobs_BT"]}) <= RTOL
    out = method.loss(batch.rows(torch.arange(5)), MiniBatchTotals.from_mask(batch.mask_BT))
    metric = parts[0][1]["actor/objective/mask"]
    share = out.sums["mask"][0] / out.sums["mask"][1]
    assert float(getattr(metric, "values", [metric])[0]) == pytest.approx(float(share))
    assert (share > 0) == (name == "tepo_kl")


def test_adapter_undoes_the_average_over_ranks(adapter):
    batch = replace(random_batch(resolve("dapo"), responses=4, longest=9), weights_BT=None)
    one, _, _ = actor_step("study:dapo", "token-mean", batch, torch.arange(4))
    two, _, _ = actor_step("study:dapo", "token-mean", batch, torch.arange(4), dp_size=2)
    assert two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("name", "aggregation", "entropy", "message"),
    [
        ("kl_cov", "token-mean", True, "no whole mini-batch"),
        ("tepo", "seq-mean-token-mean", True, "aggregates by 'token-mean', and loss_agg_mode is 'seq-mean-token-mean'"),
        ("tepo_kl", "token-mean", False, "calculate_entropy=true"),
    ],
)
def test_adapter_refuses(adapter, name, aggregation, entropy, message):
    batch = replace(random_batch(resolve("dapo"), responses=4, longest=9), weights_BT=None)
    with pytest.raises(ConfigError, match=message):
        actor_step(f"study:{name}", aggregation, batch, torch.arange(4), entropy=entropy)


def test_adapter_keeps_the_sampling_entropies(adapter):
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert RayPPOTrainer._compute_old_log_prob.__wrapped__ is not None
    entropy_BT = torch.rand(2, 3)
    fresh = DataProto.from_tensordict(TensorDict({"old_log_probs": -entropy_BT, "entropys": entropy_BT}, batch_size=2))
    result, _ = adapter.keep_entropies(lambda self, batch: (fresh, 0.0))(None, None)
    result.batch.pop("entropys")
    assert torch.equal(result.batch["study_old_entropies"], entropy_BT)
