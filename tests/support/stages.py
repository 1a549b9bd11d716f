"""Stages of a small project, started and watched by tests."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
from pipeline_project import write_notebook

WRITE = "import os, pathlib\npathlib.Path(os.environ['TEPO_OUT'], 'x.txt').write_text('new')"


def prepare_notebook(project: Path, *cells: str) -> None:
    write_notebook(project / "build" / "notebooks" / "prepare.ipynb", *cells, parameters="out: str | None = None")


def left_over(project: Path) -> list[str]:
    return [p.relative_to(project).as_posix() for p in (project / ".tepo" / "work").glob("*")]


def wait_for(condition, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


SLEEP = (
    "import os, subprocess, sys, time, pathlib\n"
    "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
    "pathlib.Path('pids').write_text(f'{os.getppid()} {os.getpid()} {worker.pid}')\ntime.sleep(120)"
)


def sleeping(project: Path) -> list[int]:
    """PIDs of runner, kernel and the kernel's worker, once they are at work."""
    text = wait_for(lambda: (project / "pids").is_file() and (project / "pids").read_text())
    return [int(pid) for pid in text.split()]


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def validated(project: Path) -> None:
    """Mark params.yaml as validated, as the first stage does, so that subprocesses need no torch."""
    from tepo_core.pipeline.parameters import _key

    (project / ".tepo").mkdir(exist_ok=True)
    (project / ".tepo" / "validated").write_text(_key(project / "params.yaml"))
