"""The study's figures: the list of them, and writing them as SVG and PNG with their words.

``python -m tepo_core.analysis.figures NAME`` draws one again from the tables of ``reports/analysis``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib
import pandas as pd

from tepo_core.analysis.book import Book
from tepo_core.analysis.figures import mechanism as mechanism
from tepo_core.analysis.figures import outcome as outcome
from tepo_core.analysis.figures.canvas import RC
from tepo_core.analysis.figures.parts import Drawing
from tepo_core.analysis.figures.style import render, stamp
from tepo_core.config import ConfigError, Study, find_root, load_study

FIGURES: dict[str, Callable[[Book, str], Drawing | None]] = {
    "final_accuracy": outcome.final_accuracy,
    "learning_curves": outcome.learning_curves,
    "entropy_curves": outcome.entropy_curves,
    "pass_at_k": outcome.pass_at_k,
    "rollouts_to_target": outcome.rollouts_to_target,
    "entropy_law": outcome.entropy_law,
    "stability": mechanism.stability,
    "ratio_and_clip": mechanism.ratio_and_clip,
    "mask": mechanism.mask,
    "credit": mechanism.credit,
    "surprise": mechanism.surprise,
    "facts": mechanism.facts,
    "sensitivity": mechanism.sensitivity,
}
"""In the order of the report. Each draws one task, or returns ``None`` where the runs hold nothing to draw."""


def draw_all(book: Book, out: Path, names: Iterable[str]) -> list[dict]:
    """Draw the named figures of every task into ``out`` and return their descriptions, in order.

    Raises :class:`ConfigError` for an unknown name."""
    unknown = sorted(set(names) - set(FIGURES))
    if unknown:
        raise ConfigError(f"figure {unknown[0]!r} is unknown; allowed: {', '.join(FIGURES)}")
    out.mkdir(parents=True, exist_ok=True)
    described = []
    for name in names:
        for task in book.tasks:
            with matplotlib.rc_context(RC):
                drawing = FIGURES[name](book, task)
            if drawing is None:
                continue
            stamp(drawing.figure, book.study)
            svg, png = render(drawing.figure)
            file = f"{name}-{task}"
            (out / f"{file}.svg").write_bytes(svg)
            (out / f"{file}.png").write_bytes(png)
            described.append(
                {
                    "name": name,
                    "task": task,
                    "file": file,
                    "title": drawing.title,
                    "caption": drawing.caption,
                    "alt": drawing.alt,
                    "command": f"python -m tepo_core.analysis.figures {name}",
                }
            )
    return described


TABLES = (
    "runs", "methods", "pairs", "evaluation", "gains", "times", "fell_by_surprise", "tokens_by_kind", "credit_prediction",
)  # fmt: skip


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables that figures are drawn from, as ``analyse`` wrote them: nine digits, so a figure drawn again is the same."""
    paths = {name: folder / "tables" / f"{name}.csv" for name in TABLES}
    tables = {name: pd.read_csv(path) for name, path in paths.items() if path.is_file()}
    tables["curves"] = pd.read_parquet(folder / "curves.parquet")
    return tables


def read_book(study: Study, folder: Path) -> Book:
    """The book of a finished analysis. Raises :class:`ConfigError` where there is none."""
    if not (folder / "analysis.json").is_file():
        raise ConfigError(f"{folder}: no analysis here; run 'dvc repro analyse' first")
    facts = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
    return Book(study, facts["tasks"], facts["methods"], read_tables(folder), facts["presets"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Draw figures again from the tables of the analysis.")
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--out", type=Path, help="folder to write to (default: reports/analysis/figures)")
    options = parser.parse_args(arguments)
    root = find_root()
    folder = root / "reports" / "analysis"
    try:
        book = read_book(load_study(root / "params.yaml"), folder)
        for figure in draw_all(book, options.out or folder / "figures", options.names or FIGURES):
            print(f"{figure['file']}.svg: {figure['alt']}")
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
