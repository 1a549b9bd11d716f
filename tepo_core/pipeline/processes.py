"""Locks and parents: one process a run, and none that outlives the one that wanted it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from tepo_core.pipeline.stages import Run

POLL_SECONDS = 0.3
REPRO = "TEPO_REPRO_PID"  # environment variable: the 'tepo repro' that started DVC
WAIT_SECONDS = 10.0  # a killed run's kernel and lock are gone well within this


class LockError(RuntimeError):
    """Another process holds the lock of a run."""


@contextmanager
def run_lock(root: Path, run: Run, wait: float = WAIT_SECONDS) -> Iterator[None]:
    """Hold the lock of a run. The operating system frees it when the holder dies, however it dies.

    Waits up to ``wait`` seconds for a predecessor that is just ending. Raises :class:`LockError` naming the holder."""
    folder = root / ".tepo" / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock, note = FileLock(folder / f"{run.slug}.lock"), folder / f"{run.slug}.json"
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        pid = holder(note)
        who = f"process {pid}" if pid else "another process"
        raise LockError(
            f"{run.label}: {who} is running it already; wait for it, or end it" + (f" with 'kill {pid}'" if pid else "")
        ) from None
    try:
        note.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def holder(note: Path) -> int | None:
    """PID in the note beside a lock, when that process lives."""
    try:
        pid = int(json.loads(note.read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if psutil.pid_exists(pid) else None


def held_locks(root: Path) -> dict[str, int]:
    """Runs in progress: name of the lock, PID of its holder."""
    notes = sorted((root / ".tepo" / "locks").glob("*.json"))
    return {note.stem: pid for note in notes if (pid := holder(note))}


def dvc_ancestors() -> list[psutil.Process]:
    """The chain of processes from this one's parent up to DVC; empty when DVC did not start it."""
    chain: list[psutil.Process] = []
    for process in psutil.Process().parents():
        chain.append(process)
        if is_dvc(process):
            return chain
    return []


def is_dvc(process: psutil.Process) -> bool:
    """Whether a process is a DVC command (``dvc``, ``python .../bin/dvc`` or ``python -m dvc``)."""
    try:
        words = process.cmdline()[:3]
    except psutil.Error:
        return False
    return any(Path(word).name == "dvc" for word in words)


def end_with_dvc() -> None:
    """Send this process SIGTERM as soon as DVC, a shell between, or the 'tepo repro' above it is gone.

    A DVC that is killed does not end its stages, and a 'tepo repro' that is killed does not end DVC."""
    chain = dvc_ancestors()
    if pid := os.environ.get(REPRO):
        try:
            chain.append(psutil.Process(int(pid)))
        except (psutil.NoSuchProcess, ValueError):
            os.kill(os.getpid(), signal.SIGTERM)
    if chain:
        _end_when(lambda: not all(_lives(process) for process in chain))


def end_with_parent() -> None:
    """Send this process SIGTERM as soon as its parent is gone."""
    parent = os.getppid()
    _end_when(lambda: os.getppid() != parent)


def _end_when(lost: Callable[[], bool]) -> None:
    def watch() -> None:
        while not lost():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def orphans(root: Path) -> list[psutil.Process]:
    """Runners and kernels of this project that nobody waits for any more."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if not any(word.startswith("tepo_core.pipeline.") for word in line) or Path(process.cwd()) != root:
                continue
            parents = process.parents()
            if "tepo_core.pipeline.kernel" in line:
                lost = not parents or not any("python" in p.name() for p in parents[:1])
            elif "tepo_core.pipeline.host" in line:  # the host, its runners and their kernels: none outlives 'tepo repro'
                lost = not psutil.pid_exists(int(line[line.index("tepo_core.pipeline.host") + 2]))
            else:
                ours = "tepo_core.pipeline.runner" in line or "tepo_core.pipeline.launch" in line
                lost = ours and "DVC_STAGE" in process.environ() and not any(map(is_dvc, parents))
            if lost:
                found.append(process)
        except psutil.Error:
            continue
    return found
