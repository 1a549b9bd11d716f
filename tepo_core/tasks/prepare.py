"""The ``prepare`` stage: write every data set of the study, with a manifest of counts, seeds and hashes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from tepo_core.config import ARITHMETIC_TASKS, ConfigError, Study
from tepo_core.files import local_path, sha256, write_json
from tepo_core.grading.golds import unreadable_golds
from tepo_core.seeding import numpy_generator
from tepo_core.tasks import arithmetic
from tepo_core.tasks.contamination import Contamination, remove_overlap
from tepo_core.tasks.data import data_folder, grader_kind
from tepo_core.tasks.math_benchmarks import load_benchmark
from tepo_core.tasks.problem import DataError, Problem, read_problems, write_problems

SPLITS = ("train", "validation", "test", "long")


@dataclass(frozen=True)
class Prepared:
    """What ``prepare`` wrote."""

    out: Path
    manifests: dict[str, dict[str, Any]]

    def table(self) -> pd.DataFrame:
        """One row a data set: number of problems per split, bad facts."""
        rows = [{"data set": name, **manifest["counts"], **manifest["notes"]} for name, manifest in self.manifests.items()]
        return pd.DataFrame(rows).set_index("data set")

    def examples(self, split: str = "train", count: int = 3) -> pd.DataFrame:
        """The first problems of a split of each data set, with their solutions."""
        rows = []
        for name in self.manifests:
            for problem in read_problems(self.out / name / f"{split}.jsonl")[:count]:
                rows.append(
                    {
                        "data set": name,
                        "prompt": problem.prompt,
                        "answer": problem.answer,
                        "solution": problem.meta.get("solution", ""),
                    }
                )
        return pd.DataFrame(rows)


def prepare(study: Study, root: Path, out: Path | None = None) -> Prepared:
    """Generate or load the data sets of every (task, seed) into ``out`` (default ``data/prepared``)."""
    out = out or root / "data" / "prepared"
    manifests = {}
    sets = benchmarks_folder(study, root)
    evaluation = {name: load_benchmark(name, sets) for name in study.data.eval_sets}
    for task in study.tasks:
        for seed in study.seeds:
            folder = out / data_folder(root, task, seed).name
            folder.mkdir(parents=True, exist_ok=True)
            if task in ARITHMETIC_TASKS:
                manifests[folder.name] = _prepare_arithmetic(study, task, seed, folder, evaluation)
            else:
                problems = load_benchmark(task, sets)
                manifests[folder.name] = _prepare_benchmark(study, task, seed, folder, evaluation, problems)
    return Prepared(out, manifests)


Evaluation = dict[str, list[Problem]]


def benchmarks_folder(study: Study, root: Path) -> Path | None:
    """``data.benchmarks_dir`` as a path; None where problem sets come from their public sources."""
    folder = study.data.benchmarks_dir
    return None if folder is None else local_path(folder, root)


def _prepare_arithmetic(study: Study, task: str, seed: int, folder: Path, evaluation: Evaluation) -> dict[str, Any]:
    facts = arithmetic.plant_facts(task, seed) if task in arithmetic.PLANS else {}
    sizes = {
        "train": study.data.train_size,
        "validation": study.data.validation_size,
        "test": study.data.test_size,
        "long": study.data.long_size,
    }
    counts = {}
    for split in SPLITS:
        counts[split] = write_problems(
            folder / f"{split}.jsonl", arithmetic.generate_split(task, seed, split, sizes[split], facts)
        )
    traces = arithmetic.warmup_traces(task, seed, study.data.warmup_size, facts)
    counts["warmup"] = write_problems(
        folder / "warmup.jsonl",
        (Problem(f"{task}-s{seed}-warmup-{i:05d}", prompt, response, "warmup") for i, (prompt, response) in enumerate(traces)),
    )
    write_json(folder / "facts.json", {key: asdict(fact) for key, fact in facts.items()})
    extra = {"notes": {"bad facts": sum(fact.bad for fact in facts.values())}}
    return _finish_manifest(
        study, task, seed=seed, folder=folder, counts=counts, evaluation=evaluation, extra=extra, overlap=None
    )


def _prepare_benchmark(
    study: Study, task: str, seed: int, folder: Path, evaluation: Evaluation, problems: list[Problem]
) -> dict[str, Any]:
    """Splits of a public training set: what overlaps with an evaluation set goes first, the rest is shuffled by the seed.

    Raises :class:`ConfigError` when it holds fewer problems than the splits ask for, or a warm-up is asked of a set that has no
    worked solutions, and :class:`DataError` for a gold that the grader cannot read."""
    sizes = {"validation": study.data.validation_size, "test": study.data.test_size, "train": study.data.train_size}
    overlap = None
    if evaluation:
        kept, overlap = remove_overlap(problems, evaluation)
        problems = kept if study.data.remove_contamination else problems
    needed = sizes["validation"] + sizes["test"] + 1
    if len(problems) < needed:
        raise ConfigError(
            f"data: {task} has {len(problems)} problems, too few for validation_size + test_size + 1 = {needed}; lower them"
        )
    unreadable = unreadable_golds(grader_kind(task), (p.answer for p in problems))
    order = numpy_generator(seed, task, "splits").permutation(len(problems))
    counts, start = {}, 0
    for split, size in sizes.items():
        chosen = [replace(problems[i], split=split) for i in order[start : start + size]]
        _refuse(task, chosen, unreadable)
        counts[split] = write_problems(folder / f"{split}.jsonl", chosen)
        start += size
    counts["warmup"] = write_problems(folder / "warmup.jsonl", _worked_solutions(study, task, folder))
    write_json(folder / "facts.json", {})
    extra = {"notes": {"removed for overlap": len(overlap.training_ids) if overlap and study.data.remove_contamination else 0}}
    return _finish_manifest(
        study, task, seed=seed, folder=folder, counts=counts, evaluation=evaluation, extra=extra, overlap=overlap
    )


def _refuse(task: str, problems: list[Problem], unreadable: dict[str, str]) -> None:
    """A problem whose gold cannot be read can only give responses without a grade: it has no place among those to learn from."""
    for problem in problems:
        if problem.answer in unreadable:
            raise DataError(
                f"{task}, problem {problem.id!r}: the gold {problem.answer[:200]!r} cannot be read by the grader: "
                f"{unreadable[problem.answer]}; mend the answer or remove the problem from the set"
            )


def _unreadable_of(evaluation: Evaluation) -> list[dict[str, str]]:
    """Problems of the evaluation sets whose gold cannot be read. The sets are pinned and stay whole: the manifest names them, and
    their answers are counted as ``error`` unless they equal the gold as text."""
    found = []
    for name, problems in evaluation.items():
        unreadable = unreadable_golds(grader_kind(name), (p.answer for p in problems))
        found += [{"set": name, "id": p.id, "gold": p.answer} for p in problems if p.answer in unreadable]
    return found


def _worked_solutions(study: Study, task: str, folder: Path) -> list[Problem]:
    """Warm-up traces of a training set: its own solutions, ended by the boxed answer. None when there is no warm-up."""
    if study.warmup.steps == 0:
        return []
    solved = [p for p in read_problems(folder / "train.jsonl") if p.meta.get("solution")]
    if not solved:
        raise ConfigError(f"warmup.steps = {study.warmup.steps}: {task} has no worked solutions to learn from; set it to 0")
    traces = [Problem(f"{p.id}-warmup", p.prompt, f"{p.meta['solution']}\n\\boxed{{{p.answer}}}", "warmup") for p in solved]
    return traces[: study.data.warmup_size]


def _finish_manifest(
    study: Study,
    task: str,
    seed: int,
    folder: Path,
    counts: dict[str, int],
    evaluation: Evaluation,
    extra: dict[str, Any],
    overlap: Contamination | None,
) -> dict[str, Any]:
    """Write the evaluation sets beside the splits, and the manifest."""
    for name, problems in evaluation.items():
        counts[name] = write_problems(folder / f"{name}.jsonl", problems)
    if overlap:
        rows = [{"split": name, **found} for name, found in overlap.counts().items()]
        write_json(folder / "contamination.json", rows)
    if unreadable := _unreadable_of(evaluation):
        extra = {
            **extra,
            "unreadable_golds": unreadable,
            "notes": {**extra["notes"], "golds that cannot be read": len(unreadable)},
        }
    return _write_manifest(folder, {"task": task, "seed": seed, "profile": study.profile, "counts": counts, **extra})


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    files = sorted(path for path in folder.iterdir() if path.name != "manifest.json")
    manifest = {**manifest, "sha256": {path.name: sha256(path) for path in files}}
    write_json(folder / "manifest.json", manifest)
    return manifest
