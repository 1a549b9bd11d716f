"""The exact grader of the arithmetic tasks: the last complete box compared with the gold as a string, integers by value."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tepo_core.grading.boxes import last_boxed
from tepo_core.grading.extract import after_reasoning
from tepo_core.grading.types import Grade, Outcome, check_batch

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


def canonical_integer(text: str) -> str | None:
    """``+007`` becomes ``7`` and ``-0`` becomes ``0``; ``None`` for anything that is not an ASCII integer.

    Works on strings, so that an answer of a million digits costs no conversion and hits no limit of ``int``."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    return f"-{match[2]}" if match[1] == "-" and match[2] != "0" else match[2]


class ExactGrader:
    r"""The last complete ``\boxed{}`` after the reasoning compared with the gold as a stripped string, integers by value. In process.

    A truncated response is ``TRUNCATED`` whatever it says: an answer that the policy did not finish is not an answer.
    """

    def grade(self, *, golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
        """One grade a response. Raises :class:`~tepo_core.grading.types.GradingError` on lists of different lengths or an empty gold."""
        check_batch(golds, responses, truncated)
        return [self._one(*item) for item in zip(golds, responses, truncated, strict=True)]

    @staticmethod
    def _one(gold: str, response: str, truncated: bool) -> Grade:
        answer = last_boxed(after_reasoning(response)) or None
        if truncated:
            return Grade(Outcome.TRUNCATED, answer)
        if answer is None:
            return Grade(Outcome.NO_ANSWER)
        gold = gold.strip()
        number = canonical_integer(gold)
        same = answer == gold or (number is not None and canonical_integer(answer) == number)
        return Grade(Outcome.CORRECT if same else Outcome.WRONG, answer)

    def close(self) -> None:
        """Nothing to end."""
