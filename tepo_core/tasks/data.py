"""Prepared problem sets: where they lie, how they are read and checked, and what a task knows of its answers and tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tepo_core.config import ARITHMETIC_TASKS
from tepo_core.files import sha256
from tepo_core.runs.folder import run_name
from tepo_core.tasks import arithmetic
from tepo_core.tasks.benchmark_table import lookup
from tepo_core.tasks.problem import DataError, Problem, read_problems


def data_folder(root: Path, task: str, seed: int) -> Path:
    """Where ``prepare`` writes the data set of a task and seed."""
    return root / "data" / "prepared" / run_name(task, seed)


def load_split(folder: Path, split: str) -> list[Problem]:
    """Read a prepared split and check it against the manifest.

    Raises :class:`DataError` when the file is missing, was changed after ``prepare``, or the manifest does not know it."""
    manifest_path, path = folder / "manifest.json", folder / f"{split}.jsonl"
    if not manifest_path.is_file():
        raise DataError(f"{manifest_path}: no such file; run 'dvc repro prepare' to make the data")
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    if path.name not in manifest["sha256"]:
        known = ", ".join(sorted(name.removesuffix(".jsonl") for name in manifest["sha256"] if name.endswith(".jsonl")))
        raise DataError(f"{folder.name} has no split {split!r}; allowed: {known}")
    problems = read_problems(path)
    if sha256(path) != manifest["sha256"][path.name]:
        raise DataError(
            f"{path}: changed since 'prepare' wrote it (its hash differs from manifest.json); "
            "remove the folder and run 'dvc repro prepare'"
        )
    return problems


def load_facts(folder: Path) -> dict[str, arithmetic.Fact]:
    """The planted facts of a data set; empty where the task plants none."""
    path = folder / "facts.json"
    if not path.is_file():
        return {}
    return {key: arithmetic.Fact(**fact) for key, fact in json.loads(path.read_text(encoding="utf-8")).items()}


def grader_kind(name: str) -> str:
    """Which grader the answers of a task or evaluation set need (see :func:`tepo_core.grading.graders.make_grader`)."""
    return "exact" if name in ARITHMETIC_TASKS else lookup(name).kind


def knows_tokens(name: str) -> bool:
    """Whether a task knows the kind of every token of a response, the decisive ones among them (``TOKEN_KINDS``)."""
    return name in ARITHMETIC_TASKS
