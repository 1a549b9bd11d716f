"""``tepo grade`` and ``tepo score`` as a user calls them."""

import json
import re

import pytest
from scripted import CONFIG, PROBLEMS, TABLE, TOKENIZER, Script
from typer.testing import CliRunner

from tepo_core.commands.cli import app
from tepo_core.commands.grade import grade_file, parse_k, score_run
from tepo_core.config import ConfigError
from tepo_core.evaluation.samples import describe, evaluate_policy, settings_for, summarise, write_evaluation
from tepo_core.grading.exact import ExactGrader

LINES = [
    {"id": "a", "gold": "7", "prediction": r"so \boxed{7}"},
    {"gold": "7", "prediction": "the answer is 7"},
    {"gold": r"\frac{1}{2}", "prediction": "0.5"},
    {"gold": 7, "prediction": "8"},
    {"id": 9, "gold": "7", "prediction": ""},
]


def call(*arguments, **options):
    return CliRunner().invoke(app, [str(a) for a in arguments], **options)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + "\n")
    return path


def test_grade_prints_a_json_line_for_each(file):
    result = call("grade", file, "--workers", 1)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert rows == [
        {"id": "a", "outcome": "correct", "extracted": "7"},
        {"id": 2, "outcome": "correct", "extracted": "7"},
        {"id": 3, "outcome": "correct", "extracted": "0.5"},
        {"id": 4, "outcome": "wrong", "extracted": "8"},
        {"id": 9, "outcome": "no_answer", "extracted": None},
    ]


def test_the_strict_rule_and_other_graders(file):
    assert [row["outcome"] for row in grade_file(file, require_boxed=True)] == ["correct", *["no_answer"] * 4]
    assert [row["outcome"] for row in grade_file(file, grader="exact")] == ["correct", *["no_answer"] * 4]
    result = call("grade", "-", "--require-boxed", input=json.dumps(LINES[0]))
    assert json.loads(result.stdout) == {"id": "a", "outcome": "correct", "extracted": "7"}


EXPLAINED = [  # gold, prediction, what --explain says
    ("0.35", "The share is **35%**.", {"rule": "the last mathematics or number", "answer_form": r"35\%", "why": "percentages"}),
    ("5000", r"<answer>5\text{ thousand}</answer>", {"rule": "tag <answer>, the whole text", "answer_form": "5000"}),
    ("3", r"$23 \bmod 4 = 3$", {"answer_form": "3", "forms": ["of an equation, the right side"]}),
    ("x+1", r"\boxed{x+2}", {"rule": "last box", "why": "difference of the expressions is not 0 at a point"}),
    (r"$m_{\max}=4$", "#### 4", {"rule": "after ####", "gold_form": "4", "gold_rule": "the whole text"}),
    ("7", "8", {"rule": "the whole text", "outcome": "wrong", "why": "integers compared by value"}),
    ("7", "", {"rule": None, "answer_form": None, "outcome": "no_answer"}),
    ("5", r"\boxed{5} and \boxed{", {"rule": None, "extracted": None, "outcome": "no_answer"}),
    (
        r"\frac{1}{2^{15}",
        r"\boxed{1}",
        {"outcome": "error", "reason": r"the gold '\\frac{1}{2^{15}' cannot be read as mathematics"},
    ),
    (
        "5",
        r"\boxed{5^{5^{5^{5}}}}",
        {"outcome": "timeout", "reason": "no verdict within 0.5 s", "why": "no verdict within 0.5 s"},
    ),
]


def test_explain_says_what_was_extracted_and_why(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps({"gold": g, "prediction": p}) + "\n" for g, p, _ in EXPLAINED))
    result = call("grade", path, "--explain", "--workers", 1, "--timeout", 0.5)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row, (_, _, told) in zip(rows, EXPLAINED, strict=True):
        assert {key: row[key] for key in told} == told
        assert row["why"] and {"rule", "gold_rule", "gold_form", "answer_form", "forms", "why"} <= set(row)
        assert ("reason" in row) == (row["outcome"] in ("error", "timeout"))
    plain = grade_file(path, workers=1, timeout=0.5)
    assert [row["outcome"] for row in plain] == [row["outcome"] for row in rows]
    assert [set(row) - {"id", "outcome", "extracted"} for row in plain] == [set()] * 8 + [{"reason"}] * 2


def test_explain_of_the_other_graders(file):
    strict = grade_file(file, require_boxed=True, explain=True)
    assert [row["rule"] for row in strict] == ["last box", *[None] * 4] and "never closes" in strict[1]["why"]
    exact = grade_file(file, grader="exact", explain=True)
    assert exact[0] | {"id": 0} == {
        "id": 0, "outcome": "correct", "extracted": "7", "rule": "last box", "gold_rule": "the whole text", "gold_form": "7",
        "answer_form": "7", "forms": [], "why": "integers compared by value",
    }  # fmt: skip
    assert "never closes" in exact[1]["why"]
    assert "has no answer to explain; allowed: exact, math" in str(
        call("grade", file, "--grader", "code", "--explain").exception
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gold": "1", "prediction": "1"}\n{"gold": "1"}\n', "line 2: the field 'prediction' is missing"),
        ('{"gold": " ", "prediction": "1"}\n', "line 1: 'gold' is empty"),
        ('{"gold": "1", "prediction": "1"}\nnope\n', "line 2: not JSON"),
        ('["gold"]\n', "line 1: the field 'gold' is missing"),
        ("\n", "no lines to grade"),
    ],
)
def test_faulty_lines_are_named_before_anything_is_graded(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    result = call("grade", path)
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
    assert result.stdout == ""


def test_unknown_grader_and_missing_file(tmp_path, file):
    assert "allowed: exact, math, code" in str(call("grade", file, "--grader", "regex").exception)
    assert "no such file" in str(call("grade", tmp_path / "none.jsonl").exception)
    assert "timeout = 0" in str(call("grade", file, "--timeout", 0).exception)


@pytest.fixture
def run(tmp_path):
    engine = Script(TABLE)
    samples = evaluate_policy(engine, TOKENIZER, {"test": PROBLEMS}, ExactGrader(), CONFIG, ("x",))
    settings = describe({"test": settings_for(CONFIG, "test")})
    write_evaluation(tmp_path / "run", samples, summarise(samples, CONFIG.k, settings), {})
    return tmp_path / "run"


def test_score_recomputes_from_samples_alone(run):
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    assert score_run(run) == json.loads(before["summary.json"])
    result = call("score", run, "--k", "1,3")
    assert result.exit_code == 0 and "pass@3" in result.stdout and "pass@2" not in result.stdout
    assert re.search(r"avg\s+0\.3750", result.stdout)
    wide = json.loads(call("score", run, "--k", "2", "--json").stdout)
    assert wide["splits"]["test"]["pass@k"] == {"2": pytest.approx(2 / 3)}
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def test_score_with_another_grader_keeps_what_the_policy_said(run):
    again = score_run(run, grader="math")["splits"]["test"]
    assert again["avg"] == 3 / 8 and again["outcomes"]["truncated"] == 1


def test_bad_scores_say_what_is_wrong(run, tmp_path):
    for value, message in [("8,1", "must be sorted"), ("", "such as 1,8,64"), ("0", "at least 1"), ("1,x", "whole numbers")]:
        with pytest.raises(ValueError, match=message):
            parse_k(value)
    assert "larger than n = 4" in str(call("score", run, "--k", "8").exception)
    assert "evaluate the run first" in str(call("score", tmp_path).exception)
    assert "allowed: exact, math, code" in str(call("score", run, "--grader", "x").exception)
