"""The run folder: its names, its format number, and the marker that says it is complete.

A run holds ``config.json``, ``metrics.jsonl`` (:mod:`tepo_core.runs.metrics`), tables (:mod:`tepo_core.runs.tables`), ``policy/``
and, last, ``done.json`` with a hash of every file. No times are written: equal parameters and seed give equal bytes.
docs/run_format.md describes it for who writes one elsewhere. Imports the standard library alone: the command line starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_core.files import sha256, write_json

if TYPE_CHECKING:
    from tepo_core.config import Study

FORMAT = 1
ENGINE = "tepo"
"""``engine`` in the config of our own runs; imported ones may name another."""
BASE = "base"
"""Stands for a method in the name of the base policy's evaluation."""
RUN_KINDS = ("warmup", "train", "evaluate")
DONE, NOTEBOOK = "done.json", "notebook.ipynb"


class RunError(ValueError):
    """A run folder is not in the run format."""


def run_name(task: str, seed: int, method: str | None = None) -> str:
    """Folder name of a run: ``facts-grpo-s0``, or ``facts-s0`` for a base policy (and for the data it is trained on)."""
    return f"{task}-{method}-s{seed}" if method else f"{task}-s{seed}"


def run_folder(root: Path, kind: str, task: str, seed: int, method: str | None = None) -> Path:
    """Standard place of a run; ``kind`` is one of :data:`RUN_KINDS`."""
    return root / "runs" / kind / run_name(task, seed, method)


def imported_folder(root: Path) -> Path:
    """Where runs made elsewhere lie, each below a folder of its own name."""
    return root / "runs" / "imported"


@dataclass(frozen=True)
class DeclaredRun:
    """A run that ``params.yaml`` asks for. ``method`` is None for a warm-up."""

    kind: str
    task: str
    method: str | None
    seed: int

    @property
    def name(self) -> str:
        return run_name(self.task, self.seed, self.method)

    def folder(self, root: Path) -> Path:
        return run_folder(root, self.kind, self.task, self.seed, self.method)


def declared_runs(study: Study, kind: str) -> Iterator[DeclaredRun]:
    """Every run of one kind that a study asks for, in the order tasks, methods, seeds; the base is evaluated first."""
    methods: dict[str, list[str | None]] = {
        "warmup": [None],
        "train": list(study.methods),
        "evaluate": [BASE, *study.methods],
    }
    for task, method, seed in product(study.tasks, methods[kind], study.seeds):
        yield DeclaredRun(kind, task, method, seed)


def finish(folder: Path, stopped: str | None = None, names: Iterable[str] | None = None) -> None:
    """Write ``done.json``, the last file of a run: hashes of the named files, and why it stopped early, if it did.

    Without ``names`` of all files but the notebook, which is still being written."""
    if names is None:
        paths = (p for p in folder.rglob("*") if p.is_file() and p.name not in (DONE, NOTEBOOK))
        names = [p.relative_to(folder).as_posix() for p in paths]
    hashes = {name: sha256(folder / name) for name in sorted(names)}
    write_json(folder / DONE, {"files": hashes, "ok": True, "stopped": stopped})


def is_done(folder: Path) -> bool:
    """Whether a run says that it was finished; its files are not looked at."""
    return (folder / DONE).is_file()


def read_done(folder: Path) -> dict[str, Any]:
    """``done.json``: ``files`` (name -> SHA-256), ``ok``, ``stopped``.

    Raises FileNotFoundError where there is none, :class:`RunError` where it is no JSON or does not say that the run went well."""
    try:
        done = json.loads((folder / DONE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RunError(f"config.json or done.json cannot be read ({error})") from None
    if not isinstance(done, dict) or done.get("ok") is not True or not isinstance(done.get("files", {}), dict):
        raise RunError("done.json does not say that the run went well")
    return done


def changed_file(folder: Path, hashes: dict[str, str], only: Container[str] | None = None) -> str | None:
    """The first file (by name) that is missing or not the one that was hashed; None when all are. ``only``: look at no others."""
    for name, expected in sorted(hashes.items()):
        if (only is None or name in only) and (not (folder / name).is_file() or sha256(folder / name) != expected):
            return name
    return None
