"""Golds that a grader cannot read: found before a model is asked, because no response to such a problem can be graded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tepo_core.grading.graders import make_grader
from tepo_core.grading.types import GradingError

_PROBE = "\\boxed{7919}"  # a plain number: a verdict on it, whichever, needs nothing but a gold that can be read


def unreadable_golds(kind: str, golds: Iterable[str]) -> dict[str, str]:
    """Gold -> why the grader ``kind`` (a name of ``graders.GRADERS``) cannot read it; empty when it reads all of them.

    Raises :class:`GradingError` for an unknown grader or an empty gold."""
    return dict(_unreadable(kind, frozenset(golds)))


@lru_cache(maxsize=64)  # the seeds of a study share a set, and mathematics takes seconds
def _unreadable(kind: str, golds: frozenset[str]) -> tuple[tuple[str, str], ...]:
    if kind == "exact" or not golds:
        return ()
    if kind == "code":
        return tuple((gold, fault) for gold in sorted(golds) if (fault := _bad_tests(gold)))
    listed = sorted(golds)
    grader = make_grader(kind)
    try:
        grades = grader.grade(golds=listed, responses=[_PROBE] * len(listed), truncated=[False] * len(listed))
    finally:
        grader.close()
    fault = "it cannot be read as mathematics; allowed: a number, an expression, a tuple, set, interval or equation in LaTeX"
    return tuple((gold, fault) for gold, grade in zip(listed, grades, strict=True) if not grade.graded)


def _bad_tests(gold: str) -> str | None:
    from tepo_core.grading.code_grader import read_gold

    try:
        read_gold(gold)
    except GradingError as error:
        return f"{error}; allowed: JSON with prompt, entry_point and tests"
    return None
