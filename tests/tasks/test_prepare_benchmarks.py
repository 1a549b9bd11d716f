"""Preparing real training sets: splits, overlap with evaluation sets removed, worked solutions for the warm-up."""

import json
import os
from pathlib import Path

import pytest
from tiny import tiny_study

from tepo_core.config import ConfigError
from tepo_core.pipeline.parameters import check
from tepo_core.tasks.data import grader_kind, load_split
from tepo_core.tasks.prepare import prepare

SETS = Path(os.environ.get("TEPO_BENCHMARKS", Path(__file__).parents[3] / "shared" / "benchmarks"))
needs_sets = pytest.mark.skipif(
    not (SETS / "dapo_math_17k_sample.jsonl").is_file(),
    reason="no folder of benchmark files; set TEPO_BENCHMARKS to one (format: tepo_core/tasks/benchmark_table.py)",
)


def data(**changes):
    return {
        "train_size": 20000, "validation_size": 16, "test_size": 12, "long_size": 1, "warmup_size": 100,
        "benchmarks_dir": str(SETS), "eval_sets": [], "remove_contamination": True, **changes,
    }  # fmt: skip


@needs_sets
def test_overlap_is_removed_before_training(tmp_path):
    study = tiny_study(tasks=["dapo-math-17k"], data=data(eval_sets=["math500", "aime24"]), warmup={"steps": 0})
    prepared = prepare(study, tmp_path)
    folder = tmp_path / "data/prepared/dapo-math-17k-s0"
    rows = {row["split"]: row for row in json.loads((folder / "contamination.json").read_text())}
    assert rows["math500"]["exact"] == 7 and rows["aime24"]["exact"] == 0
    counts = prepared.manifests["dapo-math-17k-s0"]["counts"]
    removed = prepared.manifests["dapo-math-17k-s0"]["notes"]["removed for overlap"]
    assert counts["train"] + counts["validation"] + counts["test"] + removed == 16284
    assert (counts["math500"], counts["aime24"]) == (500, 30) and len(load_split(folder, "aime24")) == 30
    ids = [p.id for split in ("train", "validation", "test") for p in load_split(folder, split)]
    assert len(ids) == len(set(ids))


@needs_sets
def test_worked_solutions_end_with_the_boxed_answer(tmp_path):
    study = tiny_study(tasks=["gsm8k-train"], data=data(train_size=200))
    prepare(study, tmp_path)
    traces = load_split(tmp_path / "data/prepared/gsm8k-train-s0", "warmup")
    assert len(traces) == 100 and all(t.answer.rstrip().endswith("}") and "\\boxed{" in t.answer for t in traces)


@needs_sets
def test_no_solutions_no_warmup(tmp_path):
    study = tiny_study(tasks=["dapo-math-17k"], data=data(train_size=50))
    with pytest.raises(ConfigError, match="warmup.steps = 150: dapo-math-17k has no worked solutions.*set it to 0"):
        prepare(study, tmp_path)


@needs_sets
def test_too_few_problems(tmp_path):
    study = tiny_study(tasks=["gsm8k-train"], data=data(validation_size=7000, test_size=473))
    with pytest.raises(ConfigError, match="7473 problems, too few for validation_size"):
        prepare(study, tmp_path)


def test_graders_by_name():
    assert [grader_kind(name) for name in ("facts", "noise", "math500", "gsm8k-train", "humaneval")] == [
        "exact", "exact", "math", "math", "code",
    ]  # fmt: skip


def refused_by_validation(root, **changes) -> str:
    """What the check before any work says of a warm-up."""
    study = tiny_study(evaluate={"splits": ["test"]}, **changes)
    with pytest.raises(ConfigError) as caught:  # the tiny study leaves parameters out, which is a fault of its own
        check(study, "params.yaml", root)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "fault"), [('{"problem": "p", "solution": "s"}', False), ('{"problem": "p"}', True), (None, True)]
)
def test_a_warmup_without_solutions_is_refused_before_work(tmp_path, line, fault):
    """The table knows what a source gives; a file in data.benchmarks_dir is looked into."""
    (tmp_path / "sets").mkdir()
    if line:
        (tmp_path / "sets" / "dapo_math_17k_sample.jsonl").write_text(line + "\n")
    said = refused_by_validation(tmp_path, tasks=["dapo-math-17k"], data={"benchmarks_dir": "sets"})
    assert ("warmup.steps = 150: dapo-math-17k has no worked solutions to learn from; set it to 0" in said) == fault
    said = refused_by_validation(tmp_path, tasks=["dapo-math-17k"], data={"benchmarks_dir": "sets"}, warmup={"steps": 0})
    assert "worked solutions" not in said


def test_a_set_with_solutions_may_be_warmed_up_on(tmp_path):
    assert "worked solutions" not in refused_by_validation(tmp_path, tasks=["gsm8k-train", "facts"])
    assert "dapo-math-17k has no worked" in refused_by_validation(tmp_path, tasks=["gsm8k-train", "dapo-math-17k"])
