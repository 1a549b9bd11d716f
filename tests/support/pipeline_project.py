"""A small project for tests of the runner and of DVC: the real code and dvc.yaml, tiny notebooks, smoke parameters."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tepo_core.pipeline.notebooks import nbformat, normalise, to_text

ROOT = Path(__file__).parents[2]
AXES_CELL = "task: str | None = None\nmethod: str | None = None\nseed: int | None = None\n"


def write_notebook(path: Path, *cells: str, parameters: str = AXES_CELL) -> None:
    """A normalised notebook: the parameters cell, then the given code cells."""
    first = nbformat.v4.new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=[first, *map(nbformat.v4.new_code_cell, cells)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_text(normalise(notebook)), encoding="utf-8")


def make_project(folder: Path, profile: str = "smoke") -> Path:
    """A project folder with linked code and a profile as params.yaml; no notebooks yet."""
    folder.mkdir(parents=True)
    (folder / "tepo_core").symlink_to(ROOT / "tepo_core")
    (folder / "profiles").symlink_to(ROOT / "profiles")
    for name in ("dvc.yaml", "bin"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copyfile(ROOT / "profiles" / f"{profile}.yaml", folder / "params.yaml")
    return folder


def environment(**extra: str) -> dict[str, str]:
    """Environment of a subprocess that must use this interpreter and this code."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "TEPO_PYTHON": sys.executable, **extra}


def start(project: Path, *command: str, **extra: str) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=project,
        env=environment(**extra),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )


def hear_ctrl_c() -> None:
    """A test run that was started in the background ignores SIGINT, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def runner(project: Path, *arguments: str, **extra: str) -> subprocess.Popen:
    return start(project, sys.executable, "-m", "tepo_core.pipeline.launch", *arguments, **extra)
