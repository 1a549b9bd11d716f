"""Code problem sets (HumanEval, MBPP) as problems whose answer is what :mod:`tepo_core.grading.code_grader` runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tepo_core.grading.code_grader import make_gold
from tepo_core.tasks.benchmark_table import Benchmark
from tepo_core.tasks.problem import Problem


def make_problem(record: Mapping[str, Any], benchmark: Benchmark) -> Problem:
    """A code record as a :class:`Problem`.

    HumanEval's prompt is code that the answer continues or repeats, and its tests define ``check(candidate)``; MBPP's prompt is
    a sentence, its tests are asserts, and the prompt shows the asserts, as the paper does (arXiv 2108.07732)."""
    tests, name = record["tests"], record["entry_point"]
    continues = re.search(rf"^def[ \t]+{re.escape(name)}\b", record["prompt"], re.MULTILINE) is not None
    if re.search(r"^def check\(", tests, re.MULTILINE):
        tests = f"{tests}\n\ncheck({name})\n"
    gold = make_gold(prompt=record["prompt"] if continues else "", entry_point=name, tests=tests)
    shown = benchmark.prompt.format(problem=record["prompt"], tests=record["tests"])
    meta = {key: record[key] for key in ("canonical_solution", "split") if record.get(key)}
    return Problem(str(record["task_id"]), shown, gold, benchmark.name, {"problem": record["prompt"], **meta})


def convert_mbpp(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """Rows of the hub data set in our format: ids with a prefix, set-up and asserts as one text, the name of the function."""
    records = []
    for row in sorted(rows, key=lambda row: int(row["task_id"])):
        asserts = [line.replace("\r\n", "\n") for line in row["tests"]]
        solution = row["canonical_solution"].replace("\r\n", "\n")
        tests = "\n".join([*([row["setup"].replace("\r\n", "\n")] if row["setup"] else []), *asserts])
        records.append(
            {
                "task_id": f"MBPP/{row['task_id']}",
                "prompt": row["prompt"],
                "tests": tests,
                "entry_point": entry_point(asserts, solution),
                "canonical_solution": solution,
                "split": row["source_split"],
            }
        )
    return records


def entry_point(asserts: list[str], solution: str) -> str:
    """The first function called in the asserts that the solution defines; empty when there is none."""
    defined = set(re.findall(r"^[ \t]*(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*=", solution, re.MULTILINE))
    names = {name for pair in defined for name in pair if name}
    called = (name for line in asserts for name in re.findall(r"(\w+)[ \t]*\(", line))
    return next((name for name in called if name in names), "")
