"""Sums of a rollout speak of the reward that is trained on, and of correctness where they say so."""

from __future__ import annotations

import numpy as np
import pytest

from tepo_core.grading.types import Grade, Outcome
from tepo_core.rollout.types import Rollouts
from tepo_core.tasks.problem import Problem
from tepo_core.training.experience import Experience, reward_sums


def experience(correct: list[list[int]], rewards: list[list[float]]) -> Experience:
    """Groups of two responses of one token each."""
    flat = [c for group in correct for c in group]
    rollouts = Rollouts()
    rollouts.response_ids, rollouts.finished = [[1]] * len(flat), [True] * len(flat)
    grades = [Grade(Outcome.CORRECT if c else Outcome.WRONG, "1") for c in flat]
    rewards_PG = np.array(rewards)
    ones = [np.zeros(1) for _ in flat]
    problems = [Problem(str(i), "p", "1", "train") for i in range(len(correct))]
    return Experience(problems, rollouts, grades, rewards_PG, rewards_PG - rewards_PG.mean(1, keepdims=True), ones, ones)


@pytest.mark.parametrize(
    ("correct", "rewards", "same"),
    [
        ([[1, 1]], [[1.0, 0.25]], 0),  # both right, one of them too long: there is signal
        ([[0, 0]], [[0.0, -1.0]], 0),
        ([[1, 0]], [[0.0, 0.0]], 1),  # the penalty took what was right: there is none
        ([[1, 1], [0, 0], [1, 0]], [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], 2),
    ],
)
def test_zero_variance_is_of_the_shaped_reward(correct, rewards, same) -> None:
    sums = reward_sums(experience(correct, rewards))
    assert sums["zero_variance"] == (same, len(correct))
    assert sums["all_correct"][0] == sum(all(group) for group in correct)
    assert sums["all_wrong"][0] == sum(not any(group) for group in correct)
