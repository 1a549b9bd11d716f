"""A small project for tests of the runner and of DVC: the real code and dvc.yaml, tiny notebooks, smoke parameters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tepo_core.commands.profiles import text_of
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
    (folder / "params.yaml").write_text(text_of(ROOT, profile), encoding="utf-8")
    return folder


TINY = {
    "train_size: 256 ": "train_size: 32 ", "warmup_size: 3200 ": "warmup_size: 64 ", "steps: 50 ": "steps: 2 ",
    "validation_size: 32 ": "validation_size: 4 ", "test_size: 32 ": "test_size: 4 ", "long_size: 32 ": "long_size: 4 ",
    "hidden_size: 128 ": "hidden_size: 16 ", "mlp_size: 384 ": "mlp_size: 32 ", "layers: 2 ": "layers: 1 ",
    "head_size: 32 ": "head_size: 8 ", "rollouts: 4 ": "rollouts: 2 ", "prompts_per_rollout: 16 ": "prompts_per_rollout: 4 ",
    "samples: 4 ": "samples: 2 ", "k: [1, 2, 4] ": "k: [1, 2] ", "threads: 0 ": "threads: 1 ",
    "bootstrap: 200 ": "bootstrap: 100 ", "methods: [grpo, tepo_kl]": "methods: [grpo]",
}  # fmt: skip


def make_tiny(project: Path) -> None:
    """Shrink the smoke parameters of a project until a stage takes a second."""
    text = (project / "params.yaml").read_text(encoding="utf-8")
    for old, new in TINY.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (project / "params.yaml").write_text(text, encoding="utf-8")


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
