"""``tepo plan --why STAGE``: what changed since a stage last ran, file by file, parameter by parameter.

DVC remembers of each dependency the hash it had (dvc.lock). The files of ``build/`` are small, and DVC's cache holds the versions that
it hashed, so that two versions can be compared line by line; a data set or run that changed is named as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_core.config import ConfigError, Study
from tepo_core.pipeline.normalise import write_build
from tepo_core.pipeline.stages import AXES


@dataclass(frozen=True)
class Reason:
    """Why one run of a stage is stale. ``what``: the file, parameter or folder; ``how``: changed, new, gone, or both values."""

    stage: str
    what: str
    how: str


def why(root: Path, study: Study, asked: str) -> tuple[list[str], list[Reason]]:
    """The runs that ``asked`` names (``train``, or one of them: ``train@facts-grpo-0``), and the reasons of those that are stale.

    Raises :class:`ConfigError` for a stage that the study does not have, or while DVC is running."""
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo

    repo = Repo(str(root))
    try:
        with lock_repo(repo):
            write_build(root, study)
            stages = [stage for stage in repo.index.stages if _is(stage.name or "", asked)]
            if not stages:
                known = ", ".join(AXES)
                raise ConfigError(
                    f"--why {asked}: no such stage; allowed: {known}, or one run of them as in dvc.yaml (train@facts-grpo-0)"
                )
            reasons = [reason for stage in stages for reason in _reasons(root, repo, stage)]
    except LockError:
        raise ConfigError("DVC is running in this folder; wait for it to end, then ask again what changed") from None
    finally:
        repo.close()
    return sorted(stage.name for stage in stages), reasons


def _is(name: str, asked: str) -> bool:
    return name == asked or name.partition("@")[0] == asked


def _reasons(root: Path, repo: Any, stage: Any) -> Iterator[Reason]:
    if not any(dep.hash_info for dep in stage.deps):
        yield Reason(stage.name, "the whole stage", "never ran here (dvc.lock does not know it)")
        return
    if stage.changed_stage():
        yield Reason(stage.name, "its command in dvc.yaml", "changed")
    for dep in stage.deps:
        if dep.changed_checksum() if dep.exists else True:
            yield from _differences(root, repo, stage.name, dep)
    for out in stage.outs:
        if out.status():
            yield Reason(stage.name, str(out), "the result is missing or was changed by hand")


def _differences(root: Path, repo: Any, stage: str, dep: Any) -> Iterator[Reason]:
    path = Path(str(dep.def_path))
    if not dep.exists:
        yield Reason(stage, path.as_posix(), "missing")
        return
    before = _remembered(repo, dep)
    if path.parts[0] != "build" or path.suffix != ".json" or before is None:
        note = "changed" if path.suffix != ".json" or before is not None else "changed; what it was is not in DVC's cache"
        yield Reason(stage, path.as_posix(), note)
        return
    now = json.loads((root / path).read_text(encoding="utf-8"))
    for name, (old, new) in compare(before, now).items():
        yield Reason(stage, name, describe(name, old, new))


def _remembered(repo: Any, dep: Any) -> Any:
    """The version of a file that the stage last saw; None when DVC's cache does not have it."""
    if not dep.hash_info or dep.hash_info.isdir:
        return None
    try:
        return json.loads(Path(repo.cache.local.oid_to_path(dep.hash_info.value)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def compare(before: Any, now: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Leaves of two JSON values that differ: dotted name -> (before, now), ``...`` for absent. File names are not split."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {} if before == now else {prefix: (before, now)}
    out: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*before, *now}):
        inner = name if "/" in name or not prefix or prefix == "code" else f"{prefix}.{name}"
        out |= compare(before.get(name, ...), now.get(name, ...), inner)
    return out


def describe(name: str, old: Any, new: Any) -> str:
    """One difference in words. Of a file (its name has a slash) only whether it changed, came or went; hashes tell nobody anything."""
    if new is ...:
        return "gone"
    if old is ...:
        return "new" if "/" in name else f"new: {new}"
    return "changed" if "/" in name else f"{old} -> {new}"
