"""Responses that the grader could not judge: in no mean, without advantage, counted; golds that it cannot read: refused."""

import json

import numpy as np
import pandas as pd
import pytest
from tiny import tiny_study

from tepo_core.grading.types import Grade, Outcome
from tepo_core.runs.metrics import read_metrics
from tepo_core.tasks import prepare as preparing
from tepo_core.tasks.prepare import prepare
from tepo_core.tasks.problem import DataError, Problem
from tepo_core.training.experience import reward_sums
from tepo_core.training.trainer import Trainer, train
from tepo_core.training.warmup import warmup


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    prepare(tiny_study(), root)
    warmup(tiny_study(), "facts", 0, root)
    return root


class Fixed:
    """A grader that gives these outcomes again and again."""

    def __init__(self, outcomes):
        self.outcomes = outcomes

    def grade(self, *, golds, responses, truncated):
        return [Grade(self.outcomes[i % len(self.outcomes)], "7") for i in range(len(golds))]

    def close(self): ...


R, W, T, E = Outcome.CORRECT, Outcome.WRONG, Outcome.TIMEOUT, Outcome.ERROR
GROUPS = [R, R, R, T] + [R, R, W, E] + [T, E, E, T] + [W, W, W, E] + [R, W, R, W] * 4


def collect(base, outcomes, **options):
    with Trainer(tiny_study(train=options), "facts", "grpo", 0, base) as run:
        run.sampler.grader = Fixed(outcomes)
        return run.sampler.collect(1)


def test_time_outs_and_errors_are_not_trained_as_wrong(base):
    experience = collect(base, GROUPS).kept
    advantages_PG = experience.advantages_PG
    assert np.abs(advantages_PG[[0, 2, 3]]).max() == 0  # all right, nothing graded, all wrong
    # 1, 1, 0 of three graded: mean 2/3, std 1/sqrt 3
    assert advantages_PG[1].tolist() == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5, 0])
    assert np.isnan(experience.rewards_PG[0, 3]) and np.isfinite(experience.rewards_PG[4:]).all()


def test_the_sums_of_a_rollout_say_how_many_were_graded(base):
    sums = reward_sums(collect(base, GROUPS).everything)
    assert sums["ungraded"] == (7, 32)
    assert sums["correct"] == sums["reward"] == (3 + 2 + 0 + 0 + 8, 25)
    assert sums["zero_variance"] == (3, 8) and sums["all_correct"] == (1, 8) and sums["all_wrong"] == (1, 8)
    assert sums["format"] == (32, 32)
    clean = reward_sums(collect(base, [R, W, R, W]).everything)
    assert clean["ungraded"] == (0, 32) and clean["correct"] == (16, 32)


def test_groups_without_signal_are_dropped_by_what_was_graded(base):
    assert len(collect(base, GROUPS, zero_variance="drop").kept.problems) == 5


def test_a_shaped_reward_leaves_the_ungraded_out_too(base):
    experience = collect(base, [R, R, R, T], overlong_buffer=31).kept
    lengths_PG = np.array([experience.length(i) for i in range(32)]).reshape(8, 4)
    flat_P = (lengths_PG[:, :3] == lengths_PG[:, :1]).all(1)
    assert (experience.advantages_PG[:, 3] == 0).all() and (experience.advantages_PG[~flat_P, :3] != 0).any()


@pytest.mark.parametrize("outcomes", [GROUPS, [T, E]])
def test_a_whole_run_with_them(base, tmp_path, monkeypatch, outcomes):
    """Also where nothing can be graded at all: no division by zero, no NaN in the files, and nothing counted as wrong."""
    monkeypatch.setattr("tepo_core.training.trainer.make_grader", lambda kind: Fixed(outcomes))
    study = tiny_study(train={"stop_reward_drop": 0.5})
    folder = train(study, "facts", "grpo", 0, base, tmp_path / "run").folder
    assert (
        "NaN" not in (folder / "metrics.jsonl").read_text()
        and json.loads((folder / "done.json").read_text())["stopped"] is None
    )
    events = read_metrics(folder).events
    graded = sum(o not in (T, E) for o in (outcomes * 32)[:32])
    for event in events["rollout"]:
        assert event["sums"]["correct"][1] == graded and event["sums"]["ungraded"] == [32 - graded, 32]
    for event in events["validation"]:
        greedy, ungraded = event["sums"]["greedy"], event["sums"]["ungraded"]
        assert greedy[1] + ungraded[0] / 2 == ungraded[1] / 2 == 16 and ungraded[0] > 0
    responses = pd.read_parquet(folder / "responses.parquet")
    lost = responses["outcome"].isin(["timeout", "error"])
    assert lost.any() and responses.loc[lost, "reward"].isna().all() and responses.loc[~lost, "reward"].notna().all()
    if (folder / "tokens.parquet").is_file():
        tokens = pd.read_parquet(folder / "tokens.parquet")
        assert tokens["correct"].dtype == bool


SET = [Problem(f"p{i}", f"{i} + 1 = ?", str(i + 1), "gsm8k-train", {"solution": str(i + 1)}) for i in range(40)]


@pytest.mark.parametrize("gold", ["\\frac{5055}{2^{15}", "n^{\\text{th}}", "4\\max A + 3"])
def test_a_gold_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch, gold):
    problems = [*SET[:7], Problem("the-seventh", "?", gold, "gsm8k-train"), *SET[8:]]
    monkeypatch.setattr(preparing, "load_benchmark", lambda *_: problems)
    study = tiny_study(tasks=["gsm8k-train"], warmup={"steps": 0})
    with pytest.raises(DataError, match="gsm8k-train, problem 'the-seventh'") as fault:
        prepare(study, tmp_path)
    assert repr(gold) in str(fault.value) and "cannot be read" in str(fault.value) and "allowed" in str(fault.value)


def test_a_program_without_tests_is_refused_by_name(tmp_path, monkeypatch):
    problems = [Problem(f"p{i}", "?", '{"prompt": "", "entry_point": "f", "tests": " "}', "mbpp") for i in range(40)]
    monkeypatch.setattr(preparing, "load_benchmark", lambda *_: problems)
    with pytest.raises(DataError, match="mbpp, problem 'p[0-9]+': .*every program would pass"):
        prepare(tiny_study(tasks=["mbpp"], warmup={"steps": 0}), tmp_path)


def test_an_evaluation_set_is_kept_whole_and_says_which_golds_cannot_be_read(tmp_path, monkeypatch):
    """Its count is pinned; such a problem is shown as outcome ``error``, never as wrong."""
    hard = [*SET[:3], Problem("odd", "?", "\\frac{11}{2^{20}", "olympiadbench")]
    monkeypatch.setattr(preparing, "load_benchmark", lambda name, _: hard if name == "olympiadbench" else SET)
    study = tiny_study(tasks=["gsm8k-train"], data={"eval_sets": ["olympiadbench"]}, warmup={"steps": 0})
    manifest = prepare(study, tmp_path).manifests["gsm8k-train-s0"]
    assert manifest["counts"]["olympiadbench"] == 4
    assert manifest["unreadable_golds"] == [{"set": "olympiadbench", "id": "odd", "gold": "\\frac{11}{2^{20}"}]
