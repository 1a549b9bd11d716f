"""Why a grade is what it is: what was extracted by which rule, how both sides are read, and what decided."""

from __future__ import annotations

from typing import Any

from tepo_core.grading.boxes import last_boxed
from tepo_core.grading.compare import clean, decimal_comma
from tepo_core.grading.exact import canonical_integer
from tepo_core.grading.extract import Answer, gold_answer, lenient_answer, strict_answer
from tepo_core.grading.forms import reduce_pair
from tepo_core.grading.types import Grade, GradingError, Outcome

EXPLAINED = ("exact", "math")
_NOTHING = {
    "strict": "no \\boxed{} after the reasoning, or the last one is empty or never closes",
    "lenient": "no mark of an answer, no mathematics and no number, or the last box or tag is empty or never closes",
}


def check_explained(grader: str) -> None:
    """Raise :class:`GradingError` for a grader that extracts no answer."""
    if grader == "code":
        raise GradingError(f"grader = 'code' runs programs and has no answer to explain; allowed: {', '.join(EXPLAINED)}")


def explain(grader: str, gold: str, response: str, grade: Grade, *, require_boxed: bool = False) -> dict[str, Any]:
    """Fields that explain a grade of the exact or mathematics grader.

    ``rule``: where the answer was found; ``gold_rule`` the same of the gold. ``gold_form`` and ``answer_form``: what was compared.
    ``forms``: the rewritings applied. ``why``: what decided. Raises :class:`GradingError` for another grader."""
    check_explained(grader)
    if grader == "exact":
        return _exact(gold, response, grade)
    expected = gold_answer(gold)
    found = strict_answer(response) if require_boxed else lenient_answer(response)
    told = {"rule": found and found.rule, "gold_rule": expected.rule, "gold_form": clean(expected.text), "answer_form": None}
    told |= {"forms": [], "why": grade.reason}
    if found is None:
        return told | {"why": grade.reason or _NOTHING["strict" if require_boxed else "lenient"]}
    return told | _forms(expected, found)


def _forms(gold: Answer, answer: Answer) -> dict[str, Any]:
    """Both sides as they are compared."""
    g, a, _, rules = reduce_pair(clean(gold.text), clean(answer.text))
    g, a = decimal_comma(g, a), decimal_comma(a, g)
    return {"gold_form": g, "answer_form": a, "forms": list(rules)}


def _exact(gold: str, response: str, grade: Grade) -> dict[str, Any]:
    """The exact grader compares the box with the gold as text, integers by value."""
    found = last_boxed(response) or None
    g = gold.strip()
    forms = [canonical_integer(text) if text and canonical_integer(g) is not None else None for text in (g, found)]
    told = {"rule": found and "last box", "gold_rule": "the whole text", "gold_form": forms[0] or g, "forms": []}
    told["answer_form"] = forms[1] or found
    if grade.outcome is Outcome.TRUNCATED:
        return told | {"why": "cut off by the length limit"}
    if found is None:
        return told | {"why": _NOTHING["strict"]}
    return told | {"why": "integers compared by value" if None not in forms else "texts compared"}
