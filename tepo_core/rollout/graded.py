"""Sample, then grade: the one path from token ids to outcomes, for training, validation and evaluation alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tepo_core.grading.types import Grade, Grader
from tepo_core.rollout.types import Engine, Rollouts, SamplingParams


@dataclass(frozen=True)
class Graded:
    """B responses, ordered by prompt then sample, with the text that was graded and its grade."""

    rollouts: Rollouts
    texts: list[str]
    grades: list[Grade]


def sample_and_grade(
    engine: Engine,
    grader: Grader,
    decode: Callable[[list[int]], str],
    *,
    prompts: list[list[int]],
    golds: list[str],
    n: int,
    params: SamplingParams,
    seeds: list[int],
) -> Graded:
    """``n`` responses to each prompt (token ids), each graded against the prompt's gold. ``golds`` and ``seeds``: one a prompt.

    ``decode`` turns the ids of a response into the text that is graded. A response that did not end by itself is graded as
    truncated. Raises ``ValueError`` where golds or seeds are not as many as prompts."""
    if len(golds) != len(prompts):
        raise ValueError(f"{len(golds)} golds for {len(prompts)} prompts; give one gold a prompt")
    rollouts = engine.generate(prompts, n, params, seeds)
    texts = [decode(ids) for ids in rollouts.response_ids]
    grades = grader.grade(
        golds=[golds[p] for p in rollouts.prompt_index],
        responses=texts,
        truncated=[not finished for finished in rollouts.finished],
    )
    return Graded(rollouts, texts, grades)
