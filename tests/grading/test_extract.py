"""Finding the answer: the strict rule, the lenient rule, gold entries, and hostile text."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_core.grading.compare import quick_verdict
from tepo_core.grading.extract import Answer, environments, gold_answer, is_prose, joined_boxes, lenient_answer, strict_answer


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"<think>\boxed{42}</think> Some other text.", None),
        (r"<think>\boxed{41}</think> \boxed{42}", "42"),
        ("The answer is 5.", None),
        (r"\boxed{}", None),
        (r"\boxed{ }", None),
        (r"3+4 = 7 and then \boxed{7", None),
    ],
)
def test_strict_rule(response, answer):
    found = strict_answer(response)
    assert (found and found.text) == answer


@pytest.mark.parametrize(
    "response, answer",
    [
        ("42", "42"),
        ("The answer is 5.", "5"),
        ("Answer: 41 was a wrong guess.\nAnswer: 42", "42"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("The result is $3$", "3"),
        ("First try [30], second try [45].", "45"),
        ("so the number is 10 which is 1,000.99m²", "1,000.99"),
        (r"We have $x=2$ and $y = 3$.", "x=2, y = 3"),
        (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "(2, 2), (6, 2)"),
        (r"\boxed{3}, so the answer is \boxed{4}", "4"),
        (r"\boxed{1} no no no no no \boxed{2}", "2"),
        ("\nAnswer: C", "C"),
        (r"Answer \[ 9 \]", r"\[ 9 \]"),
        ("no solution", "no solution"),
        (r"I get \boxed{7", None),
        ("", None),
        ("I do not know what to say about this", None),
        (r"\boxed{5} so far, and \boxed{6", None),
        (r"\boxed{5} or rather \boxed{6}", "6"),
        ("We know that\n$$x=5$$\n$$y = 6$$", "y = 6"),
        ("#### 7", "7"),
        ("The answer is **7**.", "7"),
        ("<answer>12</answer>", "12"),
        ("It is $7$. The answer is shown above.", "7"),
    ],
)
def test_lenient_rule(response, answer):
    found = lenient_answer(response)
    assert (found and found.text) == answer


@pytest.mark.parametrize(
    "response, rule",
    [
        (r"\boxed{5}", "last box"),
        (r"\boxed{5} and \boxed{6}", "last boxes, joined"),
        (r"\boxed 5", "box without braces"),
        ("<answer>5</answer>", "tag <answer>, the whole text"),
        ("final_answer(5)", "call final_answer(, the whole text"),
        ('{"answer": 5}', 'field "answer", the whole text'),
        ("#### 5", "after ####"),
        ("So $5$ is our answer.", "before 'is the answer'"),
        ("The answer is 5.", "after the last 'answer'"),
        ("The answer to all of this must be the number 5", "after the last 'answer', the last mathematics or number"),
        ("so many words and then 5", "the last mathematics or number"),
        ("5", "the whole text"),
    ],
)
def test_the_rule_is_told(response, rule):
    assert lenient_answer(response).rule == rule
    assert strict_answer(r"\boxed{5}").rule == "last box"


@pytest.mark.parametrize("closer", ["</think>", "</thinking>", "</reasoning>", "[/THINK]", "<|end_of_thought|>", "◁/think▷"])
def test_every_end_of_reasoning(closer):
    assert strict_answer(rf"\boxed{{1}}{closer}\boxed{{2}}").text == "2"
    assert strict_answer(rf"\boxed{{1}}{closer} no more") is None


def test_gold_entries_are_taken_whole_unless_they_are_solutions():
    assert gold_answer(r"\frac{1}{2}").text == r"\frac{1}{2}"
    assert gold_answer("There are 3 of them for all n").text == "There are 3 of them for all n"
    assert gold_answer(r"SoHi \\boxed{840}., then **Final Answer**\\boxed{840}").text == "840"
    assert gold_answer("answer is 0.6666667").text == "0.6666667"
    assert gold_answer("10, 4").bare and not gold_answer("$10, 4$").bare


def test_words_of_mathematics_are_not_prose():
    mathematics = [r"\text{no real roots}"]
    mathematics += [r"\sin x + \cos y", "28 percent", "Even", "AB=4,CD=5", r"\begin{pmatrix}1\end{pmatrix}"]
    for text in mathematics:
        assert not is_prose(text), text
    for text in ("the value 5", "we get 5", "two apples left"):
        assert is_prose(text), text


def test_environments_and_boxes_by_hand():
    assert environments(r"a $x$ \$5 \(y\)") == [(2, 3, 4, 5), (10, 12, 13, 15)]
    assert environments(r"\( never closed $z$") == [(16, 17, 18, 19)]
    assert joined_boxes(r"\boxed{1} and \boxed{1} and \boxed{2}") == "1, 2"
    assert joined_boxes("none") is None


@pytest.mark.parametrize(
    "text",
    ["\\(" * 200_000, "$" * 300_001, "\\boxed{" * 100_000, "1," * 300_000, "answer " * 100_000, " " * 500_000 + "7",
     "[" * 300_000, "\\text{" * 100_000, "9" * 500_000, ". " * 300_000, "answer is" + " " * 400_000 + "5",
     "<answer>" * 100_000, "</think>" * 100_000, "final_answer(" * 50_000, '"answer": ' * 50_000, '"answer": ' + "[" * 300_000,
     "**a" * 150_000, "** " * 150_000, "#### 7\n" * 80_000, "`a" * 200_000, "1 000" * 100_000, "1.000." * 100_000, "__a" * 150_000,
     "\\boxed 5 " * 60_000, "is the answer " * 40_000, "answer: because " * 40_000, "<b>" * 150_000, "-" * 400_000, "#" * 400_000,
     "answer is 7 " + "is the answer to " * 20_000, "\n\n####" * 60_000],
)  # fmt: skip
def test_extraction_is_linear(text):
    """Twice the text may take about twice the time; quadratic work on half a million characters would take hours."""
    started = time.process_time()
    strict_answer(text), lenient_answer(text), gold_answer(text)
    assert time.process_time() - started < 20


PIECES = ["\\boxed{", "}", "{", "$", "\\(", "\\)", "answer is ", "7", ",", ".", "\\frac{1}{2}", "\\sqrt", "^", "**", " "]
PIECES += ["\x00", "\u202e", "\u0663", "\uff05", "<think>", "</think>", "\\\\", "[", "]", "and", "x", "\ud800", "12:00"]
PIECES += [
    "%",
    "-",
    "e5",
    "Eq(",
    "\n",
    "<answer>",
    "</answer>",
    "final_answer(",
    ")",
    '"answer": ',
    "####",
    " 000",
    ".000",
    "'000",
]
PIECES += [
    "\\boxed 5",
    " is the answer.",
    "\\text{ or }",
    "\\lor",
    "=",
    "\\approx",
    "\\pmod 4",
    "million",
    "(A) ",
    "\\color{red}",
    "th",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=25).map("".join))
def test_no_text_breaks_extraction_or_the_fast_paths(text):
    gold = gold_answer(text) if text.strip() else Answer("7", True)
    for found in (strict_answer(text), lenient_answer(text)):
        if found is not None:
            assert found.text.strip()
            assert quick_verdict(gold, found) in (True, False, None)
            assert quick_verdict(found, found) is not False  # nothing differs from itself
