"""The ``report`` stage: ``reports/index.html``, one page a notebook, and ``reports/provenance.json``.

The page is one file that loads nothing. What differs between two builds from the same runs (revision, hardware, times)
stands between the comments ``provenance:begin`` and ``provenance:end`` of the page, and in provenance.json."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tepo_core.analysis.book import Book
from tepo_core.analysis.figures.draw import read_book
from tepo_core.analysis.figures.style import inline_svg
from tepo_core.analysis.stage import plain
from tepo_core.config import ConfigError, Study
from tepo_core.files import write_json
from tepo_core.report import sections, tables
from tepo_core.report.method_cards import method_cards
from tepo_core.report.notebooks import NotebookPages, Page, executed_notebooks
from tepo_core.report.provenance import collect
from tepo_core.report.tokens import token_view
from tepo_core.runs.folder import RUN_KINDS, declared_runs
from tepo_core.runs.read import load_runs

HERE = Path(__file__).parent
MOST_BYTES = 8 * 2**20
"""The page stays below this, so that it can be mailed and opened on a phone."""


@dataclass
class ReportFiles:
    """What was written."""

    index: Path
    provenance: Path
    pages: list[Path]

    @property
    def size(self) -> int:
        """Bytes of the page."""
        return self.index.stat().st_size


def build_report(study: Study, root: Path, analysis_dir: Path | None = None, out: Path | None = None) -> ReportFiles:
    """Write the report from what ``analyse`` wrote.

    Raises :class:`ConfigError` where there is no analysis, or it was made with other tasks, methods or seeds than declared."""
    analysis_dir, out = analysis_dir or root / "reports" / "analysis", out or root / "reports"
    book = read_book(study, analysis_dir)
    facts = json.loads((analysis_dir / "analysis.json").read_text(encoding="utf-8"))
    missing = [m for m in study.methods if m not in facts["methods"]]
    if facts["profile"] != study.profile or missing:
        raise ConfigError(
            f"{analysis_dir}: made for profile {facts['profile']} with methods {', '.join(facts['methods'])}; "
            "params.yaml says profile "
            f"{study.profile} with {', '.join(study.methods)}: run 'dvc repro analyse' first"
        )
    out.mkdir(parents=True, exist_ok=True)
    environment = make_environment()
    css = (HERE / "assets" / "report.css").read_text(encoding="utf-8")
    pages = executed_notebooks(root, wanted_runs(study))
    provenance = collect(study, root)
    context = page_context(study, root, book, facts, analysis_dir, pages) | {
        "css": css,
        "js": (HERE / "assets" / "report.js").read_text(encoding="utf-8"),
        "provenance": sections.provenance_rows(provenance),
    }
    html = environment.get_template("report.html.j2").render(context)
    index = out / "index.html"
    index.write_text(html, encoding="utf-8")
    if index.stat().st_size > MOST_BYTES:
        raise ConfigError(
            f"{index}: {index.stat().st_size} bytes, more than the {MOST_BYTES} a report may have; use fewer methods or tasks"
        )
    write_json(out / "provenance.json", plain(provenance))
    return ReportFiles(index, out / "provenance.json", write_pages(pages, out / "notebooks", environment, css))


def make_environment() -> Environment:
    """Templates: undefined names raise, everything is escaped unless marked safe."""
    return Environment(
        loader=FileSystemLoader(HERE / "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def wanted_runs(study: Study) -> dict[str, set[str]]:
    """Stage -> folder names of the declared runs."""
    return {kind: {run.name for run in declared_runs(study, kind)} for kind in RUN_KINDS}


def write_pages(pages: list[Page], folder: Path, environment: Environment, css: str) -> list[Path]:
    """One HTML page a notebook; pages of runs that are no longer declared disappear."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    exporter = NotebookPages(environment, css)
    written = []
    for page in pages:
        path = folder / page.file
        path.write_text(exporter.page(page.source, f"{page.group} {page.name}".strip()), encoding="utf-8")
        written.append(path)
    return written


def page_context(
    study: Study, root: Path, book: Book, facts: dict[str, Any], analysis_dir: Path, pages: list[Page]
) -> dict[str, Any]:
    """Everything the page shows but styles and provenance."""
    claims = json.loads((analysis_dir / "claims.json").read_text(encoding="utf-8"))
    headline = pd.read_csv(analysis_dir / "headline.csv")
    runs = load_runs(study, root)
    figures = [{**f, "svg": read_figure(analysis_dir, f)} for f in facts["figures"]]
    downloads = {path.stem: path.read_text(encoding="utf-8") for path in sorted((analysis_dir / "tables").glob("*.csv"))}
    shown = [
        tables.runs(book),
        tables.gains(book),
        tables.evaluation(book),
        tables.pairs(book),
        tables.mechanism(book),
        tables.credit(book),
    ]
    return {
        "study": study,
        "facts": facts,
        "book": book,
        "lead": sections.lead(study, facts),
        "headlines": [tables.headline(headline, book, task) for task in book.tasks],
        "claims": sections.claim_views(claims),
        "claim_counts": sections.count_verdicts(claims),
        "problems": [f for f in facts["findings"] if f["kind"] in ("missing", "broken", "orphan")],
        "notes": [f for f in facts["findings"] if f["kind"] == "note"],
        "figures": [(task, [f for f in figures if f["task"] == task and f["name"] != "sensitivity"]) for task in book.tasks],
        "sensitivity_figures": [f for f in figures if f["name"] == "sensitivity"],
        "tables": [t for t in shown if t is not None and t.rows],
        "sensitivity": sections.sensitivity(book, study),
        "chance_note": sections.chance_note(book, study),
        "downloads": {**downloads, "headline": (analysis_dir / "headline.csv").read_text(encoding="utf-8")},
        "tokens": token_view(runs, book.tasks, root / "data" / "prepared"),
        "paper": sections.paper_table(root, book),
        "data": sections.data_tables(root, study),
        "methods": method_cards(book, facts["objectives"]),
        "settings": sections.setting_rows(study),
        "pages": [(group, [p for p in pages if p.group == group]) for group in dict.fromkeys(p.group for p in pages)],
        "checklist": sections.checklist(study, facts, claims, book),
    }


def read_figure(analysis_dir: Path, figure: dict) -> str:
    """The figure as inline SVG, labelled with its alt text."""
    svg = (analysis_dir / "figures" / f"{figure['file']}.svg").read_text(encoding="utf-8")
    return inline_svg(svg, figure["file"], figure["alt"])
