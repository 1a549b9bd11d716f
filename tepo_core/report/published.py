"""Numbers that papers report, read from ``data/published.yaml``: shown beside our own, never mixed with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tepo_core.tasks.benchmark_table import BENCHMARKS
from tepo_core.tasks.problem import DataError

NEEDED = ("id", "paper", "source", "model", "protocol", "confidence", "sets", "rows")
CONFIDENCE = ("high", "medium", "low")
# The papers' "AMC" is the 83-problem set of 2022 and 2023 in the evaluation suites they use.
OURS = {"amc": "amc83"}


def read_published(path: Path) -> dict[str, Any]:
    """The file, checked. Raises :class:`DataError` naming the table and row at fault."""
    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; restore it with git") from None
    except YAMLError as error:
        raise DataError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    for entry in content.get("tables", []):
        where = f"{path}, table {entry.get('id')!r}"
        missing = [key for key in NEEDED if not entry.get(key)]
        if missing:
            raise DataError(f"{where}: {missing[0]!r} is missing; a number without its source and setting is not shown")
        if entry["confidence"] not in CONFIDENCE:
            raise DataError(f"{where}: confidence = {entry['confidence']!r}; allowed: {', '.join(CONFIDENCE)}")
        for row in entry["rows"]:
            cells = row.get("cells", [])
            if len(cells) != len(entry["sets"]) or not all(isinstance(c, (int, float)) and 0 <= c <= 100 for c in cells):
                raise DataError(f"{where}, row {row.get('label')!r}: needs {len(entry['sets'])} cells in per cent, has {cells}")
    return content


def published_table(published: Mapping[str, Any], ours: Mapping[tuple[str, str], float] | None = None) -> pd.DataFrame:
    """One row a published row: source, model, confidence, cells in per cent, their plain mean, and the average as printed.

    ``ours`` maps (method, set) to our accuracy in [0, 1]; where it has an entry, a second row follows with our cells. The
    mean is given for whole rows only."""
    rows = []
    for entry in published["tables"]:
        for row in entry["rows"]:
            cells = dict(zip(entry["sets"], row["cells"], strict=True))
            rows.append(
                {
                    "method": row["label"],
                    "whose": "published",
                    "model": entry["model"],
                    **cells,
                    "mean of cells": float(np.mean(row["cells"])),
                    "printed average": row.get("printed_average"),
                    "source": entry["source"],
                    "confidence": entry["confidence"],
                }
            )
            found = {name: (ours or {}).get((row["method"], OURS.get(name, name))) for name in entry["sets"]}
            if any(value is not None for value in found.values()):
                mine = {name: None if value is None else 100 * value for name, value in found.items()}
                whole = None if None in mine.values() else float(np.mean(list(mine.values())))
                rows.append({"method": row["label"], "whose": "this study", **mine, "mean of cells": whole})
    frame = pd.DataFrame(rows)
    last = ["mean of cells", "printed average", "source", "confidence"]
    return frame[[name for name in frame.columns if name not in last] + last]


def our_cells(runs: Path) -> dict[tuple[str, str], float]:
    """(method, set) -> accuracy in [0, 1] of this study's evaluated runs, mean over seeds: avg@n where a set was sampled, else
    greedy. ``runs`` is the folder of evaluated runs; sets that are not in the table of problem sets are left out."""
    found: dict[tuple[str, str], list[float]] = {}
    for path in sorted(runs.glob("*/summary.json")):
        config = path.with_name("config.json")
        if not config.is_file():
            continue
        method = json.loads(config.read_text(encoding="utf-8")).get("method")
        for split, numbers in json.loads(path.read_text(encoding="utf-8"))["splits"].items():
            value = numbers["avg"] if numbers["samples"] else numbers["greedy"]
            if split in BENCHMARKS and value is not None:
                found.setdefault((method, split), []).append(value)
    return {key: float(np.mean(values)) for key, values in found.items()}
