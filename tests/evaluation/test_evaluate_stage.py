"""The evaluate stage as a whole: which problems are asked, how they are sampled, and that it is the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import run_bytes, tiny_study

from tepo_core.config import ConfigError
from tepo_core.evaluation.stage import evaluate_run
from tepo_core.tasks.data import data_folder, load_split
from tepo_core.tasks.prepare import prepare
from tepo_core.training.warmup import warmup


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    study = tiny_study(warmup={"steps": 3})
    prepare(study, folder)
    warmup(study, "facts", 0, folder)
    return folder


def test_base_policy_is_sampled_greedy_and_n_times_the_same_way_each_time(root: Path, tmp_path: Path) -> None:
    study = tiny_study(warmup={"steps": 3})
    result = evaluate_run(study, "facts", "base", 0, root, tmp_path / "a")
    assert {s: n["problems"] for s, n in result.summary["splits"].items()} == {"test": 12, "long": 8}
    assert result.samples.num_rows == (12 + 8) * (4 + 1)
    evaluate_run(study, "facts", "base", 0, root, tmp_path / "b")
    assert run_bytes(tmp_path / "a") == run_bytes(tmp_path / "b")


def test_limit_asks_the_first_problems_of_each_split(root: Path, tmp_path: Path) -> None:
    study = tiny_study(warmup={"steps": 3}, evaluate={"limit": 5})
    result = evaluate_run(study, "facts", "base", 0, root, tmp_path / "a")
    first = [p.id for p in load_split(data_folder(root, "facts", 0), "test")][:5]
    assert result.summary["splits"]["test"]["per_problem"]["id"] == first
    assert json.loads((tmp_path / "a" / "config.json").read_text())["evaluate"]["limit"] == 5


def test_the_papers_protocol_takes_one_greedy_answer_of_a_set_that_is_not_aime_or_amc(root: Path, tmp_path: Path) -> None:
    study = tiny_study(warmup={"steps": 3}, evaluate={"protocol": "paper"})
    result = evaluate_run(study, "facts", "base", 0, root, tmp_path / "a")
    numbers = result.summary["splits"]["test"]
    assert numbers["samples"] == 0 and numbers["avg"] is None and numbers["pass@k"] == {} and 0 <= numbers["greedy"] <= 1
    assert result.summary["settings"]["test"]["samples"] == 0 and set(result.samples.column("sample").to_pylist()) == {-1}


@pytest.mark.parametrize(("given", "message"), [({"protocol": "mine"}, "protocol"), ({"limit": -1}, "limit")])
def test_bad_settings_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_study(evaluate=given)
