"""What the runner checks and keeps around a run: complete inputs and outputs, one move into place, timings."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from tepo_core.files import sha256
from tepo_core.pipeline.stages import REPORT_PARTS, Run
from tepo_core.runs.folder import DONE, RunError, finish, read_done

MIN_FREE_BYTES = 200 * 2**20


class RecordError(RuntimeError):
    """An input of a run is missing or was changed, or its output cannot be written or is not complete."""


def check_inputs(root: Path, run: Run) -> None:
    """Every input folder must be complete and unchanged since its stage wrote it. Raises :class:`RecordError`."""
    for folder in run.inputs():
        check_folder(root, folder)


def check_folder(root: Path, folder: Path) -> None:
    """Compare a folder with the hashes in its ``done.json`` (runs) or ``manifest.json`` (data)."""
    stage = {"data": "prepare", "runs": folder.parts[1], "reports": "analyse"}[folder.parts[0]]
    remedy = f"remove {folder} and run 'dvc repro' (or 'tepo run {stage}') to make it again"
    marker = root / folder / ("manifest.json" if stage == "prepare" else DONE)
    if not (root / folder).is_dir():
        raise RecordError(f"{folder}: missing; run the stage '{stage}' first ('dvc repro', or 'tepo run {stage}')")
    try:
        record = json.loads(marker.read_text(encoding="utf-8"))
        hashes = record["sha256" if stage == "prepare" else "files"]
    except FileNotFoundError:
        raise RecordError(f"{folder}: {marker.name} is missing, so it was never finished; {remedy}") from None
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{folder / marker.name}: truncated or not JSON; {remedy}") from None
    if "config.json" in hashes and stage in ("warmup", "train") and not any(n.endswith(".safetensors") for n in hashes):
        raise RecordError(f"{folder}/policy: no weights (*.safetensors) belong to this run; {remedy}")
    for name, expected in hashes.items():
        path = root / folder / name
        if not path.is_file():
            what = "the policy has no weights" if name.endswith(".safetensors") else "missing"
            raise RecordError(f"{folder / name}: {what}; {remedy}")
        if sha256(path) != expected:
            raise RecordError(f"{folder / name}: changed or truncated since '{stage}' wrote it; {remedy}")


def check_space(root: Path) -> None:
    """Refuse to start a run that could not be saved. Raises :class:`RecordError`."""
    free = shutil.disk_usage(root).free
    if free < MIN_FREE_BYTES:
        raise RecordError(
            f"{root}: only {free / 2**20:.0f} MB free on this disk; at least {MIN_FREE_BYTES / 2**20:.0f} MB are needed"
        )


def has_git(root: Path) -> bool:
    """Whether the folder is a git repository or worktree, which DVC needs (one somewhere above it does not count), or DVC was told to
    do without."""
    config = [
        path.read_text(encoding="utf-8") for name in ("config", "config.local") if (path := root / ".dvc" / name).is_file()
    ]
    return (root / ".git").exists() or any(
        re.search(r"^\s*no_scm\s*=\s*true", text, re.MULTILINE | re.IGNORECASE) for text in config
    )


def check_git(root: Path) -> None:
    """Raises :class:`RecordError` where DVC would not run, with what to do."""
    if not has_git(root):
        raise RecordError(
            f"{root}: not a git repository, and DVC needs one (a ZIP download has none); run 'git init' there once, then the same "
            "command again"
        )


def complete(out: Path, run: Run) -> None:
    """Check that the notebook wrote what its stage promises, and mark it done. Raises :class:`RecordError`."""
    if run.stage == "report":
        missing = [part for part in REPORT_PARTS if not (out / part).exists()]
        extra = sorted(path.name for path in out.iterdir() if path.name not in REPORT_PARTS)
        if missing or extra:
            raise RecordError(
                f"the report stage must write exactly {', '.join(REPORT_PARTS)}; missing: {missing}, unknown: {extra}"
            )
        return
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    if not names:
        raise RecordError(f"{run.label}: the notebook ran but wrote nothing")
    try:
        read_done(out)
    except FileNotFoundError:
        if run.stage not in ("prepare", "analyse"):
            raise RecordError(f"{run.label}: the notebook ran but left no done.json, so the run is not complete") from None
        finish(out, names=names)
    except RunError:
        raise RecordError(f"{run.label}: done.json does not say ok, so the run is not complete") from None


def put_in_place(root: Path, run: Run, out: Path) -> None:
    """Move what the run wrote to where it belongs; what was there before is replaced whole or kept whole."""
    if run.stage == "report":
        for part in REPORT_PARTS:
            _replace(out / part, root / run.folder / part)
    else:
        _replace(out, root / run.folder)


def _replace(new: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    old = new.with_name(new.name + ".old")
    if target.exists():
        _move(target, old)
    try:
        _move(new, target)
    except OSError as first:
        try:
            if old.exists():
                _move(old, target)
        except OSError:
            raise first from None  # the first cause, with what was there kept beside it
        raise


def _move(source: Path, target: Path) -> None:
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # Another file system (runs/ on a scratch disk, say): copy beside the target first, then rename.
        partial = target.with_name(f".{target.name}.partial")
        _remove(partial)
        try:
            shutil.copytree(source, partial) if source.is_dir() else shutil.copy2(source, partial)
            os.replace(partial, target)
        except OSError:
            _remove(partial)
            raise


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def record_timing(root: Path, run: Run, profile: str, seconds: float) -> None:
    """Remember how long a run took and how large it is, for ``tepo plan``. Not tracked by git or DVC."""
    from filelock import FileLock

    path = root / ".tepo" / "timings" / f"{run.stage}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        runs = read_timings(root, run.stage)
        size = sum(p.stat().st_size for p in (root / run.folder).rglob("*") if p.is_file())
        runs[run.name or run.stage] = {"profile": profile, "seconds": round(seconds, 2), "bytes": size}
        total = sum(entry["seconds"] for entry in runs.values() if entry["profile"] == profile)
        partial = path.with_suffix(".partial")
        text = json.dumps({"seconds": round(total, 2), "runs": runs}, indent=1, sort_keys=True)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)


def read_timings(root: Path, stage: str) -> dict[str, dict[str, Any]]:
    """Recorded timings of a stage by run name; empty when there are none or the file is broken."""
    try:
        return json.loads((root / ".tepo" / "timings" / f"{stage}.json").read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError):
        return {}


def explain_os_error(error: OSError) -> str:
    """An operating-system error as one line that says what to do."""
    hints = {
        errno.ENOSPC: "no space left on the disk; free some and run the same command again",
        errno.EDQUOT: "the disk quota is used up; free some and run the same command again",
        errno.EACCES: "no permission to write there; change its owner or mode, or clone into a folder of your own",
        errno.EPERM: "no permission to write there; change its owner or mode, or clone into a folder of your own",
        errno.EROFS: "the file system is read-only; clone into a folder that can be written",
    }
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):  # of a whole folder: the first cause
        source, target, reason = error.args[0][0]
        number = re.search(r"\[Errno (\d+)\]", str(reason))
        error = OSError(int(number[1]) if number else 0, str(reason), str(target))
    where = f"{error.filename}: " if error.filename else ""
    return where + hints.get(error.errno or 0, error.strerror or str(error))
