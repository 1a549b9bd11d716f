"""Reading runs: the declared combinations and imported ones; what is missing, broken or left over is named, never used.

Only the run format is read (docs/run_format.md), so a run made elsewhere is a run like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tepo_core.config import Study
from tepo_core.runs.folder import (
    BASE,
    ENGINE,
    FORMAT,
    RUN_KINDS,
    DeclaredRun,
    RunError,
    changed_file,
    declared_runs,
    imported_folder,
    read_done,
)
from tepo_core.runs.metrics import Metrics, Series, read_metrics

HASHED = (
    "config.json",
    "metrics.jsonl",
    "tokens.parquet",
    "responses.parquet",
    "facts.parquet",
    "samples.parquet",
    "summary.json",
)
"""Files whose hashes are compared with done.json: all that the analysis reads. Weights are not, they may be many gigabytes."""

IMPORT_AGAIN = "copy the whole run there again from where it was made (docs/run_format.md says what it must hold)"

Key = tuple[str, str, int]
"""(task, method, seed)"""


@dataclass(frozen=True)
class Finding:
    """Something about the runs a reader must know. kind: missing | broken | orphan | note."""

    kind: str
    path: str
    reason: str
    fix: str = ""


@dataclass
class Run:
    """One training run. ``rollout`` and ``validation`` have a row a step, ``update`` a row an update, ``step`` updates
    merged by step."""

    task: str
    method: str
    seed: int
    folder: Path
    config: dict
    rollout: Series
    update: Series
    step: Series
    validation: Series
    stopped: str | None = None

    @property
    def key(self) -> Key:
        return self.task, self.method, self.seed


@dataclass
class Evaluation:
    """One evaluated policy; ``splits`` as in summary.json."""

    task: str
    method: str
    seed: int
    folder: Path
    config: dict
    splits: dict[str, dict]

    def counts(self, split: str) -> tuple[list[str], np.ndarray, int]:
        """Problem ids, correct samples of each problem (empty where only the greedy answer was taken), and samples a
        problem."""
        entry = self.splits[split]
        return entry["per_problem"]["id"], np.asarray(entry["per_problem"]["correct"], dtype=int), int(entry["samples"])

    def greedy(self, split: str) -> np.ndarray | None:
        """Greedy correctness of each problem (0 or 1), or ``None`` where it was not evaluated."""
        values = self.splits[split]["per_problem"].get("greedy")
        return np.asarray(values, dtype=float) if values else None


@dataclass
class RunSet:
    """Everything the analysis reads, and what it found on the way. Methods and seeds of imported runs are included."""

    tasks: list[str]
    methods: list[str]
    seeds: list[int]
    runs: dict[Key, Run]
    evaluations: dict[Key, Evaluation]
    warmups: dict[tuple[str, int], Path]
    findings: list[Finding]
    imported: list[str] = field(default_factory=list)

    def of(self, task: str, method: str) -> dict[int, Run]:
        """Runs of a method on a task by seed, in order."""
        return {seed: run for (t, m, seed), run in sorted(self.runs.items()) if (t, m) == (task, method)}

    def evaluated(self, task: str, method: str) -> dict[int, Evaluation]:
        """Evaluations of a method on a task by seed, in order."""
        return {seed: e for (t, m, seed), e in sorted(self.evaluations.items()) if (t, m) == (task, method)}


def _checked_config(folder: Path, kind: str) -> dict:
    """config.json of a finished folder. Raises :class:`RunError` (unfinished, damaged, of another kind) or
    FileNotFoundError."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        done = read_done(folder)
    except FileNotFoundError:
        raise RunError("not finished: done.json is missing") from None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"config.json or done.json cannot be read ({error})") from None
    if config.get("format") != FORMAT:
        raise RunError(f"config.json: format = {config.get('format')!r}; this version reads format {FORMAT}")
    if config.get("kind") != kind:
        raise RunError(f"config.json: kind = {config.get('kind')!r}; expected {kind!r}")
    if name := changed_file(folder, done.get("files", {}), only=HASHED):
        raise RunError(f"{name} is not the file that the run wrote (its hash differs from done.json)")
    return config


def read_run(folder: Path) -> Run:
    """One training run. Raises :class:`RunError` saying what is wrong, FileNotFoundError where there is no folder."""
    config = _checked_config(folder, "train")
    if not (folder / "metrics.jsonl").is_file():
        raise RunError("metrics.jsonl is missing")
    metrics = read_metrics(folder)
    if not len(metrics.rollout):
        raise RunError("metrics.jsonl holds no rollout")
    _check_rollouts(metrics, config)
    return Run(
        task=config["task"],
        method=config["method"],
        seed=int(config["seed"]),
        folder=folder,
        config=config,
        rollout=metrics.rollout,
        update=metrics.update,
        step=metrics.update.per_step(),
        validation=metrics.validation,
        stopped=metrics.stopped,
    )


def _check_rollouts(metrics: Metrics, config: dict) -> None:
    """Every rollout that ``train.rollouts`` promises must be there, up to a stop. A run of another engine may log some of its
    steps only, but must have the last one (docs/run_format.md). Raises :class:`RunError`."""
    steps = [int(step) for step in np.unique(metrics.rollout.steps)]
    wanted = (config.get("train") or {}).get("rollouts")
    if wanted is None:
        return
    said = f"of {wanted} (train.rollouts in config.json)"
    if config.get("engine") == ENGINE:
        lost = sorted(set(range(1, steps[-1] + 1)) - set(steps))
        if lost:
            raise RunError(f"metrics.jsonl lacks rollout {lost[0]} {said}")
    if steps[-1] < int(wanted) and metrics.stopped is None:
        held = (
            f"holds rollouts {steps[0]} to {steps[-1]} {said}"
            if config.get("engine") == ENGINE
            else (f"ends at rollout {steps[-1]} {said}")
        )
        raise RunError(f"metrics.jsonl {held} and no stop event: the rest is missing")


def read_evaluation(folder: Path) -> Evaluation:
    """One evaluated policy. Raises :class:`RunError` or FileNotFoundError like :func:`read_run`."""
    config = _checked_config(folder, "evaluate")
    try:
        splits = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["splits"]
        evaluation = Evaluation(config["task"], config["method"], int(config["seed"]), folder, config, splits)
        for split in splits:
            ids, correct, samples = evaluation.counts(split)
            if (
                len(ids) != len(correct)
                or len(ids) != int(splits[split]["problems"])
                or (len(correct) and correct.max() > samples)
            ):
                raise RunError(f"summary.json: counts of split {split!r} do not fit each other")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"summary.json cannot be read ({type(error).__name__}: {error})") from None
    return evaluation


def load_runs(study: Study, root: Path) -> RunSet:
    """Read every declared combination under ``root``/runs, and all imported runs. Never raises for a bad run: it is named
    in ``findings``."""
    findings: list[Finding] = []
    runs: dict[Key, Run] = {}
    evaluations: dict[Key, Evaluation] = {}
    warmups: dict[tuple[str, int], Path] = {}
    for declared in declared_runs(study, "warmup"):
        folder = declared.folder(root)
        try:
            _checked_config(folder, "warmup")
            warmups[declared.task, declared.seed] = folder
        except (RunError, FileNotFoundError) as error:
            findings.append(_fault(folder, root, error, "warmup"))
    for declared in declared_runs(study, "train"):
        run = _guarded(read_run, declared, root, findings)
        if run is not None:
            runs[run.key] = run
            findings.extend(_remarks(run, study, root))
    for declared in declared_runs(study, "evaluate"):
        evaluation = _guarded(read_evaluation, declared, root, findings)
        if evaluation is not None:
            evaluations[declared.task, declared.method, declared.seed] = evaluation
    out = RunSet(
        tasks=list(study.tasks),
        methods=list(study.methods),
        seeds=list(study.seeds),
        runs=runs,
        evaluations=evaluations,
        warmups=warmups,
        findings=findings,
    )
    findings.extend(_orphans(study, root))
    _add_imported(out, root)
    return out


def _guarded(reader: Callable[[Path], Any], declared: DeclaredRun, root: Path, findings: list[Finding]) -> Any:
    """The declared run, or ``None`` with a finding; the folder's name must agree with its config."""
    folder = declared.folder(root)
    key = (declared.task, declared.method, declared.seed)
    try:
        run = reader(folder)
        found = (run.task, run.method, run.seed)
        if found != key:
            raise RunError(f"config.json says {'-'.join(map(str, found))}, the folder says {'-'.join(map(str, key))}")
        return run
    except (RunError, FileNotFoundError, UnicodeDecodeError) as error:
        findings.append(_fault(folder, root, error, declared.kind))
        return None


def _fault(folder: Path, root: Path, error: Exception, stage: str) -> Finding:
    """A finding with what to do. A run that was imported cannot be made again here, so nothing tells to remove it."""
    path = folder.relative_to(root).as_posix()
    if imported_folder(root) in folder.parents:
        return Finding("broken", path, str(error), f"{IMPORT_AGAIN}, then dvc repro analyse; until then it is left out")
    if isinstance(error, FileNotFoundError):
        return Finding("missing", path, "declared in params.yaml, but there is no such run", f"dvc repro {stage}")
    return Finding("broken", path, str(error), f"remove {path}, then dvc repro {stage}")


def _remarks(run: Run, study: Study, root: Path) -> list[Finding]:
    """Notes about a usable run: stopped early, NaN in metrics, other training parameters than declared."""
    path = run.folder.relative_to(root).as_posix()
    notes = []
    if run.stopped:
        notes.append(Finding("note", path, f"stopped early after rollout {int(run.rollout.steps[-1])}: {run.stopped}"))
    bad = sorted(
        {
            name
            for series in (run.rollout, run.update, run.validation)
            for name, v in series.num.items()
            if not np.isfinite(v).all()
        }
    )
    if bad:
        notes.append(Finding("note", path, f"NaN or infinite values in {', '.join(bad)}; they are left out of every mean"))
    declared = study.train_for(run.method).model_dump()
    other = {k: (v, declared[k]) for k, v in run.config.get("train", {}).items() if k in declared and v != declared[k]}
    if other:
        text = ", ".join(f"train.{k} = {a} (declared {b})" for k, (a, b) in sorted(other.items()))
        notes.append(Finding("note", path, f"made with other parameters than declared: {text}", "dvc repro train"))
    return notes


def _orphans(study: Study, root: Path) -> list[Finding]:
    found = []
    for kind in RUN_KINDS:
        folder, names = root / "runs" / kind, {run.name for run in declared_runs(study, kind)}
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.is_dir() and path.name not in names and (path / "config.json").is_file():
                where = path.relative_to(root).as_posix()
                found.append(Finding("orphan", where, "not declared in params.yaml; not used", f"remove {where}"))
    return found


def _add_imported(out: RunSet, root: Path) -> None:
    """Add runs below runs/imported/<name>/ (any depth). Their method is shown as ``method@name`` so that it never mixes
    with ours."""
    base = imported_folder(root)
    for config_path in sorted(base.rglob("config.json")) if base.is_dir() else []:
        folder = config_path.parent
        name = folder.relative_to(base).parts[0]
        try:
            kind = json.loads(config_path.read_text(encoding="utf-8")).get("kind")
            if kind not in ("train", "evaluate"):
                continue
            run = read_run(folder) if kind == "train" else read_evaluation(folder)
        except (RunError, FileNotFoundError, OSError, ValueError, KeyError) as error:
            out.findings.append(_fault(folder, root, error if isinstance(error, RunError) else RunError(str(error)), "analyse"))
            continue
        if run.method != BASE:
            run.method = f"{run.method}@{name}"
        target = out.runs if kind == "train" else out.evaluations
        key = (run.task, run.method, run.seed)
        if key in target:
            if run.method != BASE:
                again = f"a second run of {'-'.join(map(str, key))}"
                fix = "give it a folder of its own name below runs/imported, or another seed in its config.json"
                out.findings.append(Finding("broken", folder.relative_to(root).as_posix(), again, fix))
            continue
        target[key] = run
        for value, known in ((run.task, out.tasks), (run.method, out.methods), (run.seed, out.seeds)):
            if value not in known and value != BASE:
                known.append(value)
        if name not in out.imported:
            out.imported.append(name)
