"""``tepo grade`` and ``tepo score``: what to reach for when a grade looks wrong."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from tepo_core.config import ConfigError
from tepo_core.grading.graders import GRADERS, make_grader
from tepo_core.grading.types import Grade, GradingError, Outcome
from tepo_core.tasks.problem import DataError

if TYPE_CHECKING:  # half of the command's time, and grading does not need it
    import pandas as pd

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Grade answers, score a run again.")


@app.command()
def grade(
    file: Annotated[Path, typer.Argument(help="JSON Lines with gold and prediction, optionally id; - for standard input.")],
    require_boxed: Annotated[bool, typer.Option("--require-boxed", help="Only the last complete \\boxed{} counts.")] = False,
    grader: Annotated[str, typer.Option(help="math, exact (needs the box) or code.")] = "math",
    timeout: Annotated[float, typer.Option(help="Seconds of CPU time a comparison (math) or a program (code).")] = 5.0,
    workers: Annotated[int, typer.Option(help="Processes; 0 for one per core.")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Also: by which rule, what was compared, and why.")] = False,
) -> None:
    """Grade each line and print one JSON line for it: id, outcome, extracted, and the reason of an error or time-out."""
    options: dict[str, Any] = {"require_boxed": require_boxed, "grader": grader, "timeout": timeout, "workers": workers}
    with _faults():
        for line in grade_file(file, explain=explain, **options):
            print(json.dumps(line, sort_keys=True))


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="Folder of an evaluated run, such as runs/evaluate/facts-grpo-s0.")],
    k: Annotated[Optional[str], typer.Option(help="For pass@k and maj@k, such as 1,8,64; left out: the run's own.")] = None,  # noqa: UP045
    grader: Annotated[Optional[str], typer.Option(help="Grade the samples again: exact, math or code.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")] = False,
) -> None:
    """Recompute a run's table from its kept samples. Nothing is sampled, and no file is changed."""
    with _faults():
        summary = score_run(run, k=parse_k(k), grader=grader)
        print(json.dumps(summary, sort_keys=True, indent=1) if as_json else score_table(summary).to_string(na_rep="-"))


def grade_file(
    file: Path,
    *,
    require_boxed: bool = False,
    grader: str = "math",
    timeout: float = 5.0,
    workers: int = 0,
    explain: bool = False,
) -> list[dict[str, Any]]:
    """Grades of a JSON Lines file, one mapping a line: ``id`` (the line's own, else its number), ``outcome``, ``extracted``;
    ``reason`` where the outcome is an error or a time-out; with ``explain`` also the fields of
    :func:`tepo_core.grading.explain.explain`.

    A prediction may be a bare answer or a whole response; with ``require_boxed`` only the last complete box counts. Raises
    :class:`DataError` naming the line, and :class:`GradingError` for ``explain`` of programs, before anything is graded."""
    rows = read_predictions(file)
    if explain:
        from tepo_core.grading.explain import check_explained
        from tepo_core.grading.explain import explain as explanation

        check_explained(grader)
    options: dict[str, Any] = {}
    if grader == "math":
        options = {"require_boxed": require_boxed, "timeout": timeout, "workers": workers}
    elif grader == "code":
        from tepo_core.grading.code_sandbox import Limits

        options = {"limits": Limits(timeout=timeout), "workers": workers}
    judge = make_grader(grader, **options)
    try:
        grades = judge.grade(
            golds=[row["gold"] for row in rows],
            responses=[row["prediction"] for row in rows],
            truncated=[bool(row.get("truncated", False)) for row in rows],
        )
    finally:
        judge.close()
    lines = [_line(row, one) for row, one in zip(rows, grades, strict=True)]
    if explain:
        for line, row, one in zip(lines, rows, grades, strict=True):
            line |= explanation(grader, row["gold"], row["prediction"], one, require_boxed=require_boxed)
    return lines


def _line(row: dict[str, Any], one: Grade) -> dict[str, Any]:
    line = {"id": row["id"], "outcome": one.outcome.value, "extracted": one.extracted}
    if one.reason and one.outcome in (Outcome.ERROR, Outcome.TIMEOUT):
        line["reason"] = one.reason
    return line


def read_predictions(file: Path) -> list[dict[str, Any]]:
    """Lines with ``gold`` and ``prediction`` as strings (numbers are taken as written). Raises :class:`DataError`."""
    name = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{name}: no such file; give a JSON Lines file with 'gold' and 'prediction'") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 ({error})") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: not JSON ({error})") from None
        for key in ("gold", "prediction"):
            value = row.get(key) if isinstance(row, dict) else None
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                row[key] = value = repr(value)
            if not isinstance(value, str):
                raise DataError(f"{place}: the field {key!r} is missing or not text; a line needs 'gold' and 'prediction'")
        if not row["gold"].strip():
            raise DataError(f"{place}: 'gold' is empty; there is nothing to compare with")
        rows.append({"id": number, **row})
    if not rows:
        raise DataError(f"{name}: no lines to grade")
    return rows


def parse_k(text: str | None) -> list[int] | None:
    """``"1,8,64"`` as numbers. Raises ``ValueError`` for an empty, unsorted or repeated list, or anything but whole numbers."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() and int(part) > 0 for part in parts):
        raise ValueError(f"--k {text!r}: give whole numbers of at least 1 separated by commas, such as 1,8,64")
    values = [int(part) for part in parts]
    if values != sorted(set(values)):
        raise ValueError(f"--k {text!r}: must be sorted and without repeats")
    return values


def score_run(run: Path, *, k: list[int] | None = None, grader: str | None = None) -> dict[str, Any]:
    """The summary of an evaluated run, recomputed from ``samples.parquet``; with ``grader`` the samples are graded again first.

    ``k`` left out is taken from the run's ``summary.json``. Raises :class:`DataError` for a folder that is no evaluated run."""
    from tepo_core.evaluation.samples import read_samples, regrade, summarise

    samples = read_samples(run)
    path = run / "summary.json"
    settings: dict[str, Any] = {}
    if path.is_file():
        try:
            settings = json.loads(path.read_text(encoding="utf-8")).get("settings", {})
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: not JSON ({error}); evaluate the run again") from None
    if k is None:
        k = sorted({value for split in settings.values() for value in split.get("k", [])}) or [1]
    if grader is not None:
        if grader not in GRADERS:
            raise GradingError(f"grader = {grader!r} is unknown; allowed: {', '.join(GRADERS)}")
        judge = make_grader(grader)
        try:
            samples = regrade(samples, judge)
        finally:
            judge.close()
    return summarise(samples, k, settings)


def score_table(summary: dict[str, Any]) -> pd.DataFrame:
    """A summary as a table, one column a split."""
    import pandas as pd

    columns = {}
    for split, numbers in summary["splits"].items():
        column = {"problems": numbers["problems"], "samples a problem": numbers["samples"], "greedy": numbers["greedy"]}
        column["avg"] = numbers["avg"]
        column |= {f"pass@{k}": value for k, value in numbers["pass@k"].items()}
        column |= {f"maj@{k}": value for k, value in numbers["maj@k"].items()}
        column |= {name: numbers[name] for name in ("format_rate", "truncation_rate", "mean_length", "entropy")}
        column |= {f"outcome {name}": count for name, count in numbers["outcomes"].items()}
        columns[split] = {name: _shown(value) for name, value in column.items()}
    return pd.DataFrame(columns)


def _shown(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Faults of the input end as the command line's one-line errors."""
    try:
        yield
    except ConfigError:
        raise
    except (DataError, GradingError, ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from None
