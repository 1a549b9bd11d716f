"""The last complete box and the exact grader."""

import pytest

from tepo_core.grading.boxes import last_boxed
from tepo_core.grading.exact import ExactGrader, canonical_integer
from tepo_core.grading.graders import make_grader
from tepo_core.grading.types import Grade, GradingError, Outcome


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{1} and then \boxed{2", None),  # the last box never closes: the one before is not the answer
        (r"\boxed{1} and then \fbox{2", None),
        (r"\boxed{1} and then \boxed{", None),
        (r"\boxed{1} and then \boxed{\frac{1}{2}", None),
        (r"\boxed{1} and then \boxed 2", None),  # nor is it where the last box has no braces
        (r"\boxed{1} and then \boxed\frac12", None),
        (r"\boxed{1 and then \boxed{2}", "2"),
        (r"\boxed{1} with the \boxed command", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{1, \boxed{2}}", r"1, \boxed{2}"),
        (r"\boxed{\boxed{1}, \boxed{2}}", r"\boxed{1}, \boxed{2}"),
        (r"\boxed{ \boxed{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\fbox { 3 }", "3"),
        (r"\\boxed{35} and", "35"),
        (r"\boxed{1} \boxed{ {2} } \boxed{3", None),
        (r"\boxed{1} \boxed{ {2} }", "{2}"),
        (r"} } \boxed{4} }", "4"),
        (r"\boxed{}", ""),
        ("3+4 = 7 and then", None),
        (r"\boxed{7", None),
        (r"\boxed 5", None),
        ("", None),
    ],
)
def test_last_complete_box(text, answer):
    assert last_boxed(text) == answer


def test_last_box_is_linear_in_hostile_text():
    deep = r"\boxed{" * 100_000
    assert last_boxed(deep) is None
    assert last_boxed(deep + "1" + "}" * 3) == "1"
    assert last_boxed("{" * 1_000_000) is None


def test_deeply_nested_boxes_end():
    assert last_boxed(r"\boxed{" * 200_000 + "9" + "}" * 200_000) == "9"


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("+007", "7"),
        ("-0", "0"),
        ("-12", "-12"),
        ("1.0", None),
        ("", None),
        ("٣", None),
        ("0" * 9 + "1" * 6000, "1" * 6000),
    ],
)
def test_canonical_integer(text, canonical):
    assert canonical_integer(text) == canonical


def test_exact_grader_keeps_outcomes_apart():
    responses = [r"so \boxed{ 07 }", r"\boxed{8}", "7", r"\boxed{7}", r"\boxed{7", r"\boxed{}", r"\boxed{7} or \boxed{8"]
    grades = ExactGrader().grade(golds=["7"] * 7, responses=responses, truncated=[False] * 3 + [True] * 2 + [False] * 2)
    assert grades == [
        Grade(Outcome.CORRECT, "07"),
        Grade(Outcome.WRONG, "8"),
        Grade(Outcome.NO_ANSWER),
        Grade(Outcome.TRUNCATED, "7"),
        Grade(Outcome.TRUNCATED),
        Grade(Outcome.NO_ANSWER),
        Grade(Outcome.NO_ANSWER),
    ]
    assert [grade.reward for grade in grades] == [1, 0, 0, 0, 0, 0, 0]


def test_bad_batches_are_refused():
    grader = make_grader("exact")
    with pytest.raises(GradingError, match="2, 1 and 1 entries"):
        grader.grade(golds=["1", "2"], responses=["1"], truncated=[False])
    with pytest.raises(GradingError, match=r"golds\[0\] = ' '"):
        grader.grade(golds=[" "], responses=["1"], truncated=[False])
    with pytest.raises(GradingError, match=r"responses\[0\] is a NoneType"):
        grader.grade(golds=["1"], responses=[None], truncated=[False])
    with pytest.raises(TypeError):
        grader.grade(["1"], ["1"], [False])  # keyword-only: gold and response cannot be swapped by position
    with pytest.raises(GradingError, match="allowed: exact, math, code"):
        make_grader("regex")
    with pytest.raises(GradingError, match="'exact'"):
        make_grader("exact", workers=2)
