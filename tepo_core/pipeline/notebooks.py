"""Notebook sources without what JupyterLab changes, so that opening and running a notebook never makes a stage stale."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

# jsonschema tries this optional package for one string format that notebooks do not use; its import compiles a grammar
# for three seconds. A stage runs in seconds, and there are dozens of them.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

import nbformat  # noqa: E402
from nbformat import NotebookNode  # noqa: E402

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
TYPES = {"str": str, "int": int, "float": float, "bool": bool}


class NotebookError(ValueError):
    """A notebook is not one that the runner can execute: unreadable, or without a proper parameters cell."""


def read_notebook(path: Path) -> NotebookNode:
    """Read a version 4 notebook. Raises :class:`NotebookError` naming the file."""
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise NotebookError(f"{path}: no such notebook") from None
    except Exception as error:  # nbformat raises several kinds for broken files
        raise NotebookError(f"{path}: not a readable notebook: {str(error).splitlines()[0][:200]}") from None


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Sources, cell types, tags and attachments; fixed ids and kernel; no outputs, counts, other metadata or empty cells."""
    cells = []
    for cell in notebook.cells:
        source = cell.source.rstrip()
        if not source:
            continue
        tags = sorted(cell.metadata.get("tags", []))
        kept = {
            "cell_type": cell.cell_type,
            "id": f"cell-{len(cells):02d}",
            "metadata": {"tags": tags} if tags else {},
            "source": source,
        }
        if cell.cell_type == "code":
            kept |= {"execution_count": None, "outputs": []}
        if cell.get("attachments"):
            kept["attachments"] = cell.attachments
        cells.append(kept)
    metadata = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    return nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def to_text(notebook: NotebookNode) -> str:
    """The notebook as JSON, always with the same bytes."""
    return nbformat.writes(notebook, indent=1, ensure_ascii=False) + "\n"


def declared_parameters(notebook: NotebookNode, name: str) -> dict[str, type]:
    """Names and types of the cell tagged ``parameters``: lines like ``seed: int | None = None`` and comments, nothing else.

    Raises :class:`NotebookError` when there is not exactly one such cell, or it holds anything else."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or tagged[0].cell_type != "code":
        raise NotebookError(f"{name}: {len(tagged)} code cells are tagged 'parameters'; exactly one is needed")
    try:
        lines = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise NotebookError(f"{name}: the parameters cell is not valid Python (line {error.lineno}): {error.msg}") from None
    declared = {}
    for line in lines:
        kind = ast.unparse(line.annotation).removesuffix(" | None") if isinstance(line, ast.AnnAssign) else None
        if kind not in TYPES or not isinstance(line.target, ast.Name) or not isinstance(line.value, ast.Constant):
            raise NotebookError(
                f"{name}: in the parameters cell, {ast.unparse(line)!r} is not of the form 'seed: int | None = None'; "
                f"allowed types: {', '.join(TYPES)}"
            )
        declared[line.target.id] = TYPES[kind]
    return declared


def check_parameters(declared: dict[str, type], given: dict[str, Any], name: str) -> None:
    """Raise :class:`NotebookError` for a parameter that the notebook does not declare, or of another type."""
    for parameter, value in given.items():
        if parameter not in declared:
            raise NotebookError(
                f"{name}: unknown parameter {parameter!r} = {value!r}; it declares: {', '.join(declared) or 'none'}"
            )
        if type(value) is not declared[parameter]:
            raise NotebookError(
                f"{name}: parameter {parameter!r} = {value!r} is {type(value).__name__}; "
                f"allowed: {declared[parameter].__name__}"
            )
