"""Outcomes, the grader interface, and the exact grader used by the arithmetic tasks.

A grade keeps apart what evaluation tables often merge: a wrong answer, no answer, a response cut off by the length
limit, a grading time-out, and a grading error. Only ``CORRECT`` earns a reward; where the grader reached no verdict there
is no reward at all, not one of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class GradingError(ValueError):
    """Unusable input of a grader: an empty gold answer, lists of different lengths, an unknown grader or option."""


class Outcome(StrEnum):
    """What became of one response."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class Grade:
    """Outcome of one response and the answer that was graded (``None`` when there is none).

    ``reason``: what broke or took too long, for ``ERROR`` and ``TIMEOUT``, and the rule that decided where the grader tells it.
    Two grades are equal whatever the reasons."""

    outcome: Outcome
    extracted: str | None = None
    reason: str = field(default="", compare=False)
    beyond_limits: bool = False
    """The response itself passed a limit of its task (CPU time, memory, output of a program): it failed, and that is a verdict."""

    @property
    def graded(self) -> bool:
        """Whether there is a verdict on the response; a time-out or an error of the grader is none."""
        return self.beyond_limits or self.outcome not in (Outcome.TIMEOUT, Outcome.ERROR)

    @property
    def reward(self) -> float:
        """1.0 for a correct answer, else 0.0."""
        return 1.0 if self.outcome is Outcome.CORRECT else 0.0


class Grader(Protocol):
    """Grades a batch. ``golds``, ``responses`` and ``truncated`` have one entry a response; order does not matter."""

    def grade(self, *, golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
        """One grade a response, in the order given. Raises :class:`GradingError` on unusable input."""

    def close(self) -> None:
        """End worker processes, if there are any."""


def check_batch(golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> None:
    """Raise :class:`GradingError` unless the three have one length and every gold is a non-empty string."""
    if not len(golds) == len(responses) == len(truncated):
        raise GradingError(
            f"golds, responses and truncated have {len(golds)}, {len(responses)} and {len(truncated)} entries; "
            "give one entry a response in each"
        )
    for index, gold in enumerate(golds):
        if not isinstance(gold, str) or not gold.strip():
            raise GradingError(f"golds[{index}] = {gold!r}: a gold answer must be a non-empty string; mend the problem file")
    for index, response in enumerate(responses):
        if not isinstance(response, str):
            raise GradingError(f"responses[{index}] is a {type(response).__name__}, not a string; decode it first")
