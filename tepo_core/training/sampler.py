"""From prompts to graded experience: sample groups, grade, keep, drop or refill groups, compute advantages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from tepo_core.config import Rollout, Train
from tepo_core.credit.group import compute_advantages
from tepo_core.grading.types import Grade, Grader
from tepo_core.model.policy import Policy
from tepo_core.objectives.correction import off_policy_correction
from tepo_core.rollout.graded import sample_and_grade
from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.types import Engine, Rollouts, SamplingParams
from tepo_core.seeding import derive_seed, epoch_rows, numpy_generator
from tepo_core.tasks.arithmetic import Fact, token_kinds
from tepo_core.tasks.problem import TOKEN_KINDS, Problem
from tepo_core.training.experience import Experience, overlong_penalty, pad_grid


@dataclass
class Collected:
    """One rollout step. ``everything`` is all that was sampled, ``kept`` what will be learned from (None when no group is left)."""

    everything: Experience
    kept: Experience | None
    values: dict[str, float]
    sums: dict[str, tuple[float, float]]


@dataclass
class Sampler:
    """Walks through the training problems, ``prompts_per_rollout`` at each step; what is asked depends on the step alone, so there
    is no state to save.

    Rollout n asks the same prompts with the same random numbers whatever the method needed before it: refills of
    ``zero_variance: refill`` draw from a stream of their own, labelled by step and attempt."""

    problems: list[Problem]
    prompt_ids: list[list[int]]
    engine: Engine
    grader: Grader
    policy: Policy
    train: Train
    rollout: Rollout
    advantage: str
    seed_labels: tuple
    facts: dict[str, Fact] | None = None

    def collect(self, step: int) -> Collected:
        """Sample one rollout step, with refills where configured."""
        wanted, asked = self.train.prompts_per_rollout, []
        parts: list[Experience] = []
        kept: list[tuple[Experience, int]] = []
        for attempt in range(self.train.max_refills + 1):
            rows = self._refill_rows(step, attempt, asked) if attempt else self._rows(step)
            part = self._sample(step, attempt, rows)
            parts.append(part)
            asked += rows
            keep = np.arange(len(part.problems))
            if self.train.zero_variance != "keep":
                keep = np.flatnonzero(~part.flat_P)  # correctness decides, not the shaped reward
            kept.extend((part, int(p)) for p in keep)
            if self.train.zero_variance != "refill" or len(kept) >= wanted:
                break
        kept = kept[:wanted]
        everything = merge(parts, [(part, p) for part in parts for p in range(len(part.problems))])
        learned = merge(parts, kept) if kept else None
        values = {
            "prompts_sampled": len(everything.problems),
            "prompts_kept": len(kept),
            "responses": len(everything.rollouts),
            "tokens": sum(len(ids) for ids in everything.rollouts.response_ids),
        }
        sums: dict[str, tuple[float, float]] = {}
        if learned is not None and self.rollout.engine != "transformers":
            sums = self._correct(learned)
        return Collected(everything, learned, values, sums)

    def _rows(self, step: int) -> list[int]:
        """Problems of the step: its share of an endless stream over all of them, freshly permuted every epoch."""
        size = self.train.prompts_per_rollout
        return epoch_rows((step - 1) * size, size, len(self.problems), *self.seed_labels, "prompts")

    def _refill_rows(self, step: int, attempt: int, asked: list[int]) -> list[int]:
        """Problems of one refill, none of them asked before in this step while there are others."""
        order = numpy_generator(*self.seed_labels, "refill", step, attempt).permutation(len(self.problems)).tolist()
        known = set(asked)
        order.sort(key=known.__contains__)  # stable: those not asked yet come first, in their random order
        size = self.train.prompts_per_rollout
        return list(islice(cycle(order), size))

    def _sample(self, step: int, attempt: int, rows: list[int]) -> Experience:
        problems = [self.problems[row] for row in rows]
        first = (step - 1) * len(rows)
        labels = [("refill", step, attempt, i) if attempt else ("sample", step, first + i) for i in range(len(rows))]
        seeds = [derive_seed(*self.seed_labels, *label) for label in labels]
        params = SamplingParams(self.train.temperature, self.train.top_p, self.train.max_new_tokens)
        graded = sample_and_grade(
            self.engine,
            self.grader,
            self.policy.decode,
            prompts=[self.prompt_ids[row] for row in rows],
            golds=[problem.answer for problem in problems],
            n=self.train.group_size,
            params=params,
            seeds=seeds,
        )
        return self._experience(problems, graded.rollouts, graded.grades)

    def _experience(self, problems: list[Problem], rollouts: Rollouts, grades: list[Grade]) -> Experience:
        limit, buffer = self.train.max_new_tokens, self.train.overlong_buffer
        rewards = [  # NaN where there is no verdict: a sum that forgets this shows it
            g.reward + overlong_penalty(len(ids), limit, buffer) if g.graded else np.nan
            for g, ids in zip(grades, rollouts.response_ids, strict=True)
        ]
        rewards_PG = torch.tensor(rewards, dtype=torch.float64).reshape(len(problems), self.train.group_size)
        advantages_PG = compute_advantages(rewards_PG, self.advantage, ~rewards_PG.isnan()).numpy()
        rewards_PG = rewards_PG.numpy()
        old_logprobs, old_entropies = rollouts.logprobs, rollouts.entropies
        if any(row is None for row in old_entropies):
            # the engine gives no exact entropies (vLLM): the trainer's own model is the sampling policy's other copy
            old_logprobs, old_entropies = rescore(
                self.policy.model,
                rollouts,
                pad_id=self.policy.pad_id,
                temperature=self.train.temperature,
                micro_batch_tokens=self.train.micro_batch_tokens,
            )
        kinds = facts = None
        if self.facts is not None:
            labelled = [token_kinds(self.policy.token_texts(ids), self.facts) for ids in rollouts.response_ids]
            kinds = [np.array([TOKEN_KINDS.index(kind) for kind, _ in row], dtype=np.int64) for row in labelled]
            facts = [[fact for _, fact in row] for row in labelled]
        return Experience(
            problems=problems,
            rollouts=rollouts,
            grades=grades,
            rewards_PG=rewards_PG,
            advantages_PG=advantages_PG,
            old_logprobs=old_logprobs,
            old_entropies=old_entropies,
            kinds=kinds,
            facts=facts,
        )

    def _correct(self, experience: Experience) -> dict[str, tuple[float, float]]:
        """Mismatch between engine and trainer, and the correction weights where configured."""
        dtype, device = torch.float64, torch.device("cpu")
        trainer_BT = pad_grid(experience.old_logprobs, dtype, device)
        sampler_BT = pad_grid(experience.rollouts.logprobs, dtype, device)
        lengths = [len(row) for row in experience.old_logprobs]
        mask_BT = torch.arange(trainer_BT.shape[1])[None, :] < torch.tensor(lengths)[:, None]
        correction = off_policy_correction(
            trainer_BT, sampler_BT, mask_BT, kind=self.rollout.importance_correction, cap=self.rollout.importance_cap
        )
        if correction.weights_BT is not None:
            experience.weights = [row[:n].numpy() for row, n in zip(correction.weights_BT, lengths, strict=True)]
        beyond = ((trainer_BT - sampler_BT).abs() > 0.01) & mask_BT
        sums = {name: (float(n), float(d)) for name, (n, d) in correction.sums.items()}
        return {**sums, "mismatch_beyond_1pct": (float(beyond.sum()), float(sum(lengths)))}


def merge(parts: list[Experience], chosen: list[tuple[Experience, int]]) -> Experience:
    """The chosen prompts (part, index) of several parts as one experience, groups whole and in the given order."""
    if len(parts) == 1 and [p for _, p in chosen] == list(range(len(parts[0].problems))):
        return parts[0]
    rollouts = Rollouts()
    rows = [(part, row) for part, p in chosen for row in part.rows_of(np.array([p]))]
    for index, (part, p) in enumerate(chosen):
        group = part.rollouts.select(part.rows_of(np.array([p])))
        group.prompt_index = [0] * len(group)
        rollouts.extend(group, index)

    def column(name: str) -> Any:
        return None if getattr(parts[0], name) is None else [getattr(part, name)[row] for part, row in rows]

    return Experience(
        problems=[part.problems[p] for part, p in chosen],
        rollouts=rollouts,
        grades=[part.grades[row] for part, row in rows],
        rewards_PG=np.stack([part.rewards_PG[p] for part, p in chosen]),
        advantages_PG=np.stack([part.advantages_PG[p] for part, p in chosen]),
        old_logprobs=column("old_logprobs"),
        old_entropies=column("old_entropies"),
        kinds=column("kinds"),
        facts=column("facts"),
    )
