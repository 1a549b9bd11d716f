"""Exact resume: the last two states of a run, each written whole or not at all, outside DVC's outputs.

All randomness is derived from labels (:mod:`tepo_core.seeding`), so a state is: policy, optimiser, counters, and how long each
growing file was and how it ended. Files that grew after the state was saved are cut back to that length when the run continues. A
state that cannot be read, or whose files are shorter or end otherwise, is not continued: the one before it is, or the run starts anew.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from tepo_core.config import digest
from tepo_core.progress import Progress

PACKAGE = Path(__file__).parents[1]
ELSEWHERE = ("report", "analysis", "pipeline", "commands", "integrations")  # rooms that decide no number of a run
STATE, PREVIOUS = "state.pt", "state.previous.pt"
PARTIAL = STATE + ".partial"
TAIL = 2**16  # bytes at the end of a growing file that are compared


class TornError(ValueError):
    """A state, or a file that grew beside it, is not what was saved."""


class CheckpointError(RuntimeError):
    """The checkpoint folder is in use, or cannot be written."""


def code_hash() -> str:
    """Hash of the sources that decide a run's numbers, so that a checkpoint of older code is never continued."""
    kept = [p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in ELSEWHERE]
    joined = hashlib.sha256()
    for path in kept:
        joined.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return joined.hexdigest()[:16]


class Workspace:
    """The working folder of one run: growing files, parts, and the last good state. Held by one process at a time.

    ``key`` must name everything that decides the run (parameters, inputs); the code's hash is added."""

    def __init__(self, root: Path, name: str, key: Any) -> None:
        self.folder = root / ".tepo" / "checkpoints" / f"{name}-{digest([key, code_hash()])}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(str(self.folder) + ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise CheckpointError(
                f"{name}: another process is running it (lock {self._lock.lock_file}); wait for it or stop it first"
            ) from None

    def load(self) -> dict[str, Any] | None:
        """The last state that is whole, with growing files cut back to it; None (and a clean folder) when there is none."""
        for name in (STATE, PREVIOUS):
            try:
                state = self._read(self.folder / name)
            except TornError as error:
                Progress(0, self.folder.name).line(f"{error}; this state is not continued")
                continue
            if state is not None:
                self._go_back(name, state["growing"])
                return state
        for child in self.folder.iterdir():
            shutil.rmtree(child) if child.is_dir() else child.unlink()
        return None

    def _read(self, path: Path) -> dict[str, Any] | None:
        """A state whose growing files are all there; None where there is no such state. Raises :class:`TornError`."""
        if not path.is_file():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            growing = state["growing"]
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
            raise TornError(f"{path.name} cannot be read ({type(error).__name__})") from None
        for name, (length, tail) in growing.items():
            size = (self.folder / name).stat().st_size if (self.folder / name).is_file() else 0
            if size < length:
                raise TornError(f"{name} has {size} bytes, {length} were written before {path.name}")
            if _tail(self.folder / name, length) != tail:
                raise TornError(f"{name} does not end as it did when {path.name} was written")
        return state

    def _go_back(self, name: str, growing: dict[str, Any]) -> None:
        """Make a state the last one: cut growing files back to it, remove what came later."""
        kept = {STATE, *growing, *([PREVIOUS] if name == STATE else [])}
        if name != STATE:
            os.replace(self.folder / name, self.folder / STATE)
        for child in self.folder.iterdir():
            if child.name not in kept:
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            elif child.name in growing:
                os.truncate(child, growing[child.name][0])

    def save(self, state: dict[str, Any]) -> None:
        """Put growing files on the disk, then the state beside them. A full disk leaves the last good one.

        Raises :class:`CheckpointError`."""
        path, partial, previous = self.folder / STATE, self.folder / PARTIAL, self.folder / PREVIOUS
        files = [p for p in self.folder.iterdir() if p.is_file() and p.name not in (STATE, PARTIAL, PREVIOUS)]
        try:
            previous.unlink(missing_ok=True)  # never three at a time: a state of a large model is large
            for file in files:
                _sync(file)
            growing = {p.name: (p.stat().st_size, _tail(p, p.stat().st_size)) for p in files}
            with open(partial, "wb") as file:
                torch.save({**state, "growing": growing}, file)
                file.flush()
                os.fsync(file.fileno())
            if path.is_file():
                os.replace(path, previous)
            os.replace(partial, path)
            _sync(self.folder)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
            raise self._unwritten(error) from error

    def _unwritten(self, error: Exception) -> CheckpointError:
        """What to say of a state that could not be written. What there is of it goes."""
        with contextlib.suppress(OSError):
            (self.folder / PARTIAL).unlink(missing_ok=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(self.folder).free < 2**20
        reason = "no space left on the disk" if full else str(error).splitlines()[0]
        return CheckpointError(
            f"{self.folder / STATE}: the checkpoint could not be written ({reason}); the last good one is kept: free space, "
            "then run the same command again to continue from it"
        )

    def append(self, name: str, text: str) -> None:
        """Append to a growing file and hand it to the operating system."""
        with open(self.folder / name, "a", encoding="utf-8") as file:
            file.write(text)

    def release(self, remove: bool) -> None:
        """Give the lock back; ``remove`` deletes the folder of a finished run."""
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()
        if remove:
            Path(self._lock.lock_file).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _tail(path: Path, length: int) -> int:
    """CRC-32 of the last :data:`TAIL` of a file's first ``length`` bytes."""
    with open(path, "rb") as file:
        file.seek(max(0, length - TAIL))
        return zlib.crc32(file.read(min(TAIL, length)))
