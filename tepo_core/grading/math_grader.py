r"""The mathematics grader: extraction, exact fast paths, and math-verify in worker processes that can be killed.

Rules (each has a test):

- Strict by default: the last ``\boxed{}`` after the reasoning is the answer, and none is when it never closes. A truncated
  response is ``TRUNCATED``.
- A comparison that exceeds the time-out is ``TIMEOUT``; one that crashes, or a gold that cannot be read, is ``ERROR``. Neither
  is ever counted as wrong or right. ``Grade.reason`` says what broke, or which rule decided.
- An answer of more than 10,000 characters that is neither an integer nor the gold's own text is not parsed: ``ERROR``.
- An answer that cannot be read as mathematics is compared as text.
- Lists in a box or in mathematics are sets of solutions, tuples are ordered, decimals are compared after rounding to six
  places, units and degree signs are dropped, 28 % equals 28 and 0.28. The forms of writing are in
  :mod:`tepo_core.grading.forms`, the policy on them in docs/evaluation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from tepo_core.grading.compare import MAX_CHARACTERS, quick_reason
from tepo_core.grading.extract import Answer, gold_answer, lenient_answer, strict_answer
from tepo_core.grading.pool import Item, Pool
from tepo_core.grading.types import Grade, GradingError, Outcome, check_batch
from tepo_core.machine import usable_cores


class MathGrader:
    """Grades mathematical answers in batches.

    ``require_boxed``: the strict rule; False looks for an answer the way a reader would. ``timeout``: CPU seconds a comparison.
    ``workers``: processes, 0 for one per available core. ``fast_paths``: False sends everything to math-verify (for tests).
    Raises :class:`GradingError` for a value out of range. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, *, require_boxed: bool = True, timeout: float = 5.0, workers: int = 0, fast_paths: bool = True) -> None:
        if not timeout > 0:
            raise GradingError(f"timeout = {timeout}: must be a positive number of seconds")
        if workers < 0:
            raise GradingError(f"workers = {workers}: must be 0 (one per core) or more")
        self.require_boxed, self.fast_paths = require_boxed, fast_paths
        cores = usable_cores()
        self._pool = Pool(workers or cores, timeout)

    def grade(self, *, golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
        """One grade a response. Raises :class:`GradingError` on lists of different lengths or an empty gold."""
        check_batch(golds, responses, truncated)
        find = strict_answer if self.require_boxed else lenient_answer
        expected = {gold: gold_answer(gold) for gold in dict.fromkeys(golds)}
        found = [find(response) for response in responses]
        return self._judge([expected[gold] for gold in golds], found, truncated)

    def _judge(self, golds: Sequence[Answer], found: Sequence[Answer | None], truncated: Sequence[bool]) -> list[Grade]:
        grades: list[Grade | None] = [None] * len(golds)
        slow: dict[Item, list[int]] = {}
        for i, (gold, answer, cut) in enumerate(zip(golds, found, truncated, strict=True)):
            text = answer.text if answer is not None else None
            if cut:
                grades[i] = Grade(Outcome.TRUNCATED, text, "cut off by the length limit")
            elif answer is None:
                grades[i] = Grade(Outcome.NO_ANSWER)
            else:
                verdict, why = quick_reason(gold, answer) if self.fast_paths else (None, "")
                longest = max(len(gold.text), len(answer.text))
                if verdict is None and longest > MAX_CHARACTERS:
                    why = f"a text of {longest} characters is not parsed (limit {MAX_CHARACTERS})"
                    grades[i] = Grade(Outcome.ERROR, text, why)
                elif verdict is None:
                    slow.setdefault((gold.text, gold.bare, answer.text, answer.bare), []).append(i)
                else:
                    grades[i] = Grade(Outcome.CORRECT if verdict else Outcome.WRONG, text, why)
        for (item, places), (outcome, why) in zip(slow.items(), self._pool.run(list(slow)), strict=True):
            for i in places:
                grades[i] = Grade(Outcome(outcome), item[2], why)
        return [grade for grade in grades if grade is not None]

    def close(self) -> None:
        """End the worker processes; they start again when needed."""
        self._pool.close()

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compare(*, gold: str, answer: str, timeout: float = 5.0) -> Outcome:
    """Outcome of one answer against one gold, both bare. Keyword-only, so that the two cannot be swapped by position."""
    with MathGrader(timeout=timeout, workers=1) as grader:
        check_batch([gold], [answer], [False])
        found = Answer(answer.strip(), False) if answer.strip() else None
        return grader._judge([gold_answer(gold)], [found], [False])[0].outcome
