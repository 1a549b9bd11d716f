"""JSON with equal bytes for equal values, and hashes of files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write JSON with sorted keys, one item a line."""
    path.write_text(json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


