"""The first line of every stage's notebook: where am I, what are the parameters, where do results go."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_core.config import Study, find_root
from tepo_core.pipeline.parameters import load_normalised, load_validated
from tepo_core.pipeline.stages import AXES, OUT, PARAMS, Run, all_runs, check_run
from tepo_core.runs.folder import is_done


@dataclass(frozen=True)
class Context:
    """The study's parameters, the project's folder, the run's axes, and the folder to write to."""

    study: Study
    root: Path
    task: str | None
    method: str | None
    seed: int | None
    out: Path


def begin(
    stage: str, task: str | None = None, method: str | None = None, seed: int | None = None, out: str | None = None
) -> Context:
    """Context of one run. Works from the project's folder and from ``notebooks/``.

    By hand, axes left None are the study's first ones, and results go to the run's standard folder.
    Raises ConfigError and StageError as the runner does."""
    root = find_root()
    named = os.environ.get(PARAMS)
    study = load_normalised(Path(named)) if named else load_validated(root / "params.yaml")
    first = {"task": study.tasks[0], "method": study.methods[0], "seed": study.seeds[0]}
    given = {"task": task, "method": method, "seed": seed}
    axes = {axis: first[axis] if given[axis] is None else given[axis] for axis in AXES[stage]}
    run = Run(stage, **axes)
    check_run(study, run)
    folder = Path(out or os.environ.get(OUT) or root / run.folder)
    return Context(study, root, run.task, run.method, run.seed, folder)


def overview(root: Path) -> Any:
    """A table of the study's stages: how many runs each has, and how many are there."""
    import pandas as pd

    study = load_validated(root / "params.yaml")
    runs = list(all_runs(study))
    rows = []
    for stage in AXES:
        mine = [run for run in runs if run.stage == stage]
        there = sum(
            (root / run.folder / "index.html").is_file() if stage == "report" else is_done(root / run.folder) for run in mine
        )
        rows.append({"profile": study.profile, "stage": stage, "runs": len(mine), "finished": there, "writes": _place(mine[0])})
    return pd.DataFrame(rows).set_index(["profile", "stage"])


def _place(run: Run) -> str:
    return (run.folder if not run.name else run.folder.parent).as_posix()
