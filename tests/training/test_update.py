"""One update: which tokens are chosen, how often the model runs, ratio 1 in half precision, one population of tokens for every
method, and no step without a signal."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_study

from tepo_core.model.logprobs import output_matrix
from tepo_core.objectives.methods import PRESETS
from tepo_core.rollout import transformers_engine as engine_module
from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.types import SamplingParams
from tepo_core.runs.folder import run_folder
from tepo_core.runs.metrics import read_metrics
from tepo_core.tasks.prepare import prepare
from tepo_core.training import sampler, update
from tepo_core.training.trainer import Trainer, train
from tepo_core.training.warmup import warmup

VARIANTS = {
    "clip_cov_more": {"preset": "clip_cov", "share": 0.05, "band": [0.01, 5.0]},
    "kl_cov_more": {"preset": "kl_cov", "share": 0.05},
    "tepo_cov": {"preset": "tepo_kl", "entropy_test": "covariance"},
}


def chosen_tokens(run, experience, rows):
    """Tokens that an update selects, as (row, position); and how many forward passes it made."""
    found, calls, learner = set(), [], run.learner
    original = update.response_states

    def counted(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return original(*args, **kwargs)

    update.response_states = counted
    try:
        groups, _ = learner._groups(experience, rows)
        for group, batch in zip(groups, learner._micro_batches(experience, groups, (0, 1, 1), collision=False), strict=True):
            found |= {(group[b], t) for b, t in batch.selected_BT.nonzero().tolist()}
    finally:
        update.response_states = original
    return found, calls, len(groups)


@pytest.mark.parametrize("method", list(VARIANTS))
def test_choice_over_the_mini_batch_does_not_depend_on_micro_batches(base, method):
    found = {}
    for budget in (10**6, 300, 20):
        with Trainer(tiny_study(train={"micro_batch_tokens": budget}, variants=VARIANTS), "facts", method, 0, base) as run:
            run.policy.model.double()
            experience = run.sampler.collect(1).kept
            rows = list(range(len(experience.rollouts)))
            found[budget], calls, groups = chosen_tokens(run, experience, rows)
            assert calls == ([True] if groups == 1 else [False] * groups + [True] * groups), "no pass beyond those needed"
            assert (groups == 1) == (budget == 10**6)
    assert found[10**6] == found[300] == found[20] != set()


# -- half precision ---------------------------------------------------------------------------------------------------------

BF16 = {
    **VARIANTS,
    "mpo_heads": {"preset": "mpo", "block": {"logprobs": "mtp", "size": 3}},
    "tepo_exact": {"preset": "tepo_kl", "kl": {"reference": "old", "estimator": "exact", "beta": 0.1}},
    "tepo_margin_0": {"preset": "tepo_kl", "entropy_margin": 0.0},
}


@pytest.fixture(scope="module")
def base_bf16(tmp_path_factory):
    """Prepared data and a warmed-up bfloat16 policy with multi-token modules."""
    root = tmp_path_factory.mktemp("bf16")
    study = bf16_study()
    prepare(study, root)
    warmup(study, "facts", 0, root)
    return root


def bf16_study(**changes):
    return tiny_study(policy={"dtype": "bfloat16", "mtp_modules": 2}, variants=BF16, **changes)


@pytest.mark.parametrize("method", [*PRESETS, *BF16])
def test_ratio_is_one_in_bfloat16_before_any_update(base_bf16, method):
    """Every mini-batch of a rollout, cut into micro-batches, while no step has been made."""
    with Trainer(bf16_study(train={"micro_batch_tokens": 300}), "facts", method, 0, base_bf16) as run:
        results = []
        run.learner.optimizer.step = lambda: None
        original = run.learner.update

        def remembered(experience, rows, labels, keep_tokens=False):
            results.append(original(experience, rows, labels, keep_tokens))
            return results[-1]

        run.learner.update = remembered
        run._rollout_step()
        assert len(results) == 4 and max(r.values["grad_norm"] for r in results) > 0
        for result in results[:2]:  # of the first epoch, which is what is remembered
            sums, values = result.sums, result.values
            assert sums["abs_log_ratio"][0] == sums["entropy_change"][0] == sums["kl_old"][0] == 0
            assert sums["mask"][0] == 0 or run.method.needs_population  # chosen by covariance, not by what moved
            assert values["ratio_max"] == values["ratio_min"] == 1
            assert sums["clip_low"][0] == sums["clip_high"][0] == 0
        for result in results[2:]:  # other mini-batches of the same responses: rounding of hidden states alone
            assert result.sums["abs_log_ratio"][0] / result.sums["abs_log_ratio"][1] < 2e-3


def test_bfloat16_is_sampled_through_the_head_it_is_trained_with(base_bf16):
    """What is left between engine and trainer is the rounding of hidden states; the head adds nothing."""
    with Trainer(bf16_study(), "facts", "grpo", 0, base_bf16) as run:
        model, ids = run.policy.model, torch.tensor([[3, 4, 5, 6]])
        seen = []
        original = engine_module.choose

        def remembered(logits_BV, params, uniform_B):
            seen.append(logits_BV)
            return original(logits_BV, params, uniform_B)

        engine_module.choose = remembered
        try:
            run.engine.generate([ids[0].tolist()], 1, SamplingParams(1.0, 1.0, 1), [0])
        finally:
            engine_module.choose = original
        with torch.no_grad():
            weight_VD, _ = output_matrix(model)
            hidden_D = model.model(input_ids=ids).last_hidden_state[0, -1]
        assert seen[0].dtype == torch.float32
        torch.testing.assert_close(seen[0][0], weight_VD.float() @ hidden_D.float(), rtol=1e-6, atol=1e-6)


# -- one population ---------------------------------------------------------------------------------------------------------

SAME = (
    "log_ratio", "abs_log_ratio", "log_ratio_sq", "kl_old", "entropy", "entropy_change", "logprob", "advantage", "covariance",
    "positive", "positive_entropy_fell",
)  # fmt: skip


def measured(base, method, budget=4096, **changes):
    """Metrics of one update of a mini-batch that holds flat groups, away from the sampling policy; the learning rate is 0."""
    study = tiny_study(train={"micro_batch_tokens": budget, **changes}, variants=VARIANTS)
    with Trainer(study, "facts", method, 0, base) as run:
        run.policy.model.double()
        experience = run.sampler.collect(1).kept
        assert 0 < (np.abs(experience.advantages_PG).max(1) == 0).sum() < 8, "the case needs groups of both kinds"
        experience.advantages_PG = np.sign(experience.advantages_PG)  # equal for every kind of advantage
        rng = np.random.default_rng(0)
        experience.old_logprobs = [row - np.abs(rng.normal(0, 0.2, len(row))) for row in experience.old_logprobs]
        experience.old_entropies = [row + rng.normal(0, 0.05, len(row)) for row in experience.old_entropies]
        run.optimizer.param_groups[0]["lr"] = 0.0
        return run.learner.update(experience, list(range(len(experience.rollouts))), (0, 1, 1), keep_tokens=True)


def test_metrics_of_all_methods_are_over_the_same_tokens(base):
    results = {name: measured(base, name) for name in ("kl_cov", "grpo", "gspo", "tepo_kl", "cispo", "reinforce")}
    one = results.pop("kl_cov")
    assert one.sums["computed"][0] == one.sums["computed"][1]
    kinds = [name for name in one.sums if name.startswith(("tokens@", "entropy_change@"))]
    for method, other in results.items():
        assert other.sums["computed"][0] < other.sums["computed"][1] == one.sums["kl_old"][1], "some are only measured"
        for name in (*SAME, *kinds):
            assert other.sums[name] == pytest.approx(one.sums[name], rel=1e-9, abs=1e-9), (method, name)
        assert set(other.tokens) == set(one.tokens) == set(range(32))
    for name in ("grpo", "cispo", "reinforce"):  # methods of the token ratio share its spread and its ends
        for key in ("ratio", "ratio_dev_sq"):
            assert results[name].sums[key] == pytest.approx(one.sums[key], rel=1e-9)
        for key in ("ratio_max", "ratio_min"):
            assert results[name].values[key] == pytest.approx(one.values[key], rel=1e-9)


@pytest.mark.parametrize("method", ["grpo", "tepo_kl", "kl_cov_more"])
def test_rows_that_are_only_measured_do_not_depend_on_micro_batches(base, method):
    whole, split = measured(base, method), measured(base, method, budget=60)
    assert whole.sums.keys() == split.sums.keys() and whole.values == pytest.approx(split.values, rel=1e-9)
    for name in whole.sums:
        assert whole.sums[name] == pytest.approx(split.sums[name], rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("method", ["grpo", "kl_cov"])
def test_stop_kl_reads_the_same_for_both(base, tmp_path, method):
    """A policy that moved on the flat groups alone is seen by a method that does not learn from them."""
    with Trainer(tiny_study(train={"stop_kl": 0.05}), "facts", method, 0, base) as run:
        original = run.sampler.collect

        def moved(step):
            collected = original(step)
            part = collected.kept
            flat = np.flatnonzero(np.repeat(np.abs(part.advantages_PG).max(1) == 0, part.group_size))
            part.old_logprobs = [row - 1.0 * (i in set(flat)) for i, row in enumerate(part.old_logprobs)]
            return collected

        run.sampler.collect = moved
        run.run()
        assert run.stopped and "above stop_kl = 0.05 at update 1" in run.stopped


# -- updates without a signal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(PRESETS))
def test_an_update_without_a_signal_makes_no_step(base, method):
    """All groups flat and the policy where it was sampled: no method has a gradient, and momentum must not act."""
    with Trainer(tiny_study(train={"weight_decay": 0.1}, variants=VARIANTS), "facts", method, 0, base) as run:
        run.policy.model.double()
        experience = run.sampler.collect(1).kept
        rows = list(range(len(experience.rollouts)))
        first = run.learner.update(experience, rows, (0, 1, 1))
        assert first.values["skipped"] == 0 and first.values["grad_norm"] > 0
        experience.advantages_PG = np.zeros_like(experience.advantages_PG)
        scored = rescore(
            run.policy.model, experience.rollouts, pad_id=run.policy.pad_id, temperature=1.0, micro_batch_tokens=4096
        )
        experience.old_logprobs, experience.old_entropies = scored
        before = [p.detach().clone() for p in run.policy.model.parameters()]
        state = copy.deepcopy(run.optimizer.state_dict())
        result = run.learner.update(experience, rows, (0, 1, 2))
        assert result.values["skipped"] == 1 and result.values["grad_norm"] == 0 and result.values["loss"] == 0
        assert all(torch.equal(a, b) for a, b in zip(before, run.policy.model.parameters(), strict=True))
        moments = state["optimizer"]["state"][0], run.optimizer.state_dict()["optimizer"]["state"][0]
        assert all(torch.equal(moments[0][name], moments[1][name]) for name in ("step", "exp_avg", "exp_avg_sq"))


def test_skipped_updates_are_logged_and_the_schedule_counts_them(base, tmp_path, monkeypatch):
    """The learning rate of an update is the same for every method, whether updates before it made a step or not."""
    original = sampler.compute_advantages
    monkeypatch.setattr(sampler, "compute_advantages", lambda rewards, *rest: 0 * original(rewards, *rest))
    study = tiny_study(train={"lr_warmup_rollouts": 4})
    flat = train(study, "facts", "grpo", 0, base, tmp_path / "flat").folder
    monkeypatch.undo()
    learned = train(study, "facts", "grpo", 0, base, tmp_path / "learned").folder
    runs = [read_metrics(folder).update for folder in (flat, learned)]
    assert runs[0].values["skipped"].tolist() == [1] * 16 and runs[1].values["skipped"].mean() < 1
    assert (
        runs[0].values["lr"].tolist() == runs[1].values["lr"].tolist() == pytest.approx([1e-3 * i / 16 for i in range(1, 17)])
    )
    weights = [load_file(folder / "policy" / "model.safetensors") for folder in (flat, learned)]
    start = load_file(run_folder(base, "warmup", "facts", 0) / "policy" / "model.safetensors")
    assert all(torch.equal(start[name], value) for name, value in weights[0].items())
    assert not all(torch.equal(start[name], value) for name, value in weights[1].items())
