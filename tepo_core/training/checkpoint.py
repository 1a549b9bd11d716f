"""Exact resume: one state file a run, replaced atomically, outside DVC's outputs.

All randomness is derived from labels (:mod:`tepo_core.seeding`), so a state is: policy, optimiser, counters, and how long each
growing file was. Files that grew after the state was saved are cut back to that length when the run continues.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from tepo_core.config import digest

STATE = "state.pt"


class CheckpointError(RuntimeError):
    """The checkpoint folder is in use, or cannot be written."""


def code_hash() -> str:
    """Hash of the sources that decide a run's numbers, so that a checkpoint of older code is never continued."""
    package = Path(__file__).parent
    kept = [
        p for p in sorted(package.rglob("*.py")) if p.relative_to(package).parts[0] not in ("report", "analysis", "pipeline")
    ]
    joined = hashlib.sha256()
    for path in kept:
        joined.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
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
        """The last good state, with growing files cut back to it; None (and a clean folder) when there is none."""
        path = self.folder / STATE
        if not path.is_file():
            for child in self.folder.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            return None
        state = torch.load(path, map_location="cpu", weights_only=True)
        for child in self.folder.iterdir():
            if child.name == STATE:
                continue
            if child.name not in state["lengths"]:
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            else:
                os.truncate(child, state["lengths"][child.name])
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state in one rename. A full disk leaves the last good one. Raises :class:`CheckpointError`."""
        path, partial = self.folder / STATE, self.folder / (STATE + ".partial")
        skip = (STATE, partial.name)
        lengths = {p.name: p.stat().st_size for p in self.folder.iterdir() if p.is_file() and p.name not in skip}
        try:
            with open(partial, "wb") as file:
                torch.save({**state, "lengths": lengths}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
            partial.unlink(missing_ok=True)
            full = getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(self.folder).free < 2**20
            reason = "no space left on the disk" if full else str(error).splitlines()[0]
            raise CheckpointError(
                f"{path}: the checkpoint could not be written ({reason}); the last good one is kept: free space, "
                "then run the same command again to continue from it"
            ) from error

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
