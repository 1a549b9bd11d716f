"""Outcomes, the grader interface, and the exact grader used by the arithmetic tasks.

A grade keeps apart what evaluation tables often merge: a wrong answer, no answer, a response cut off by the length
limit, a grading time-out, and a grading error. Only ``CORRECT`` earns a reward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

GRADERS = ("exact", "math", "code")

# One pass over the text: an opened box (also with its backslash doubled by careless escaping), an escaped character (so that
# \{ and \} are not groups), or a brace.
_TOKENS = re.compile(r"(?P<box>\\+(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


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
    """Outcome of one response and the answer that was graded (``None`` when there is none)."""

    outcome: Outcome
    extracted: str | None = None

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


def boxes(text: str) -> list[tuple[int, int, int, int]]:
    r"""The complete ``\boxed{...}`` and ``\fbox{...}`` of ``text`` that lie in no other complete box, from left to right.

    Each is (start of the command, start of the content, end of the content, end of the box). A box whose whole content is
    a box is unwrapped. Complete means that the braces balance. Linear in the length of the text.
    """
    first = min((i for i in (text.find("\\boxed"), text.find("\\fbox")) if i >= 0), default=-1)
    if first < 0:
        return []
    stack: list[tuple[int, int]] = []  # open groups: start of the command and of the content; (-1, -1) for a plain brace
    closed: dict[int, tuple[int, int]] = {}  # complete boxes: start of the command -> start and end of the content
    outer: list[int] = []
    for token in _TOKENS.finditer(text, first):
        if token["box"]:
            stack.append((token.start(), token.end()))
        elif token["open"]:
            stack.append((-1, -1))
        elif token["close"] and stack:
            command, content = stack.pop()
            if command >= 0:
                while outer and outer[-1] > command:
                    outer.pop()
                outer.append(command)
                closed[command] = (content, token.start())
    return [(command, *_unwrap(text, closed, *closed[command]), closed[command][1] + 1) for command in outer]


def _unwrap(text: str, closed: dict[int, tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    while True:
        while begin < end and text[begin].isspace():
            begin += 1
        while begin < end and text[end - 1].isspace():
            end -= 1
        inner = closed.get(begin)
        if inner is None or inner[1] + 1 != end:
            return begin, end
        begin, end = inner


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete ``\boxed{...}`` (or ``\fbox{...}``) of ``text``; ``None`` without one.

    A box that contains another one is the later of the two; an unfinished box at the end is passed over. See :func:`boxes`.
    """
    found = boxes(text)
    return text[found[-1][1] : found[-1][2]] if found else None


def canonical_integer(text: str) -> str | None:
    """``+007`` becomes ``7`` and ``-0`` becomes ``0``; ``None`` for anything that is not an ASCII integer.

    Works on strings, so that an answer of a million digits costs no conversion and hits no limit of ``int``."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    return f"-{match[2]}" if match[1] == "-" and match[2] != "0" else match[2]


def check_batch(golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> None:
    """Raise :class:`GradingError` unless the three have one length and every gold is a non-empty string."""
    if not len(golds) == len(responses) == len(truncated):
        raise GradingError(
            f"golds, responses and truncated have {len(golds)}, {len(responses)} and {len(truncated)} entries; "
            "give one entry a response in each"
        )
    for index, gold in enumerate(golds):
        if not isinstance(gold, str) or not gold.strip():
            raise GradingError(
                f"golds[{index}] = {gold!r}: a gold answer must be a non-empty string; mend the problem file"
            )
    for index, response in enumerate(responses):
        if not isinstance(response, str):
            raise GradingError(f"responses[{index}] is a {type(response).__name__}, not a string; decode it first")


class ExactGrader:
    r"""The last complete ``\boxed{}`` compared with the gold as a stripped string, integers by value. In process.

    A truncated response is ``TRUNCATED`` whatever it says: an answer that the policy did not finish is not an answer.
    """

    def grade(self, *, golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
        """One grade a response. Raises :class:`GradingError` on lists of different lengths or an empty gold."""
        check_batch(golds, responses, truncated)
        return [self._one(*item) for item in zip(golds, responses, truncated, strict=True)]

    @staticmethod
    def _one(gold: str, response: str, truncated: bool) -> Grade:
        answer = last_boxed(response) or None
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


def make_grader(kind: str, **options: Any) -> Grader:
    """Grader by name: ``exact`` (in process), ``math`` (math-verify in a killable pool) or ``code`` (sandbox).

    ``options`` are those of the grader's class. Raises :class:`GradingError` for an unknown name or option."""
    if kind == "exact":
        maker: Any = ExactGrader
    elif kind == "math":
        from tepo_core.grading.math_grader import MathGrader as maker
    elif kind == "code":
        from tepo_core.grading.code_grader import CodeGrader as maker
    else:
        raise GradingError(f"grader = {kind!r} is unknown; allowed: {', '.join(GRADERS)}")
    try:
        return maker(**options)
    except TypeError as error:
        raise GradingError(f"grader {kind!r}: {error}") from None
