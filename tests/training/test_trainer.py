"""The RL loop: ratio 1 at the first update, gradients without regard to micro-batches, same bytes, exact resume, clear stops."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from tiny import run_bytes, tiny_study

from tepo_core.config import ConfigError
from tepo_core.model.batching import micro_batches
from tepo_core.objectives.methods import PRESETS
from tepo_core.runs.folder import run_folder
from tepo_core.runs.metrics import read_metrics
from tepo_core.tasks.prepare import prepare
from tepo_core.training import checkpoint, trainer
from tepo_core.training.checkpoint import CheckpointError, Workspace
from tepo_core.training.experience import mini_batches, overlong_penalty
from tepo_core.training.trainer import Trainer, train
from tepo_core.training.warmup import warmup


def test_first_update_has_ratio_one_and_nothing_fallen(base, tmp_path):
    result = train(tiny_study(), "facts", "tepo_kl", 0, base, tmp_path / "run")
    for event in read_metrics(result.folder).events["update"]:
        if event["update"] == 1:
            tokens = event["sums"]["abs_log_ratio"][1]
            assert event["sums"]["abs_log_ratio"][0] <= 1e-4 * tokens
            assert event["values"]["ratio_max"] == pytest.approx(1, abs=1e-4)
            assert event["sums"]["mask"][0] == 0
            # how many "fell" is rounding here, and a coin: only the size of the change means something
            assert abs(event["sums"]["entropy_change"][0]) <= 1e-4 * tokens
    later = read_metrics(result.folder).frame("update")
    made = 1 - later["skipped"]
    moved = made.groupby(later["step"]).cumsum() - made > 0  # a step was made in this rollout before
    assert (later.loc[moved, "abs_log_ratio"] > 1e-4).all(), "later updates must be off-policy"
    assert (later.loc[~moved, "abs_log_ratio"] <= 1e-4).all(), "without a signal nothing moves"
    assert (later.loc[moved, "mask"] > 0).any(), "the mask must act from the second update on"


@pytest.mark.parametrize("method", list(PRESETS))
def test_gradient_does_not_depend_on_micro_batches(base, method):
    """The trainer's own update, in float64: whole mini-batch at once against micro-batches of about three responses."""
    variants = {
        "clip_cov": {"preset": "clip_cov", "share": 0.05, "band": [0.01, 5.0]},
        "kl_cov": {"preset": "kl_cov", "share": 0.05},
    }
    gradients, weights = {}, {}
    for budget in (10**6, 20):
        study = tiny_study(train={"micro_batch_tokens": budget}, variants=variants)
        with Trainer(study, "facts", method, 0, base) as run:
            run.policy.model.double()
            experience = run.sampler.collect(1).kept
            assert experience is not None and np.abs(experience.advantages_PG).max() > 0
            rng = np.random.default_rng(0)  # an old policy that differs, so that ratios, clips and masks are not trivial
            experience.old_logprobs = [row + rng.normal(0, 0.2, len(row)) for row in experience.old_logprobs]
            experience.old_entropies = [row + rng.normal(0, 0.05, len(row)) for row in experience.old_entropies]
            rows = list(range(len(experience.rollouts)))
            assert budget > 1000 or len(run.learner._groups(experience, rows)[0]) > 3
            run.learner.grad_clip = 1e9
            run.optimizer.param_groups[0]["lr"] = 0.0
            run.learner.update(experience, rows, (0, 1, 1))
            gradients[budget] = torch.cat([p.grad.flatten() for p in run.policy.model.parameters()])
            weights[budget] = run.stopped
    whole, split = gradients.values()
    assert whole.norm() > 0
    assert ((whole - split).norm() / whole.norm()).item() <= 1e-10


def test_same_seed_same_bytes_other_seed_other_bytes(base, tmp_path):
    first = train(tiny_study(), "facts", "kl_cov", 0, base, tmp_path / "a")
    again = train(tiny_study(), "facts", "kl_cov", 0, base, tmp_path / "b")
    other = train(tiny_study(), "facts", "kl_cov", 1, base, tmp_path / "c")
    assert run_bytes(first.folder) == run_bytes(again.folder)
    assert (first.folder / "metrics.jsonl").read_bytes() != (other.folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("method", ["grpo", "clip_cov"])
@pytest.mark.parametrize("where", ["between", "inside an update", "inside a checkpoint"])
def test_killed_run_ends_with_the_same_bytes(base, tmp_path, monkeypatch, where, method):
    study = tiny_study(train={"checkpoint_every": 2, "rollouts": 5, "zero_variance": "refill"})
    whole = train(study, "facts", method, 0, base, tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(*_args, **_kwargs):
        raise Killed

    with pytest.raises(Killed), monkeypatch.context() as patch:
        if where == "between":
            original = Trainer._rollout_step
            patch.setattr(Trainer, "_rollout_step", lambda self: kill() if self.step == 3 else original(self))
        elif where == "inside an update":
            original_lr = Trainer._set_lr
            patch.setattr(Trainer, "_set_lr", lambda self: kill() if self.updates == 11 else original_lr(self))
        else:
            saves = []
            replace = os.replace

            def second_save_dies(source, target):
                saves.append(target)
                kill() if len(saves) == 2 else replace(source, target)

            patch.setattr(checkpoint.os, "replace", second_save_dies)
        train(study, "facts", method, 0, base, tmp_path / "killed")
    assert not (tmp_path / "killed").exists(), "nothing half-made may remain"
    resumed = train(study, "facts", method, 0, base, tmp_path / "killed")
    assert run_bytes(resumed.folder) == run_bytes(whole.folder)


def test_sigterm_writes_a_checkpoint_and_the_next_call_continues(base, tmp_path, monkeypatch):
    study = tiny_study(train={"checkpoint_every": 0})
    whole = train(study, "facts", "tepo", 0, base, tmp_path / "whole")
    steps = []
    original = Trainer._rollout_step

    def step(self):
        steps.append(self.step)
        if self.step == 1 and len(steps) < 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Trainer, "_rollout_step", step)
    with pytest.raises(SystemExit, match="a checkpoint was written"):
        train(study, "facts", "tepo", 0, base, tmp_path / "run")
    resumed = train(study, "facts", "tepo", 0, base, tmp_path / "run")
    assert steps == [0, 1, 2, 3], "no rollout is done twice"
    assert run_bytes(resumed.folder) == run_bytes(whole.folder)


def test_second_trainer_on_the_same_run_is_refused(base):
    with Trainer(tiny_study(), "facts", "grpo", 0, base), pytest.raises(CheckpointError, match="another process"):
        Trainer(tiny_study(), "facts", "grpo", 0, base)


def test_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    work = Workspace(tmp_path, "run", {"a": 1})
    work.save({"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(CheckpointError, match="no space left.*last good one is kept"):
        work.save({"step": 2})
    monkeypatch.undo()
    assert work.load()["step"] == 1
    work.release(remove=True)


def test_tokens_are_never_encoded_again(base, tmp_path, monkeypatch):
    """Prompts are encoded once, before the loop; responses travel as ids to the loss."""
    with Trainer(tiny_study(train={"validate_every": 0}), "facts", "grpo", 0, base) as run:

        def refuse(*_args, **_kwargs):
            raise AssertionError("text was encoded inside the loop")

        monkeypatch.setattr(type(run.policy.tokenizer), "__call__", refuse)
        monkeypatch.setattr(type(run.policy.tokenizer), "encode", refuse)
        run.run()
        assert run.step == 4


def test_method_changes_nothing_but_the_updates(base, tmp_path):
    """Paired comparison: the first rollout of every method is the same, the second is not."""
    runs = [train(tiny_study(), "facts", m, 0, base, tmp_path / m).folder for m in ("grpo", "kl_cov")]
    events = [read_metrics(run).events["rollout"] for run in runs]
    assert events[0][0] == events[1][0]
    assert events[0][-1] != events[1][-1]


def test_divergence_stops_with_a_record_and_the_weights_before_it(base, tmp_path, monkeypatch):
    original = trainer.Learner.update

    def poisoned(self, experience, rows, labels, keep_tokens=False):
        if labels[1:] == (2, 3):
            experience.old_logprobs[rows[0]][0] = np.nan
            experience.advantages_PG.reshape(-1)[rows[0]] = 1.0
        return original(self, experience, rows, labels, keep_tokens)

    monkeypatch.setattr(trainer.Learner, "update", poisoned)
    result = train(tiny_study(), "facts", "grpo", 0, base, tmp_path / "run")
    done = json.loads((result.folder / "done.json").read_text())
    assert "rollout 2: old_logprobs_BT of response" in done["stopped"] and "is nan" in done["stopped"]
    metrics = read_metrics(result.folder)
    assert metrics.stopped == done["stopped"]
    assert metrics.events["rollout"][-1]["step"] == 2, "nothing is sampled after the stop"
    from safetensors.torch import load_file

    weights = load_file(result.folder / "policy" / "model.safetensors")
    assert all(w.isfinite().all() for w in weights.values())


def test_large_kl_stops(base, tmp_path):
    study = tiny_study(train={"lr": 0.5, "lr_warmup_rollouts": 0, "stop_kl": 0.05})
    result = train(study, "facts", "grpo", 0, base, tmp_path / "run")
    done = json.loads((result.folder / "done.json").read_text())
    assert "above stop_kl = 0.05" in done["stopped"]


@pytest.mark.parametrize("mode", ["keep", "drop", "refill"])
def test_zero_variance_groups(base, mode):
    with Trainer(tiny_study(train={"zero_variance": mode, "max_refills": 3}), "facts", "dapo", 0, base) as run:
        collected = run.sampler.collect(1)
        spread_P = collected.kept.correct_PG.std(1)
        everything = collected.everything.correct_PG.std(1)
        if mode == "keep":
            assert len(spread_P) == 8 and collected.values["prompts_sampled"] == 8
        if mode == "drop":
            assert (spread_P > 0).all() and len(spread_P) == (everything > 0).sum() < 8
        if mode == "refill":
            assert (spread_P > 0).all() and len(spread_P) == min(8, (everything > 0).sum())
            assert collected.values["prompts_sampled"] > 8


def test_variant_with_its_own_training_parameters(base, tmp_path):
    study = tiny_study(variants={"slow": {"preset": "grpo", "clip": [0.1, 0.1], "train": {"lr": 1e-5}}})
    result = train(study, "facts", "slow", 0, base, tmp_path / "run")
    config = json.loads((result.folder / "config.json").read_text())
    assert (config["preset"], config["objective"]["clip"], config["train"]["lr"]) == ("grpo", [0.1, 0.1], 1e-5)
    assert read_metrics(result.folder).frame("update")["lr"].max() == pytest.approx(1e-5)


def test_records_agree_with_the_rollouts(base, tmp_path):
    import pandas as pd

    result = train(tiny_study(), "facts", "tepo_kl", 0, base, tmp_path / "run")
    tokens, responses = (pd.read_parquet(result.folder / f"{name}.parquet") for name in ("tokens", "responses"))
    facts = pd.read_parquet(result.folder / "facts.parquet")
    assert set(responses["step"]) == {1, 2, 4} and len(responses) == 18
    assert set(facts["step"]) == {0, 2, 4} and len(facts) == 3 * 180
    assert set(tokens["kind"]) <= {"decisive", "digit", "copied", "format"}
    assert (tokens.loc[tokens["kind"] == "decisive", "fact"].notna()).all()
    updates = read_metrics(result.folder).frame("update")
    shares = updates[[f"gradient@{kind}" for kind in ("decisive", "digit", "copied", "format")]].dropna()
    assert len(shares), "no update had a gradient"
    assert shares.sum(axis=1).tolist() == pytest.approx([1.0] * len(shares))


def test_credit_in_logits_does_not_depend_on_micro_batches_and_is_no_count_of_tokens(base, tmp_path):
    """Prefixes are shared over micro-batches: cut into rows, the first update has the same sums of |dJ/dz|."""
    sums = []
    for name, tokens in (("whole", 8192), ("rows", 60)):
        result = train(
            tiny_study(train={"rollouts": 1, "micro_batch_tokens": tokens}), "facts", "grpo", 0, base, tmp_path / name
        )
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
        first = next(x["sums"] for x in lines if x["kind"] == "update" and x["sums"]["gradient@format"][1] > 0)
        sums.append({k: v for k, v in first.items() if k.startswith(("gradient@", "tokens@"))})
    assert all(sums[1][name] == pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in sums[0].items())
    shares = {kind: [sums[0][f"{what}@{kind}"] for what in ("gradient", "tokens")] for kind in ("digit", "format")}
    assert all(abs(g[0] / g[1] - t[0] / t[1]) > 0.02 for g, t in shares.values())  # by |dJ/dlog pi| the two are about equal


def test_mpo_with_multi_token_modules(tmp_path):
    """The modules are taught in the warm-up without moving the backbone, kept beside the policy, and trained by MPO."""
    from safetensors.torch import load_file

    variants = {"mpo_mtp": {"preset": "mpo", "block": {"size": 3, "logprobs": "mtp"}}}
    for name, modules in (("plain", 0), ("mtp", 2)):
        study = tiny_study(policy={"mtp_modules": modules}, variants=variants, train={"rollouts": 2})
        prepare(study, tmp_path / name)
        warmup(study, "facts", 0, tmp_path / name)
    plain, with_modules = (run_folder(tmp_path / name, "warmup", "facts", 0) / "policy" for name in ("plain", "mtp"))
    assert (plain / "model.safetensors").read_bytes() == (with_modules / "model.safetensors").read_bytes()
    run = train(study, "facts", "mpo_mtp", 0, tmp_path / "mtp", tmp_path / "run")
    before, after = (
        load_file(folder / "policy" / "mtp" / "modules.safetensors") for folder in (with_modules.parent, run.folder)
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    first = read_metrics(run.folder).frame("update").query("step == 1 and update == 1").iloc[0]
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4) and first["ratio_min"] == pytest.approx(1, abs=1e-4)


def test_missing_or_broken_base_policy(base, tmp_path):
    study = tiny_study()
    prepare(study, tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        train(study, "facts", "grpo", 0, tmp_path)
    folder = run_folder(tmp_path, "warmup", "facts", 0) / "policy"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights to load"):
        train(study, "facts", "grpo", 0, tmp_path)
    assert not (tmp_path / "runs" / "train").exists()


def test_too_long_for_the_context(base):
    # prompts of up to 10 tokens and a context of 96
    with pytest.raises(ConfigError, match="allowed: at most 86"):
        Trainer(tiny_study(train={"max_new_tokens": 90}), "facts", "grpo", 0, base)


def test_mini_and_micro_batches_by_hand():
    parts = mini_batches(8, 4, 2, 0, 1)
    assert [len(p) for p in parts] == [2] * 8
    assert sorted(np.concatenate(parts[:4])) == sorted(np.concatenate(parts[4:])) == list(range(8))
    assert [len(p) for p in mini_batches(3, 4, 1, 0)] == [1, 1, 1], "empty parts are left out"
    # lengths 5, 3, 9, 4 with a budget of 10: sorted 3 4 | 5 | 9 (3 rows x 5 = 15 > 10, 2 rows x 5 = 10 holds after a new start)
    assert micro_batches([5, 3, 9, 4], 10) == [[1, 3], [0], [2]]
    assert micro_batches([50], 10) == [[0]]


def test_overlong_penalty_by_hand():
    # limit 40, buffer 8: free up to 32, then 1/8 a token, -1 at 40
    assert [overlong_penalty(n, 40, 8) for n in (32, 33, 36, 40, 45)] == [0.0, -0.125, -0.5, -1.0, -1.0]
    assert overlong_penalty(40, 40, 0) == 0.0
