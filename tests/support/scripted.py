"""An engine that answers from a table, so that every number of an evaluation is known by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tepo_core.config import Evaluate
from tepo_core.rollout.types import Rollouts
from tepo_core.tasks.problem import Problem
from tepo_core.tasks.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


@dataclass
class Script:
    """Answers from a table: prompt text -> list of (response text, finished). Remembers what it was asked."""

    table: dict
    calls: list = field(default_factory=list)

    def generate(self, prompts, n, params, seeds):
        self.calls.append((len(prompts), n, params, list(seeds)))
        out = Rollouts()
        for p, prompt in enumerate(prompts):
            answers = self.table[TOKENIZER.decode(prompt)]
            for s in range(n):
                text, finished = answers[0 if params.greedy else s + 1]
                ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id] * finished
                out.prompt_ids.append(prompt)
                out.response_ids.append(ids[: params.max_new_tokens])
                out.logprobs.append(np.full(len(ids), -0.5, np.float32))
                out.entropies.append(np.full(len(ids), 0.25 * (s + 1), np.float32))
                out.finished.append(finished)
                out.prompt_index.append(p)
                out.sample_index.append(s)
        return out

    def update_weights(self, model): ...

    def close(self): ...


def box(answer):
    return f"\\boxed{{{answer}}}"


TABLE = {
    "1+1=": [(box(2), True), (box(2), True), (box(2), True), (box(3), True), (box(2), False)],
    "2+2=": [(box(5), True), (box(5), True), (box(5), True), ("4", True), (box(4), True)],
}


PROBLEMS = [Problem("a", "1+1=", "2", "test"), Problem("b", "2+2=", "4", "test")]


CONFIG = Evaluate(splits=["test"], samples=4, k=[1, 2, 4], max_new_tokens=16)
