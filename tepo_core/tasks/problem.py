"""A problem and its file format: JSON Lines, one problem a line, keys sorted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TOKEN_KINDS = ("decisive", "digit", "copied", "format")
"""Kinds of tokens that a task may know (:func:`tepo_core.tasks.data.knows_tokens`): the digits whose fact is planted wrong, other
digits that are computed, what is copied from the prompt or the step before, and the rest."""


class DataError(ValueError):
    """A data file is missing, damaged, or does not hold what it should."""


@dataclass(frozen=True)
class Problem:
    """One verifiable problem.

    ``meta`` keeps what a task knows beyond the answer: the steps of the solution and which of them rest on planted wrong
    knowledge (arithmetic), or subject, level and source (benchmarks)."""

    id: str
    prompt: str
    answer: str
    split: str
    meta: dict[str, Any] = field(default_factory=dict)


def write_problems(path: Path, problems: Iterable[Problem]) -> int:
    """Write problems and return how many."""
    lines = [json.dumps(asdict(problem), sort_keys=True, ensure_ascii=False) for problem in problems]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def read_problems(path: Path) -> list[Problem]:
    """Read problems. Raises :class:`DataError` naming the file and the line that is missing, cut or malformed."""
    if not path.is_file():
        raise DataError(f"{path}: no such data file; run 'dvc repro prepare' to make it")
    text = path.read_text(encoding="utf-8")
    if not text:
        raise DataError(f"{path}: the data file is empty; remove it and run 'dvc repro prepare'")
    problems = []
    for number, line in enumerate(text.split("\n")[:-1] if text.endswith("\n") else text.split("\n"), start=1):
        try:
            problems.append(Problem(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise DataError(
                f"{path}, line {number}: not a problem ({error}); the file is damaged or cut short: "
                "remove it and run 'dvc repro prepare'"
            ) from None
    return problems
