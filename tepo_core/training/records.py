"""Token and response records of a training run: a seeded sample of what the policy said and what the update did to it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tepo_core.model.policy import Policy
from tepo_core.seeding import numpy_generator
from tepo_core.tasks.problem import TOKEN_KINDS
from tepo_core.training.experience import Experience
from tepo_core.training.update import UpdateResult


def chosen_rows(rows: list[int], count: int, *labels: str | int) -> list[int]:
    """At most ``count`` of the rows, drawn without replacement."""
    if len(rows) <= count:
        return rows
    drawn = numpy_generator(*labels, "record").choice(len(rows), size=count, replace=False)
    return [rows[i] for i in sorted(drawn)]


def token_lines(experience: Experience, result: UpdateResult, rows: list[int], policy: Policy, step: int, update: int) -> str:
    """One JSON line a token of the given rows, in the columns of ``tokens.parquet``."""
    lines = []
    for row in rows:
        if not experience.grades[row].graded:  # neither right nor wrong
            continue
        kept = result.tokens[row]
        ids = experience.rollouts.response_ids[row]
        texts = policy.token_texts(ids)
        problem = experience.problems[row // experience.group_size]
        for t, token in enumerate(ids):
            line = {
                "step": step,
                "update": update,
                "response": row,
                "prompt_id": problem.id,
                "position": t,
                "token_id": token,
                "text": texts[t],
                "logprob_old": experience.old_logprobs[row][t],
                "entropy_old": experience.old_entropies[row][t],
                "advantage": experience.advantage(row),
                "correct": experience.grades[row].reward == 1.0,
                "kind": TOKEN_KINDS[experience.kinds[row][t]] if experience.kinds else None,
                "fact": experience.facts[row][t] if experience.facts else None,
                **{name: values[t] for name, values in kept.items()},
            }
            lines.append(json.dumps({name: _plain(value) for name, value in line.items()}, sort_keys=True))
    return "".join(line + "\n" for line in lines)


def response_lines(experience: Experience, rows: list[int], policy: Policy, step: int) -> str:
    """One JSON line a response of the given rows, in the columns of ``responses.parquet``."""
    lines = []
    for row in rows:
        problem = experience.problems[row // experience.group_size]
        ids, grade = experience.rollouts.response_ids[row], experience.grades[row]
        reward = float(experience.rewards_PG.reshape(-1)[row]) if grade.graded else None
        line = {
            "step": step,
            "response": row,
            "prompt_id": problem.id,
            "prompt": problem.prompt,
            "text": policy.decode(ids),
            "reward": reward,
            "outcome": grade.outcome.value,
            "length": len(ids),
            "finish": "stop" if experience.rollouts.finished[row] else "length",
        }
        lines.append(json.dumps(line, sort_keys=True))
    return "".join(line + "\n" for line in lines)


def json_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, sort_keys=True) + "\n" for record in records)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}") if np.isfinite(value) else None
    return value
