"""Sampling and grading in one place: what is graded, against which gold, and where nothing fits."""

import pytest
from scripted import TABLE, TOKENIZER, Script

from tepo_core.grading.exact import ExactGrader
from tepo_core.rollout.graded import sample_and_grade
from tepo_core.rollout.types import SamplingParams

PROMPTS = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("1+1=", "2+2=")]


def graded(golds, n=4):
    return sample_and_grade(
        Script(TABLE),
        ExactGrader(),
        lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True),
        prompts=PROMPTS,
        golds=golds,
        n=n,
        params=SamplingParams(1.0, 1.0, 16),
        seeds=[1, 2],
    )


def test_every_response_is_graded_against_the_gold_of_its_prompt():
    result = graded(["2", "4"])
    assert [grade.outcome.value for grade in result.grades] == [
        "correct", "correct", "wrong", "truncated", "wrong", "wrong", "no_answer", "correct",
    ]  # fmt: skip
    assert result.texts[0] == "\\boxed{2}" and len(result.texts) == len(result.rollouts) == 8
    assert [grade.reward for grade in graded(["3", "5"]).grades] == [0, 0, 1, 0, 1, 1, 0, 0]


def test_a_gold_a_prompt():
    with pytest.raises(ValueError, match="1 golds for 2 prompts; give one gold a prompt"):
        graded(["2"])
