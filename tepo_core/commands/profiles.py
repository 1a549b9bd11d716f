"""Profiles: ``profiles/quick.yaml`` is complete, the others state what differs from it; one is in use as ``params.yaml``."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_core.commands.graft import graft
from tepo_core.config import BASE_PROFILE, ConfigError, Study, load_study, read_values
from tepo_core.files import replace_file


@dataclass(frozen=True)
class Change:
    """One parameter that differs between two files; a side is None where the parameter is absent."""

    name: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.name}: {self.new} (new)"
        return f"{self.name}: {self.old} (removed)" if self.new is None else f"{self.name}: {self.old} -> {self.new}"


def names(root: Path) -> list[str]:
    """Names of all profiles."""
    return sorted(path.stem for path in (root / "profiles").glob("*.yaml"))


def path_of(root: Path, name: str) -> Path:
    """File of a profile. Raises :class:`ConfigError` naming the known ones, or when the complete one is gone."""
    known = names(root)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"unknown profile {name!r}{hint}; allowed: {', '.join(known)}")
    if not (root / "profiles" / BASE_PROFILE).is_file():
        raise ConfigError(f"profiles/{BASE_PROFILE}: no such file; the other profiles state what differs from it")
    return root / "profiles" / f"{name}.yaml"


def purpose(path: Path) -> str:
    """What a profile is for: the second sentence of its first comment line."""
    first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    return first.split("This is the profile", 1)[-1].split(":", 1)[-1].strip().rstrip(".")


def load_profile(root: Path, name: str) -> Study:
    """The complete parameters of a profile. Raises :class:`ConfigError` for an unknown or invalid one."""
    return load_study(path_of(root, name))


def text_of(root: Path, name: str) -> str:
    """A profile as a complete commented parameter file. Raises :class:`ConfigError` for an unknown or invalid profile."""
    path, base = path_of(root, name), root / "profiles" / BASE_PROFILE
    load_study(path)
    own = path.read_text(encoding="utf-8")
    if path.name == base.name:
        return own
    try:
        return graft(base.read_text(encoding="utf-8"), own)
    except ValueError as error:
        raise ConfigError(f"profiles/{path.name}: cannot be put into profiles/{base.name} line by line: {error}") from None


def use(root: Path, name: str) -> list[Change]:
    """Write ``params.yaml`` from a profile; what was there is kept in ``.tepo/params.previous.yaml``.

    Returns the parameters that changed. Raises :class:`ConfigError` for an unknown or invalid profile."""
    text, target = text_of(root, name), root / "params.yaml"
    changes = differences(target, path_of(root, name))
    if target.is_file():
        (root / ".tepo").mkdir(exist_ok=True)
        shutil.copyfile(target, root / ".tepo" / "params.previous.yaml")
    if changes or not target.is_file():
        replace_file(target, text.encode())
    return changes


def differences(old: Path, new: Path) -> list[Change]:
    """Parameters that differ between two files. A file that is missing or not YAML counts as empty."""
    before, after = dict(_flat(_plain(old))), dict(_flat(_plain(new)))
    ordered = [*after, *(name for name in before if name not in after)]
    return [Change(n, before.get(n), after.get(n)) for n in ordered if before.get(n) != after.get(n)]


def _plain(path: Path) -> Any:
    try:
        return read_values(path)
    except (OSError, ConfigError):
        return {}


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, Mapping) and (values or not prefix):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, "null" if values is None else str(values).lower() if isinstance(values, bool) else str(values)
