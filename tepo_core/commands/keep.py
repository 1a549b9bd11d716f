"""Keep the record of a finished study in the repository, and make the README's results from it.

A record holds parameters, metrics, summaries, analysis and report of every run, and no weights, no samples. So every number of the
README can be traced to a file that is committed beside it.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

from tepo_core.commands.headline import cell
from tepo_core.pipeline.inputs import RecordError
from tepo_core.pipeline.parameters import load_validated
from tepo_core.pipeline.stages import all_runs
from tepo_core.runs.folder import DONE, NOTEBOOK, is_done
from tepo_core.runs.metrics import METRICS_FILE

SMALL = ("config.json", "summary.json", DONE)
BEGIN, END = "<!-- results: written by 'tepo readme' from {record} -->", "<!-- end of results -->"
MARKED = re.compile(r"<!-- results: written by 'tepo readme' from (\S+) -->.*?<!-- end of results -->", re.DOTALL)
COLUMNS = {
    "method": "method",
    "accuracy": "accuracy",
    "gain": "over the base",
    "difference": "over GRPO",
    "greedy": "greedy",
    "pass_max": "pass@max k",
    "entropy_end": "entropy at the end",
    "rollouts_to_target": "rollouts to target",
}


def keep(root: Path, name: str) -> Path:
    """Copy the record of the finished study to ``records/<name>``, in place of an older one.

    Raises :class:`RecordError` when a declared run or the report is missing."""
    study = load_validated(root / "params.yaml")
    runs = [run for run in all_runs(study) if run.folder.parts[0] == "runs"]
    missing = [run.folder for run in runs if not is_done(root / run.folder)]
    if missing or not (root / "reports" / "index.html").is_file():
        raise RecordError(
            f"the study is not finished: {missing[0] if missing else 'reports/index.html'} is missing; run 'make repro'"
        )
    out, fresh = root / "records" / name, root / "records" / f".{name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    for run in runs:
        target = fresh / run.folder
        target.mkdir(parents=True)
        for file in SMALL:
            if (root / run.folder / file).is_file():
                shutil.copy(root / run.folder / file, target / file)
        metrics = root / run.folder / METRICS_FILE
        if metrics.is_file():
            (target / f"{METRICS_FILE}.gz").write_bytes(gzip.compress(metrics.read_bytes(), mtime=0))
    shutil.copytree(root / "reports" / "analysis", fresh / "analysis", ignore=shutil.ignore_patterns(NOTEBOOK))
    for file in ("params.yaml", "reports/index.html", "reports/provenance.json"):
        shutil.copy(root / file, fresh / Path(file).name)
    shutil.rmtree(out, ignore_errors=True)
    fresh.rename(out)
    return out


def results(record: Path) -> str:
    """The README's block of results: a table a task, the answer in words, and where it comes from.

    Raises :class:`RecordError` when the record is incomplete."""
    rows, about = _read(record / "analysis" / "headline.json"), _read(record / "analysis" / "analysis.json")
    where = "/".join(record.parts[-2:])
    lines = [BEGIN.format(record=where), ""]
    for task in dict.fromkeys(row["task"] for row in rows):
        lines += [f"Task `{task}`, profile `{about['profile']}`, seeds {', '.join(map(str, about['seeds']))}:", ""]
        lines += ["| " + " | ".join(COLUMNS.values()) + " |", "|---" * len(COLUMNS) + "|"]
        for row in (row for row in rows if row["task"] == task):
            cells = [row["method"], *(cell(row, name) for name in COLUMNS if name != "method")]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [*(f"{sentence}" for sentence in about.get("answer", [])), "", END]
    return "\n".join(lines)


def write_readme(root: Path) -> bool:
    """Renew every block of results in README.md from the record it names. Returns whether the text changed.

    Raises :class:`RecordError` when README.md has no block."""
    path = root / "README.md"
    text = path.read_text(encoding="utf-8")
    if not MARKED.search(text):
        raise RecordError(f"README.md: no block of results; put {BEGIN.format(record='records/quick')!r} and {END!r} into it")
    new = MARKED.sub(lambda match: results(root / match[1]), text)
    path.write_text(new, encoding="utf-8")
    return new != text


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise RecordError(f"{path}: {error}; keep a finished study with 'tepo keep NAME' first") from None
