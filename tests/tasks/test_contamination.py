"""Overlap between training and evaluation: by hand, its removal, and the known counts of public files."""

import os
from pathlib import Path

import pytest

from tepo_core.tasks.contamination import find_overlap, remove_overlap
from tepo_core.tasks.math_benchmarks import load_benchmark
from tepo_core.tasks.problem import Problem


def folder():
    named = os.environ.get("TEPO_BENCHMARKS")
    return Path(named) if named else Path(__file__).parents[3] / "shared" / "benchmarks"


def problem(key, text, split="x"):
    return Problem(key, f"Template around it: {text}", "1", split, {"problem": text})


LONG = "a train leaves the station at noon and travels forty miles an hour towards the old town by the sea"
TRAIN = [
    problem("t1", "Find $x$ if $2x = 4$."),
    problem("t2", f"{LONG}, when does it arrive?"),
    problem("t3", "How many primes are below twenty?"),
    problem("t4", "求所有正整数 n 使得 n 整除 2 的 n 次方减一并且 n 是质数"),
]
EVAL = {
    "set": [
        problem("e1", "find X if  2x=4"),
        problem("e2", f"Suppose {LONG}. How far has it come at two?"),
        problem("e3", "How many primes are below thirty?"),
        problem("e4", "试求所有正整数 n 使得 n 整除 2 的 n 次方减一并且 n 大于一"),
    ],
    "clean": [problem("c1", "What is seven times eight?")],
}


def test_overlap_by_hand():
    found = {(o.evaluation_id, o.training_id, o.how) for o in find_overlap(TRAIN, EVAL).overlaps}
    assert found == {("e1", "t1", "exact"), ("e2", "t2", "13-gram"), ("e4", "t4", "13-gram")}


def test_removal_keeps_order_reports_and_is_idempotent():
    kept, result = remove_overlap(TRAIN, EVAL)
    assert [p.id for p in kept] == ["t3"]
    assert result.counts()["set"] == {"problems": 4, "exact": 1, "exact_or_13gram": 3, "training_problems": 3}
    assert result.table().loc["clean"].tolist() == [1, 0, 0, 0]
    assert result.to_json()["removed"] == 3 and result.to_json()["training_problems"] == 4
    again, nothing = remove_overlap(kept, EVAL)
    assert again == kept and not nothing.overlaps


def test_turns_of_phrase_are_ignored_and_removal_still_ends():
    phrase = "the answer can be written as m over n where m and n are relatively prime find m plus n"
    training = [problem(f"t{i}", f"Case {i}: {phrase}") for i in range(12)]
    training[0] = problem("t0", f"Count the squares. Case 0: {phrase}")
    evaluation = {"set": [problem("e", f"Another: {phrase}"), problem("e0", f"count the squares case 0: {phrase}")]}
    found = {(o.evaluation_id, o.training_id, o.how) for o in find_overlap(training, evaluation).overlaps}
    assert found == {("e0", "t0", "exact")}
    kept, _ = remove_overlap(training, evaluation)  # eleven remain: the phrase is still common
    assert len(kept) == 11
    kept, _ = remove_overlap(training[:11], evaluation)  # ten remain: the phrase is rare now, and counts
    assert kept == []


@pytest.mark.skipif(not folder().is_dir(), reason="no benchmark files here (set TEPO_BENCHMARKS to their folder)")
def test_known_overlap_of_the_public_dapo_copy():
    names = ("math500", "amc23", "amc83", "olympiadbench", "omni_math", "aime24", "aime25")
    training = load_benchmark("dapo-math-17k", folder())
    result = find_overlap(training, {name: load_benchmark(name, folder()) for name in names})
    exact = {name: counts["exact"] for name, counts in result.counts().items()}
    assert exact == {"math500": 7, "amc23": 8, "amc83": 14, "olympiadbench": 10, "omni_math": 181, "aime24": 0, "aime25": 0}
