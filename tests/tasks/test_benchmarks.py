"""The table of problem sets and its loader: both ways in, every fault named, counts and content checked."""

import json
import os
import re
from pathlib import Path

import pytest

from tepo_core.grading.code_grader import read_gold
from tepo_core.tasks import math_benchmarks
from tepo_core.tasks.benchmark_table import BENCHMARKS, Benchmark, lookup, table
from tepo_core.tasks.code_benchmarks import entry_point
from tepo_core.tasks.math_benchmarks import content_digest, fetch, letters_and_digits, load_benchmark, read_records
from tepo_core.tasks.problem import DataError


def folder():
    named = os.environ.get("TEPO_BENCHMARKS")
    return Path(named) if named else Path(__file__).parents[3] / "shared" / "benchmarks"


present = pytest.mark.skipif(not folder().is_dir(), reason="no benchmark files here (set TEPO_BENCHMARKS to their folder)")
ROWS = [
    {"id": "p1", "problem": "What is $1+1$?", "answer": "2"},
    {"id": "p2", "problem": "What is $2+2$?", "answer": "4", "subject": "sums"},
]


@pytest.fixture
def small(monkeypatch):
    """A set of two problems in the table."""
    benchmark = Benchmark("small", "some/hub-id", "0" * 40, ("test",), {"id": "id", "problem": "problem", "answer": "answer"},
                          "small.jsonl", 2, "", "integer", "none")  # fmt: skip
    digest = content_digest(ROWS, benchmark)
    benchmark = Benchmark(**{**vars(benchmark), "digest": digest})
    monkeypatch.setitem(BENCHMARKS, "small", benchmark)
    return benchmark


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_table_holds_every_set_of_the_study():
    names = {"aime24", "aime25", "amc23", "math500", "olympiadbench", "minerva", "omni_math", "gsm8k", "humaneval", "mbpp"}
    assert names | {"gsm8k-train", "dapo-math-17k"} <= set(BENCHMARKS)
    frame = table()
    assert frame.loc["math500", "problems"] == 500 and frame.loc["gsm8k-train", "use"] == "train"
    for benchmark in BENCHMARKS.values():
        pinned = benchmark.revision or re.search(r"/([0-9a-f]{40})/", benchmark.source)[1]
        assert re.fullmatch(r"[0-9a-f]{40}", pinned)
        assert re.fullmatch(r"[0-9a-f]{16}", benchmark.digest) and benchmark.licence and "{problem}" in benchmark.prompt
    assert lookup("mbpp").kind == "code" and lookup("minerva").kind == "math"


@present
@pytest.mark.parametrize("name", list(BENCHMARKS))
def test_every_file_is_what_the_table_says(name):
    problems = load_benchmark(name, folder())
    benchmark = lookup(name)
    assert len(problems) == (benchmark.file_count or benchmark.count)
    assert {p.split for p in problems} == {name}
    if benchmark.kind == "code":
        assert all(read_gold(p.answer)["entry_point"] for p in problems)
    elif benchmark.answer in ("integer", "number"):
        assert all(re.fullmatch(r"-?\d+(?:\.\d+)?", p.answer) for p in problems)


def test_problems_keep_their_text_and_get_the_template(tmp_path, small):
    write(tmp_path / "small.jsonl", ROWS)
    first, second = load_benchmark("small", tmp_path)
    assert first.prompt == "What is $1+1$?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert (first.id, first.answer, first.split) == ("p1", "2", "small")
    assert second.meta == {"problem": "What is $2+2$?", "subject": "sums"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:1], "1 problems, expected 2"),
        ([*ROWS, {**ROWS[0], "id": "p3"}], "3 problems, expected 2"),
        ([ROWS[0], {**ROWS[1], "id": "p1"}], "line 2: the id 'p1' is empty or was used in line 1"),
        ([ROWS[0], {"id": "p2", "problem": "x"}], "line 2: the field 'answer' is missing"),
        ([ROWS[0], {**ROWS[1], "answer": " "}], "line 2: 'answer' = ' ' must be a non-empty string"),
        ([ROWS[0], {**ROWS[1], "answer": 4}], "line 2: 'answer' = 4 must be a non-empty string"),
        ([{**ROWS[0], "problem": ""}, ROWS[1]], "line 1: 'problem' = ''"),
        ([ROWS[0], {**ROWS[1], "answer": "5"}], "the content is not that of 'small'"),
        ([ROWS[0], ["no", "object"]], "line 2: not a JSON object"),
    ],
)
def test_faulty_files_are_named(tmp_path, small, rows, message):
    write(tmp_path / "small.jsonl", rows)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        load_benchmark("small", tmp_path)
    assert "small.jsonl" in str(caught.value)


def test_missing_and_broken_files_say_what_to_do(tmp_path, small):
    with pytest.raises(DataError, match="put small.jsonl there"):
        load_benchmark("small", tmp_path)
    (tmp_path / "small.jsonl").write_text('{"id": "p1"\n')
    with pytest.raises(DataError, match="line 1: not JSON"):
        load_benchmark("small", tmp_path)
    with pytest.raises(DataError, match="did you mean 'math500'.*allowed: aime24"):
        load_benchmark("math-500", tmp_path)


def test_order_spacing_and_line_separators_do_not_matter(tmp_path, small):
    rows = [{**ROWS[1], "problem": "What  is $2 + 2$ ?\u2028"}, ROWS[0]]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows)
    (tmp_path / "small.jsonl").write_text(text, encoding="utf-8")
    assert [p.id for p in load_benchmark("small", tmp_path)] == ["p2", "p1"]
    assert letters_and_digits("What is $1+1$?") == "whatis11"


class Table(list):
    """What ``datasets.load_dataset`` returns, as far as the loader looks."""

    @property
    def column_names(self):
        return list(self[0])


def serve(monkeypatch, rows_by_split):
    calls = []

    def load_dataset(path, config=None, *, split, revision=None, data_files=None):
        calls.append((path, config, split, revision, data_files))
        return Table(rows_by_split[split])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return calls


def test_online_sets_are_asked_for_at_their_revision(monkeypatch, small):
    calls = serve(monkeypatch, {"test": ROWS})
    assert [p.answer for p in load_benchmark("small")] == ["2", "4"]
    assert calls == [("some/hub-id", None, "test", "0" * 40, None)]
    serve(monkeypatch, {"test": ROWS[:1]})
    with pytest.raises(DataError, match="1 problems, expected 2"):
        load_benchmark("small")
    serve(monkeypatch, {"test": [{"id": "p1", "problem": "x"}]})
    with pytest.raises(DataError, match="'answer' is missing; found: id, problem"):
        load_benchmark("small")


def test_offline_without_a_folder_names_both_ways_out(monkeypatch, small):
    def load_dataset(*args, **options):
        raise ConnectionError("Couldn't reach 'some/hub-id' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(DataError, match="Two ways out: set data.benchmarks_dir .* small.jsonl, or go online once") as caught:
        load_benchmark("small")
    assert "\n" not in str(caught.value)


def converted(monkeypatch, name, rows_by_split):
    calls = serve(monkeypatch, rows_by_split)
    return fetch(lookup(name)), calls


def test_conversion_of_each_source(monkeypatch):
    [amc], _ = converted(monkeypatch, "amc23", {"train": [
        {"id": 0, "problem": "a", "answer": 142.0, "url": "https://x/2022_AMC_12A"},
        {"id": 1, "problem": "b", "answer": 27.0, "url": "https://x/2023_AMC_12A"},
    ]})  # fmt: skip
    assert (amc["id"], amc["answer"]) == (1, "27")
    [aime], _ = converted(monkeypatch, "aime24", {"train": [{"id": 60, "problem": "a", "answer": "025"}]})
    assert aime["answer"] == "25"
    [gsm], _ = converted(monkeypatch, "gsm8k", {"test": [{"question": "q", "answer": "so 3 * 400 = 1200\n#### 1,200"}]})
    assert (gsm["id"], gsm["answer"], gsm["solution"][-5:]) == ("gsm8k-test-0", "1200", "1,200")
    [olympiad], calls = converted(monkeypatch, "olympiadbench", {"train": [
        {"id": 1606, "question": "q", "final_answer": ["2"], "subfield": "Algebra"}
    ]})  # fmt: skip
    assert (olympiad["id"], olympiad["answer"]) == ("olympiadbench-1606", "2")
    assert calls[0][0] == "json" and calls[0][4]["train"].startswith(
        "https://raw.githubusercontent.com/QwenLM/Qwen2.5-Math/a45202"
    )
    [minerva], _ = converted(monkeypatch, "minerva", {"train": [
        {"idx": 3, "problem": "q", "solution": r"so \boxed{1.6} cm", "type": "astro"}
    ]})  # fmt: skip
    assert (minerva["id"], minerva["answer"]) == ("minerva-3", "1.6")
    rows = [{"problem": "q", "answer": "7", "difficulty": 5.0}]
    assert converted(monkeypatch, "omni_math", {"train": rows})[0][0]["id"] == "omni-rule-0"


def test_dapo_rows_are_unwrapped_and_repeats_dropped(monkeypatch):
    def row(problem, answer):
        text = (
            "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
            f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
            'Remember to put your answer on its own line after "Answer:".'
        )
        return {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": answer, "style": "rule"}}

    rows = [row("One?", "1"), row("Two?", "2"), row("One ?", "1"), row("Two?", "3")]
    records, _ = converted(monkeypatch, "dapo-math-17k", {"train": rows})
    assert [(r["id"], r["problem"], r["answer"]) for r in records] == [("dapo-0", "One?", "1")]  # "Two?" has two answers


def test_code_records(monkeypatch):
    rows = [{"task_id": 3, "text": "Add.", "code": "def helper(): pass\r\ndef add(a, b):\r\n    return a + b",
             "test_setup_code": "", "test_list": ["assert add(1, 2) == 3"]}]  # fmt: skip
    records, _ = converted(monkeypatch, "mbpp", {"prompt": [], "test": rows, "validation": [], "train": []} | {
        split: Table([{**rows[0], "task_id": number}]) for number, split in ((1, "prompt"), (600, "validation"), (700, "train"))
    })  # fmt: skip
    assert [r["task_id"] for r in records] == ["MBPP/1", "MBPP/3", "MBPP/600", "MBPP/700"]
    assert records[1]["entry_point"] == "add" and records[1]["split"] == "test" and "\r" not in records[1]["canonical_solution"]
    assert entry_point(["assert set(f(1)) == g"], "def f(x): return [x]") == "f"
    assert entry_point(["assert True"], "def f(): pass") == ""
    record = {"task_id": "H/0", "prompt": "def f(x):\n", "tests": "def check(candidate):\n    assert candidate(1) == 1\n",
              "entry_point": "f"}  # fmt: skip
    problem = math_benchmarks.code_benchmarks.make_problem(record, lookup("humaneval"))
    assert read_gold(problem.answer)["tests"].endswith("check(f)\n") and read_gold(problem.answer)["prompt"] == "def f(x):\n"


def test_records_of_a_file_know_their_line(tmp_path, small):
    write(tmp_path / "small.jsonl", ROWS)
    assert [r["line"] for r in read_records(tmp_path / "small.jsonl", small)] == [1, 2]
