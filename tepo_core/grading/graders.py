"""The one factory of graders."""

from __future__ import annotations

from typing import Any

from tepo_core.grading.exact import ExactGrader
from tepo_core.grading.types import Grader, GradingError

GRADERS = ("exact", "math", "code")


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
