"""JSON with equal bytes for equal values, hashes of files, and the paths that parameters name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys, one item a line."""
    path.write_text(json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or leave it as it was: a full disk must not cut what was there. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_path(text: str | Path, root: Path) -> Path:
    """A path of params.yaml: ``~`` is a user's home, and a relative one starts at the folder of params.yaml (``root``), from wherever
    it is read."""
    path = str(text)
    if path.startswith("~"):
        with contextlib.suppress(
            RuntimeError
        ):  # no such user: the name stays, and whoever opens it says that it does not exist
            path = str(Path(path).expanduser())
    return Path(root).absolute() / path


def source_path(source: str, root: Path) -> Path | None:
    """The folder or GGUF file that ``policy.source`` means; None for a built-in name or a hub id.

    A path begins with ``/``, ``.`` or ``~``, ends with ``.gguf``, or is the name of a folder beside params.yaml."""
    path = local_path(source, root)
    if source.startswith(("/", ".", "~")) or source.endswith(".gguf") or (source != "tiny" and path.is_dir()):
        return path
    return None
