"""What a rollout step asks: the same prompts and random numbers for every method, whatever each needed before."""

import numpy as np
import pytest
from tiny import tiny_study

from tepo_core.training.trainer import Trainer

REFILL = {"zero_variance": "refill", "max_refills": 3}


def asked(monkeypatch, base, train_changes, steps, flat=()):
    """(prompts, seeds) of every call of the engine, by step; groups of the steps in ``flat`` all get the same grade."""
    calls = {}
    with Trainer(tiny_study(train=train_changes), "facts", "dapo", 0, base) as run:
        generate, grade = run.engine.generate, run.grader.grade
        step = 0

        def remembered(prompts, n, params, seeds):
            calls[step].append((prompts, seeds))
            return generate(prompts, n, params, seeds)

        def graded(**kwargs):
            grades = grade(**kwargs)
            return [grades[0]] * len(grades) if step in flat else grades

        monkeypatch.setattr(run.engine, "generate", remembered)
        monkeypatch.setattr(run.grader, "grade", graded)
        for step in steps:  # noqa: B007
            calls[step] = []
            run.sampler.collect(step)
    return calls


@pytest.mark.parametrize("flat", [(1, 2), (2,), ()])
def test_prompts_of_a_rollout_do_not_depend_on_earlier_refills(monkeypatch, base, flat):
    kept = asked(monkeypatch, base, {"zero_variance": "keep"}, (1, 2, 3))
    refilled = asked(monkeypatch, base, REFILL, (1, 2, 3), flat)
    assert [len(refilled[step]) for step in flat] == [4] * len(flat), "the case needs refills"
    assert [kept[step][0] for step in (1, 2, 3)] == [refilled[step][0] for step in (1, 2, 3)]


def test_a_step_asks_the_same_whether_others_came_before(monkeypatch, base):
    """Resume: the sampler holds nothing that would have to be saved."""
    through = asked(monkeypatch, base, REFILL, (1, 2, 3), flat=(3,))
    alone = asked(monkeypatch, base, REFILL, (3,), flat=(3,))
    assert through[3] == alone[3] and len(alone[3]) == 4


def test_refills_ask_other_problems_with_other_random_numbers(monkeypatch, base):
    calls = asked(monkeypatch, base, REFILL, (1, 2), flat=(1, 2))
    prompts = [str(prompt) for part, _ in calls[1] for prompt in part]
    assert len(prompts) == 32 and len(set(prompts)) == 32, "64 problems, four rounds of eight: none twice"
    seeds = [seed for step in (1, 2) for _, part in calls[step] for seed in part]
    assert len(set(seeds)) == 64
    rounds = asked(monkeypatch, base, {**REFILL, "prompts_per_rollout": 32}, (1,), flat=(1,))[1]
    assert [len(part) for part, _ in rounds] == [32] * 4, "more than there are: some are asked again"


def test_dropped_groups_are_gone_before_mini_batches_are_cut(base, monkeypatch):
    """zero_variance: drop. Every mini-batch then consists of groups with a signal, and none is empty."""
    with Trainer(tiny_study(train={"zero_variance": "drop"}), "facts", "dapo", 0, base) as run:
        seen, original = [], run.learner.update

        def remembered(experience, rows, labels, keep_tokens=False):
            seen.append(experience.advantages_PG.reshape(-1)[rows].reshape(-1, experience.group_size))
            return original(experience, rows, labels, keep_tokens)

        monkeypatch.setattr(run.learner, "update", remembered)
        run.run()
    assert seen and all(len(groups) and (np.abs(groups).max(1) > 0).all() for groups in seen)
