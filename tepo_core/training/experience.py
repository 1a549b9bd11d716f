"""Experience: graded rollouts with advantages, and how they are cut into mini-batches and micro-batches.

A mini-batch is a set of whole prompts, so that a group is never split. A micro-batch is a share of a mini-batch that fits a token
budget; it decides memory and speed, never the gradient (the objectives divide by the totals of the whole mini-batch)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tepo_core.grading.types import Grade
from tepo_core.rollout.types import Rollouts
from tepo_core.seeding import numpy_generator
from tepo_core.tasks.problem import TOKEN_KINDS, Problem


@dataclass
class Experience:
    """P prompts x G responses = B rows, ordered by prompt then sample.

    ``rewards_PG`` is NaN where the grader reached no verdict (``graded_PG`` False); such a response has advantage 0.
    ``kinds`` holds an index into :data:`tepo_core.tasks.problem.TOKEN_KINDS` for every token, or None where the task has no truth;
    ``reference`` the reference policy's log-probs, ``weights`` the off-policy correction, ``old_ahead``
    the multi-token modules' log-probs under the sampling policy ([T, K - 1] a response); each None when not used."""

    problems: list[Problem]
    rollouts: Rollouts
    grades: list[Grade]
    rewards_PG: np.ndarray
    advantages_PG: np.ndarray
    old_logprobs: list[np.ndarray]
    old_entropies: list[np.ndarray]
    kinds: list[np.ndarray] | None = None
    facts: list[list[str | None]] | None = None
    reference: list[np.ndarray] | None = None
    weights: list[np.ndarray] | None = None
    old_ahead: list[np.ndarray] | None = None

    @property
    def group_size(self) -> int:
        return self.rewards_PG.shape[1]

    @property
    def correct_PG(self) -> np.ndarray:
        return np.array([grade.reward for grade in self.grades]).reshape(self.rewards_PG.shape)

    @property
    def graded_PG(self) -> np.ndarray:
        return np.array([grade.graded for grade in self.grades]).reshape(self.rewards_PG.shape)

    @property
    def all_correct_P(self) -> np.ndarray:
        """Groups in which something was graded, and all of it right."""
        return self.graded_PG.any(1) & np.where(self.graded_PG, self.correct_PG == 1, True).all(1)

    @property
    def all_wrong_P(self) -> np.ndarray:
        """Groups in which something was graded, and none of it right."""
        return self.graded_PG.any(1) & (self.correct_PG == 0).all(1)

    @property
    def flat_P(self) -> np.ndarray:
        """Groups without signal: all that was graded is right, or none of it, or nothing was graded."""
        return self.all_correct_P | self.all_wrong_P | ~self.graded_PG.any(1)

    @property
    def equal_rewards_P(self) -> np.ndarray:
        """Groups whose graded responses all have one reward, the one that is trained on, shaped or not: no advantage."""
        low_P = np.where(self.graded_PG, self.rewards_PG, np.inf).min(1)
        return low_P >= np.where(self.graded_PG, self.rewards_PG, -np.inf).max(1)

    def rows_of(self, prompts: np.ndarray) -> list[int]:
        """Rows of the given prompts, all responses of each."""
        return [int(p) * self.group_size + g for p in prompts for g in range(self.group_size)]

    def advantage(self, row: int) -> float:
        return float(self.advantages_PG.reshape(-1)[row])

    def length(self, row: int) -> int:
        return len(self.rollouts.response_ids[row])


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """Soft overlong punishment: 0 up to ``limit - buffer`` tokens, then linear down to -1 at ``limit`` (DAPO, 2503.14476, eq. 13)."""
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (limit - buffer)) / buffer))


def mini_batches(prompts: int, minibatches: int, epochs: int, *labels: str | int) -> list[np.ndarray]:
    """Prompts of every update of a rollout step: each epoch is a fresh permutation cut into ``minibatches`` parts.

    Parts that would be empty (few prompts were kept) are left out."""
    parts: list[np.ndarray] = []
    for epoch in range(epochs):
        order = numpy_generator(*labels, "minibatches", epoch).permutation(prompts)
        parts.extend(part for part in np.array_split(order, minibatches) if len(part))
    return parts


def pad_grid(rows: list[np.ndarray] | list[list[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Right-padded (B, T) tensor, 0 on padding."""
    width = max(1, max(len(row) for row in rows))
    grid = np.zeros((len(rows), width), dtype=np.float64)
    for i, row in enumerate(rows):
        grid[i, : len(row)] = row
    return torch.from_numpy(grid).to(device=device, dtype=dtype)


def reward_sums(experience: Experience) -> dict[str, tuple[float, float]]:
    """Numerators and denominators of a rollout step (format of ``metrics.jsonl``). ``reward`` and ``correct`` are over the graded
    responses; ``ungraded`` says how many were not."""
    rollouts, grades = experience.rollouts, experience.grades
    responses = len(rollouts)
    tokens = float(sum(len(ids) for ids in rollouts.response_ids))
    graded_PG, groups = experience.graded_PG, experience.rewards_PG.shape[0]
    graded = int(graded_PG.sum())
    sums = {
        "reward": (float(experience.rewards_PG[graded_PG].sum()), graded),
        "correct": (float(experience.correct_PG.sum()), graded),
        "ungraded": (float(responses - graded), responses),
        "format": (float(sum(grade.extracted is not None for grade in grades)), responses),
        "truncated": (float(responses - sum(rollouts.finished)), responses),
        "length": (tokens, responses),
        "entropy": (float(sum(row.sum(dtype=np.float64) for row in experience.old_entropies)), tokens),
        "entropy_sampled": (-float(sum(row.sum(dtype=np.float64) for row in experience.old_logprobs)), tokens),
        "zero_variance": (float(experience.equal_rewards_P.sum()), groups),
        "all_correct": (float(experience.all_correct_P.sum()), groups),
        "all_wrong": (float(experience.all_wrong_P.sum()), groups),
        "covariance": (_covariance(experience) * tokens, tokens),
    }
    if experience.kinds is not None:
        kinds = np.concatenate(experience.kinds)
        entropies = np.concatenate(experience.old_entropies).astype(np.float64)
        for index, kind in enumerate(TOKEN_KINDS):
            chosen = kinds == index
            sums[f"tokens@{kind}"] = (float(chosen.sum()), tokens)
            sums[f"entropy@{kind}"] = (float(entropies[chosen].sum()), float(chosen.sum()))
    return sums


def _covariance(experience: Experience) -> float:
    """Cov over tokens of (log pi, A) under the sampling policy (arXiv 2505.22617): its sign predicts the change of entropy."""
    logprobs = np.concatenate(experience.old_logprobs).astype(np.float64)
    lengths = [experience.length(row) for row in range(len(experience.rollouts))]
    advantages = np.repeat(experience.advantages_PG.reshape(-1), lengths)
    return float(((logprobs - logprobs.mean()) * (advantages - advantages.mean())).mean())
