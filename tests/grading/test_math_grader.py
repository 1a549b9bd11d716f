"""The mathematics grader: verdicts, agreement of the fast paths with the slow one, time-outs, crashes, and clean-up."""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tepo_core.grading.compare import clean, quick_verdict
from tepo_core.grading.constants import constant, constant_verdict
from tepo_core.grading.extract import Answer, gold_answer
from tepo_core.grading.graders import make_grader
from tepo_core.grading.math_grader import MathGrader, compare
from tepo_core.grading.pool import Pool, PoolError
from tepo_core.grading.types import GradingError, Outcome

HANG = r"5^{5^{5^{5}}}"


@pytest.fixture(scope="module")
def grader():
    with MathGrader(timeout=3, workers=1, require_boxed=False) as made:
        yield made


@pytest.fixture(scope="module")
def slow():
    """Everything to math-verify."""
    with MathGrader(timeout=20, workers=1, require_boxed=False, fast_paths=False) as made:
        yield made


def outcomes(grader, pairs):
    golds, responses = [gold for gold, _ in pairs], [rf"\boxed{{{answer}}}" for _, answer in pairs]
    return [grade.outcome.value for grade in grader.grade(golds=golds, responses=responses, truncated=[False] * len(pairs))]


def family(grader):
    """The processes of a grader's pool."""
    zygote = psutil.Process(grader._pool._zygote.pid)
    return [zygote, *zygote.children(recursive=True)]


# (gold, answer, what a mathematician says)
CASES = [
    ("42", "42.0", True),
    ("1000", "1,000", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{3}", "0.333333", True),
    (r"\frac{1}{3}", "0.33", False),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"3.83e35", r"3.83\times 10^{35}", True),
    ("np.arcsin(10/13)", r"\arcsin(10/13)", True),
    ("-1./3", r"-\frac{1}{3}", True),
    (r"\$32,\!348", "32348", True),
    ("x^2+y^2=1", r"1-x^{2}-y^{2}=0", True),
    ("x^2+y^2=1", r"x^{2}-y^{2}=1", False),
    ("3, 5, 7", "7, 5, 3", True),  # in a box a list is a set of solutions
    ("(3, 5)", "(5, 3)", False),
    (r"\{1, 2\}", r"\{2, 1\}", True),
    ("[0,1)", "[0,1]", False),
    (r"(1,\infty)", "x>1", True),
    (r"50\%", "0.5", True),
    (r"50\%", "50", True),
    (r"90^\circ", "90", True),
    (r"1 - \frac{1}{\mathrm{e}}", r"1 + \frac{1}{\mathrm{e}}", False),  # math-verify alone says equal
    (r"1 - \frac{1}{\mathrm{e}}", r"\frac{e-1}{e}", True),
    ("2^3^2", "512", True),
    ("A", "(A)", True),
    ("A", "(B)", False),
    (r"\text{even}", "even", True),
    ("7", "７", True),  # full-width
    ("7", "٧", True),  # Arabic-Indic
    ("7", "\u202e7\u202c", True),  # right-to-left override
    ("7", "\x007\x00", True),
    ("7", r"\boxed{7}", True),
    ("7", "I do not know", False),
    ("12", "1 2", False),
    ("100", "10^2", True),
    (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}", True),
    ("x+1", "x+2", False),
    (r"8 \%", "x+1", False),  # a gold in percent is readable whatever the answer is
    (r"$8 \%$", r"2^{3} \cdot 1^{7x-7x}", True),
    ("2^{2000}", "2^{2001}", False),  # beyond the range of a float
    ("2^{2000}", "4^{1000}", True),
    (r"\binom{4025}{2012}", r"\binom{4025}{2011}", False),
    (r"\binom{4025}{2012}", r"\binom{4025}{2013}", True),
    ("e^{23110}", "e^{23111}", False),
]


def test_verdicts_of_a_mathematician(grader):
    found = outcomes(grader, [(gold, answer) for gold, answer, _ in CASES])
    wrong = [(case, outcome) for case, outcome in zip(CASES, found, strict=True) if (outcome == "correct") != case[2]]
    assert not wrong
    assert not {"error", "timeout"}.intersection(found)


def test_strict_rule_needs_the_box_and_the_end():
    with MathGrader() as grader:
        grades = grader.grade(
            golds=["7"] * 4,
            responses=["3+4 = 7 and then", r"\boxed{7}", r"\boxed{7}", r"\boxed{8} \boxed{7"],
            truncated=[False, False, True, False],
        )
    assert [g.outcome for g in grades] == [Outcome.NO_ANSWER, Outcome.CORRECT, Outcome.TRUNCATED, Outcome.NO_ANSWER]


def test_gold_and_answer_cannot_be_swapped():
    # verify(gold, target) of math-verify is not symmetric: an interval may answer an inequality, and not the reverse by default
    assert compare(gold="x=5", answer="5") is Outcome.CORRECT
    with pytest.raises(TypeError):
        compare("x=5", "5")
    with pytest.raises(TypeError):
        MathGrader().grade(["x=5"], ["5"], [False])
    assert compare(gold="5", answer=" ") is Outcome.NO_ANSWER


INTEGER_FORMS = ["{}", " {} ", "{}.", "${}$", r"\({}\)", "+{}", "00{}", "{}.0", r"\text{{{}}}", r"{{{}}}", r"\$ {}", "({})"]
INTEGER_FORMS += [r"{} \text{{ cm}}", r"\boxed{{{}}}", "{}^\\circ"]


def test_integer_fast_path_agrees_with_math_verify(slow):
    """Random integers in every form: whenever the fast path gives a verdict, the slow path gives the same."""
    rng = random.Random(0)
    pairs, fast = [], []
    for _ in range(150):
        value = rng.choice([0, 1, -1, rng.randint(-20, 20), rng.randint(-(10**6), 10**6), rng.randint(-(10**30), 10**30)])
        other = value + rng.choice([0, 0, 1, -1, 10])
        gold = rng.choice(["{}", "${}$", "{:,}"]).format(value)
        form = rng.choice([f for f in INTEGER_FORMS if other >= 0 or not f.startswith(("+", "0"))])
        answer = rng.choice([form.format(other), f"{other:,}"])
        verdict = quick_verdict(gold_answer(gold), Answer(answer, False))
        if verdict is not None:
            assert verdict == (value == other), (gold, answer)
            pairs.append((gold, answer))
            fast.append("correct" if verdict else "wrong")
    assert len(pairs) > 120
    assert outcomes(slow, pairs) == fast


def random_constant(rng, depth=0):
    kind = rng.randrange(7 if depth < 2 else 2)
    if kind == 0:
        return str(rng.randint(0, 30))
    if kind == 1:
        return rf"\frac{{{rng.randint(-9, 9)}}}{{{rng.randint(1, 9)}}}"
    if kind == 2:
        return rf"\sqrt{{{rng.choice([2, 3, 4, 8, 9, 12, 18])}}}"
    if kind == 3:
        return rf"{rng.randint(2, 9)}\sqrt{{{rng.randint(2, 12)}}}"
    if kind == 4:
        return rf"{random_constant(rng, depth + 1)}+{rng.randint(1, 9)}\pi"
    if kind == 5:
        return rf"\frac{{{random_constant(rng, depth + 1)}}}{{{rng.randint(1, 6)}}}"
    return rf"\left({random_constant(rng, depth + 1)}\right)^{{{rng.randint(1, 3)}}}"


def test_constants_agree_with_math_verify(slow):
    rng = random.Random(1)
    pairs = []
    for _ in range(60):
        text = random_constant(rng)
        decimal = f"{float((constant(text) or (1, 0))[0]):.9f}"
        same = [decimal, rf"\frac{{{text}}}{{1}}", rf"{text}-\frac{{0}}{{3}}"]
        pairs.append((text, rng.choice([random_constant(rng), f"{text}-1", *same])))
    quick = [constant_verdict(clean(g), clean(a)) for g, a in pairs]
    decided = [(pair, verdict) for pair, verdict in zip(pairs, quick, strict=True) if verdict is not None]
    assert len(decided) > 30 and {True, False} == {verdict for _, verdict in decided}
    assert outcomes(slow, [pair for pair, _ in decided]) == ["correct" if verdict else "wrong" for _, verdict in decided]


OUTSIDE = ["", "x", "1/2/3", r"1/2\pi", r"2\frac12", r"\frac{1}{0}", r"\sqrt{-1}", "2^10", "10^{100}"]
OUTSIDE += ["1+", "(1", "2(3)", "9" * 80]


@pytest.mark.parametrize("text", OUTSIDE)
def test_constants_outside_the_grammar_get_no_verdict(text):
    assert constant(text) is None


def test_constants_by_hand():
    assert constant(r"\frac12") == (0.5, False) and constant(r"\sqrt{\frac{9}{4}}") == (1.5, False)
    assert constant("-2^2") == (-4, False) and constant(r"-\frac{1}{2}+1") == (0.5, False)
    assert constant_verdict("0.066666793", "0.0666668") is True  # six places
    assert constant_verdict("2.232", "2.23") is False
    assert constant_verdict("0.1234565", "0.123457") is None  # a tie: how a float rounds is not ours to guess


def cases_file():
    named = os.environ.get("TEPO_GRADING_CASES")
    return Path(named) if named else Path(__file__).parents[3] / "shared" / "grading" / "cases.jsonl"


# Verdicts of public test suites that we do not share, and why.
DISAGREEMENTS = {
    "g026": "a single line end inside $ $ is a space in TeX, so 'Answer $ 9 $' set over three lines is 9; upstream refuses it",
    "g183": "1 - 1/e is not 1 + 1/e; upstream loses everything from \\mathrm{e} on as a unit and compares 1 with 1",
    "g293": "0.002 is not 0.001; upstream grants an absolute precision of [1e34, 0.001] by an option of that test",
    "g294": "0.003 is not 0.002; upstream grants an absolute precision of 0.001 by an option of that test",
}


@pytest.mark.skipif(not cases_file().is_file(), reason="no collection of public grading cases here (set TEPO_GRADING_CASES)")
def test_public_cases(grader):
    cases = [json.loads(line) for line in cases_file().read_text(encoding="utf-8").splitlines()]
    grades = grader.grade(
        golds=[c["gold"] for c in cases], responses=[c["prediction"] for c in cases], truncated=[False] * len(cases)
    )
    apart = {c["id"] for c, g in zip(cases, grades, strict=True) if (g.outcome is Outcome.CORRECT) != c["equal"]}
    assert apart == set(DISAGREEMENTS)
    assert len(apart) <= 0.03 * len(cases)
    assert not any(g.outcome in (Outcome.TIMEOUT, Outcome.ERROR) for g in grades)


def own_cases(name):
    path = Path(__file__).with_name(name)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def graded(grader, cases):
    return grader.grade(
        golds=[c["gold"] for c in cases],
        responses=[c["prediction"] for c in cases],
        truncated=[c.get("truncated", False) for c in cases],
    )


@pytest.mark.parametrize("name", ["cases.jsonl", "forms.jsonl"])
def test_own_cases(grader, name):
    cases = own_cases(name)
    apart = [(c, g) for c, g in zip(cases, graded(grader, cases), strict=True) if g.outcome.value != c["outcome"]]
    assert apart == []


def test_strict_rule_on_the_forms():
    """Under the strict rule no form but a closed box is an answer, and what stands in a box has the same verdict."""
    cases = own_cases("forms.jsonl")
    with MathGrader(timeout=3, workers=1) as strict:
        grades = graded(strict, cases)
    for case, grade in zip(cases, grades, strict=True):
        same = "\\boxed{" in case["prediction"] or case.get("truncated")
        assert grade.outcome.value == case.get("strict", case["outcome"] if same else "no_answer"), case


def test_every_kind_of_form_has_near_misses():
    """A relaxation without the near miss that stays wrong is not tested at all."""
    found = Counter((c["kind"], c["outcome"] == "correct") for c in own_cases("forms.jsonl"))
    kinds = {kind for kind, _ in found}
    assert len(kinds) >= 10 and sum(found.values()) >= 150
    assert [kind for kind in sorted(kinds) if found[kind, True] < 3 or found[kind, False] < 3] == []


def test_only_the_hanging_and_the_hostile_items_are_marked():
    deep = r"\frac{1}{" * 2000 + "1" + "}" * 2000
    hostile = {3: (HANG, "timeout"), 17: ("x" * 1_000_000, "error"), 30: (deep, "error"), 31: ("}{" * 10, "no_answer")}
    answers = [hostile[i][0] if i in hostile else (r"x+1" if i % 2 else r"1+x") for i in range(40)]
    expected = [hostile[i][1] if i in hostile else "correct" for i in range(40)]
    with MathGrader(timeout=1.0, workers=2) as grader:
        assert outcomes(grader, [("x+1", answer) for answer in answers]) == expected
        processes = family(grader)
        assert len(processes) == 3  # the one that forks, and two workers
    assert not [p for p in processes if p.is_running()]


def test_results_do_not_depend_on_order_or_workers():
    pairs = [(gold, answer) for gold, answer, _ in CASES]
    shuffled = pairs[:]
    random.Random(3).shuffle(shuffled)
    results = []
    for workers, batch in ((1, pairs), (3, shuffled)):
        with MathGrader(timeout=20, workers=workers) as grader:
            results.append(dict(zip(batch, outcomes(grader, batch), strict=True)))
    assert results[0] == results[1]


def test_a_worker_that_dies_costs_only_its_item():
    with MathGrader(timeout=30, workers=1) as grader:
        assert outcomes(grader, [("x+1", "1+x")]) == ["correct"]
        _, worker = family(grader)
        os.kill(worker.pid, signal.SIGKILL)  # idle: the next batch meets a closed socket
        assert Counter(outcomes(grader, [("x+1", "1+x"), ("x+2", "2+x")])) == {"error": 1, "correct": 1}
        assert outcomes(grader, [("x+1", "1+x"), ("x+2", "2+x")]) == ["correct", "correct"]


def test_pool_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr("tepo_core.grading.pool.sys.executable", "/bin/false")
    with pytest.raises(PoolError, match="did not start"):
        Pool(1, 1.0).run([("x", False, "y", False)])


def test_pool_ends_with_its_parent(tmp_path):
    """A parent killed outright leaves no grading process behind, even one that hangs."""
    import subprocess
    import sys

    script = tmp_path / "parent.py"
    script.write_text(
        "from tepo_core.grading.math_grader import MathGrader\n"
        "g = MathGrader(timeout=600, workers=1)\n"
        f"g.grade(golds=['7'], responses=[r'\\boxed{{{HANG}}}'], truncated=[False])\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        for _ in range(300):
            processes = psutil.Process(parent.pid).children(recursive=True)
            if len(processes) >= 2:
                break
            time.sleep(0.1)
        assert len(processes) >= 2
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


@pytest.mark.parametrize(("options", "message"), [({"timeout": 0}, "timeout = 0"), ({"workers": -1}, "workers = -1")])
def test_bad_options_are_refused(options, message):
    with pytest.raises(GradingError, match=message):
        make_grader("math", **options)


@pytest.mark.slow
def test_ten_thousand_answers_with_twenty_hangs():
    hangs = set(range(250, 10_000, 500))
    answers = [HANG if i in hangs else str(i % 7) if i % 3 else rf"x+{i % 5}" for i in range(10_000)]
    golds = [str(i % 7) if i in hangs or i % 3 else f"{i % 5}+x" for i in range(10_000)]
    timeout, workers = 2.0, 2
    with MathGrader(timeout=timeout, workers=workers) as grader:
        started = time.monotonic()
        found = outcomes(grader, list(zip(golds, answers, strict=True)))
        spent = time.monotonic() - started
        processes = family(grader)
    print(f"10,000 answers with 20 hangs: {spent:.1f} s")
    assert {i for i, outcome in enumerate(found) if outcome == "timeout"} == {i for i in hangs}
    assert Counter(found) == {"timeout": 20, "correct": 9980}
    assert not [p for p in processes if p.is_running()]


@pytest.mark.parametrize(
    "ordinal", ["12^{\\text{th}}", "12^\\text{th}", "12^{th}", "12th", "12\\text{th}", "$12^{\\mathrm{th}}$", "12 ^ {\\rm th}"]
)
def test_ordinals_are_their_numbers(grader, ordinal):
    """As the gold and as the answer."""
    for gold, answer, outcome in [
        (ordinal, "12", Outcome.CORRECT), ("12", ordinal, Outcome.CORRECT), (ordinal, "13", Outcome.WRONG),
    ]:  # fmt: skip
        [grade] = grader.grade(golds=[gold], responses=[f"\\boxed{{{answer}}}"], truncated=[False])
        assert grade.outcome is outcome, (gold, answer)


def test_other_exponents_are_no_ordinals(grader):
    for gold, answer in [("x^{th}", "x"), ("2^{t}", "2"), ("2^{th}", "2"), ("5^{nd}x", "5x"), ("12^{\\text{st}}", "12")]:
        [grade] = grader.grade(golds=[gold], responses=[f"\\boxed{{{answer}}}"], truncated=[False])
        assert grade.outcome is not Outcome.CORRECT, gold
