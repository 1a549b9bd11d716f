"""The main numbers in the terminal, read from what the analysis wrote. No torch, no pandas: it must be quick."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tepo_core.pipeline.inputs import RecordError

COLUMNS = {
    "accuracy": "accuracy",
    "gain": "over base",
    "pass_max": "pass@max",
    "entropy_end": "entropy",
    "rollouts_to_target": "rollouts to target",
}


def show(root: Path) -> None:
    """Print the report's path and a table. Raises :class:`RecordError` when there is no finished study."""
    from rich.console import Console
    from rich.table import Table

    rows, about = _read(root, "headline.json"), _read(root, "analysis.json")
    report = root / "reports" / "index.html"
    if not report.is_file():
        raise RecordError("reports/index.html: no report yet; run 'make repro'")
    table = Table(title=f"profile {about['profile']}, seeds {', '.join(map(str, about['seeds']))}")
    for name in ("task", "method", *COLUMNS.values()):
        words = name in ("task", "method")
        table.add_column(name, justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(row["task"], row["method"], *(cell(row, name) for name in COLUMNS))
    console = Console()
    console.print(table)
    for sentence in about.get("answer", []):
        console.print(sentence, markup=False, highlight=False)
    print(f"Report: {report.relative_to(root)}")


def cell(row: dict[str, Any], name: str) -> str:
    """``0.912 [0.890, 0.934]``; ``62, 3 of 3`` for rollouts and the seeds that got there; a dash where there is no number."""
    value, low, high = row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")
    if value is None:
        return "-"
    if name == "rollouts_to_target":
        return f"{value:.0f}, {row['reached']} of {row['seeds']}" if row.get("reached") else "not reached"
    return f"{value:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def _read(root: Path, name: str) -> Any:
    path = f"reports/analysis/{name}"
    try:
        return json.loads((root / path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: no finished study yet; run 'make repro'") from None
    except ValueError:
        raise RecordError(f"{path}: truncated or not JSON; run 'dvc repro -f analyse'") from None
