"""Validation during training: greedy and sampled accuracy on held-out problems, and the planted facts one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tepo_core.grading.types import Grader
from tepo_core.model.logprobs import sequence_logprobs
from tepo_core.model.policy import Policy
from tepo_core.rollout.graded import sample_and_grade
from tepo_core.rollout.types import Engine, SamplingParams
from tepo_core.seeding import derive_seed, numpy_generator
from tepo_core.tasks.arithmetic import Fact
from tepo_core.tasks.problem import Problem

PROBES = 4  # contexts in which each fact is asked


@dataclass
class Validator:
    """Measures a policy without changing it."""

    problems: list[Problem]
    policy: Policy
    engine: Engine
    grader: Grader
    params: SamplingParams
    seed_labels: tuple
    facts: dict[str, Fact] | None = None

    def measure(self, step: int) -> tuple[dict[str, tuple[float, float]], list[dict[str, Any]]]:
        """Sums for ``metrics.jsonl``, and one record a planted fact (empty where there are none)."""
        prompts = [self.policy.encode(problem.prompt) for problem in self.problems]
        sums: dict[str, tuple[float, float]] = {}
        graded = asked = 0
        for name in ("greedy", "sample"):
            answers = sample_and_grade(
                self.engine,
                self.grader,
                self.policy.decode,
                prompts=prompts,
                golds=[problem.answer for problem in self.problems],
                n=1,
                params=replace(self.params, greedy=name == "greedy"),
                seeds=[derive_seed(*self.seed_labels, "validation", step, problem.id) for problem in self.problems],
            )
            grades = answers.grades
            sums[name] = (sum(grade.reward for grade in grades), sum(grade.graded for grade in grades))
            graded, asked = graded + sums[name][1], asked + len(grades)
            if name == "greedy":
                sums["format"] = (float(sum(grade.extracted is not None for grade in grades)), len(grades))
        sums["ungraded"] = (float(asked - graded), asked)
        records = self._probe_facts(step) if self.facts else []
        if records:
            for name, bad in (("fact_correct", True), ("fact_kept", False)):
                rows = [r for r in records if r["bad"] == bad]
                sums[name] = (sum(r["correct"] for r in rows), len(rows))
        return sums, records

    def _probe_facts(self, step: int) -> list[dict[str, Any]]:
        r"""Probability of the right digit of each fact when it is the first step of a chain: ``6+3+2-8=`` -> ``6+3=?``.

        The mean over :data:`PROBES` chains that go on differently; a fact counts as correct when that mean is above 1/2."""
        prompts, responses, owners = [], [], []
        for key, fact in sorted(self.facts.items()):
            rng = numpy_generator(key, "probe")
            for _ in range(PROBES):
                tail = "".join(f"{'+-'[int(rng.integers(2))]}{int(rng.integers(1, 10))}" for _ in range(3))
                prompts.append(self.policy.encode(f"{key}{tail}="))
                responses.append(self.policy.tokenizer(f"{key}={fact.truth}", add_special_tokens=False)["input_ids"])
                owners.append(key)
        with torch.no_grad():
            logprobs_BT, _, mask_BT = sequence_logprobs(
                self.policy.model, prompts, responses, pad_id=self.policy.pad_id, temperature=1.0, entropy=False
            )
        last_B = mask_BT.sum(-1) - 1
        probs = logprobs_BT.gather(1, last_B[:, None]).squeeze(1).exp().tolist()
        means: dict[str, float] = {}
        for key, prob in zip(owners, probs, strict=True):
            means[key] = means.get(key, 0.0) + prob / PROBES
        return [
            {
                "step": step,
                "fact": key,
                "bad": self.facts[key].bad,
                "p_right": self.facts[key].p_right,
                "prob_right": round(mean, 9),
                "correct": int(math.isfinite(mean) and mean > 0.5),
            }
            for key, mean in means.items()
        ]
