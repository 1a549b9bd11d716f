"""The ``analyse`` stage: runs in, tables, verdicts, figures and metrics out. Equal inputs give equal bytes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from IPython.display import Image

from tepo_core.analysis import tables as tab
from tepo_core.analysis.answer import answer, between, credit_sentences, headline_table, number, sentences
from tepo_core.analysis.book import Book, is_evidence
from tepo_core.analysis.claims import Verdict, claims_table, judge, load_claims
from tepo_core.analysis.credit import credit_tables
from tepo_core.analysis.figures.draw import FIGURES, draw_all, read_tables
from tepo_core.analysis.gains import gains_table
from tepo_core.analysis.summaries import run_table
from tepo_core.analysis.times import times_table
from tepo_core.config import ConfigError, Study
from tepo_core.files import write_json
from tepo_core.runs.read import RunSet, load_runs


@dataclass
class Analysis:
    """What ``analyse`` found; everything in it is also on disk below ``out``."""

    study: Study
    out: Path
    runs: RunSet
    headline: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    verdicts: list[Verdict]
    figures: list[dict]

    def verdict_table(self) -> pd.DataFrame:
        """Claim, verdict and reason, one row a claim."""
        rows = [{"claim": v.claim.title, "verdict": v.verdict, "because": v.reason} for v in self.verdicts]
        return pd.DataFrame(rows).set_index("claim")

    def headline_shown(self) -> pd.DataFrame:
        """The headline table in short: estimate with interval as text, one row a task and method."""
        shown = {"accuracy": False, "gain": True, "difference": True, "pass_max": False, "entropy_kept": False}
        rows = []
        for row in self.headline.to_dict("records"):
            text = {n: number(row[n], sign=s) + between(row[f"{n}_low"], row[f"{n}_high"], sign=s) for n, s in shown.items()}
            rows.append({"task": row["task"], "method": row["method"], **text})
        return pd.DataFrame(rows).set_index(["task", "method"])

    def picture(self, name: str, task: str | None = None) -> Image:
        """One figure for a notebook; ``task`` defaults to the first. Raises :class:`ConfigError` for one that was not drawn."""
        for figure in self.figures:
            if figure["name"] == name and task in (None, figure["task"]):
                return Image(data=(self.out / "figures" / f"{figure['file']}.png").read_bytes(), alt=figure["alt"], width=900)
        drawn = ", ".join(dict.fromkeys(f["name"] for f in self.figures))
        raise ConfigError(f"figure {name!r} of task {task!r} was not drawn; there are: {drawn}")

    def findings(self) -> pd.DataFrame:
        """Missing, broken and left-over runs, and notes."""
        return pd.DataFrame([asdict(f) for f in self.runs.findings], columns=["kind", "path", "reason", "fix"])


def analyse(study: Study, root: Path, out: Path | None = None, figures: Sequence[str] | None = None) -> Analysis:
    """Read the declared and imported runs below ``root``, and write reports/analysis (or ``out``).

    ``figures``: names of those to draw, all by default.

    Bad or missing runs never stop it; they are named in the result. Raises :class:`ConfigError` where no run can be used."""
    out = out or root / "reports" / "analysis"
    claims = load_claims(root / "claims.yaml")
    runs = load_runs(study, root)
    if not runs.runs and not runs.evaluations:
        lines = "\n".join(f"  {f.path}: {f.reason}" for f in runs.findings[:10])
        raise ConfigError(f"{root / 'runs'}: no run that params.yaml declares can be used; run 'dvc repro' first\n{lines}")
    table = run_table(runs, study)
    confidence, presets = study.analyse.confidence, presets_of(runs, study)
    evaluation = tab.evaluation_table(runs, study)
    tables = {
        "runs": table,
        "curves": tab.curves_table(runs),
        "methods": tab.methods_table(table, runs, evaluation, study),
        "pairs": tab.pairs_table(table, runs, study, presets),
        "evaluation": evaluation,
        "gains": gains_table(runs, study),
        "times": times_table(runs, study),
        "reliability": tab.reliability_table(table, runs, study),
        **tab.token_tables(runs),
        **credit_tables(runs, table, confidence),
    }
    verdicts = judge(claims, table, runs, study)
    tables["claims"] = claims_table(verdicts)
    book = Book(study, runs.tasks, runs.methods, tables, presets)
    headline = headline_table(book)
    for name in (
        "figures",
        "tables",
        "plots",
    ):  # what an earlier study left must not stay; the notebook beside them may
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    write_tables(out, tables)
    from_disk = Book(study, book.tasks, book.methods, read_tables(out), book.presets)
    drawn = draw_all(from_disk, out / "figures", FIGURES if figures is None else figures)
    _write(out, study, runs=runs, book=book, headline=headline, verdicts=verdicts, figures=drawn)
    return Analysis(study=study, out=out, runs=runs, headline=headline, tables=tables, verdicts=verdicts, figures=drawn)


def presets_of(runs: RunSet, study: Study) -> dict[str, str]:
    """Preset behind every method, from the runs themselves, else from the declared variants."""
    presets = {m: study.variants.get(m, {}).get("preset", m.split("@")[0]) for m in runs.methods}
    for (_, method, _), run in sorted(runs.runs.items()):
        presets[method] = run.config.get("preset") or presets[method]
    return presets


def write_tables(out: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """curves.parquet, and every other table as CSV."""
    (out / "tables").mkdir()
    for name, table in sorted(tables.items()):
        if name != "curves":
            write_csv(out / "tables" / f"{name}.csv", table)
    curves = pa.Table.from_pandas(tables["curves"], preserve_index=False).replace_schema_metadata(None)
    pq.write_table(curves, out / "curves.parquet", compression="zstd")


def _write(
    out: Path,
    study: Study,
    runs: RunSet,
    book: Book,
    headline: pd.DataFrame,
    verdicts: list[Verdict],
    figures: list[dict],
) -> None:
    write_csv(out / "headline.csv", headline)
    write_json(out / "headline.json", plain(headline.to_dict("records")))
    write_json(out / "claims.json", plain([v.as_dict() for v in verdicts]))
    write_json(out / "metrics.json", plain(metrics_of(headline, verdicts, runs)))
    write_plots(out / "plots", book)
    write_json(
        out / "analysis.json",
        plain(
            {
                "profile": study.profile,
                "evidence": is_evidence(study),
                "tasks": runs.tasks,
                "methods": runs.methods,
                "seeds": runs.seeds,
                "presets": book.presets,
                "reference": book.reference,
                "imported": runs.imported,
                "findings": [asdict(f) for f in runs.findings],
                "figures": figures,
                "answer": answer(book),
                "sentences": sentences(book),
                "credit": credit_sentences(book),
                "objectives": objectives_of(runs),
                "versions": versions_of(runs),
            }
        ),
    )


def objectives_of(runs: RunSet) -> dict[str, dict | None]:
    """Resolved options of every method, as its first run recorded them."""
    found: dict[str, dict | None] = dict.fromkeys(runs.methods)
    for (_, method, _), run in sorted(runs.runs.items()):
        found[method] = found.get(method) or run.config.get("objective")
    return found


def versions_of(runs: RunSet) -> dict[str, list[str]]:
    """Package versions that the runs were made with; more than one is worth a reader's attention."""
    found: dict[str, set[str]] = {}
    for run in [*runs.runs.values(), *runs.evaluations.values()]:
        for name, version in (run.config.get("versions") or {}).items():
            found.setdefault(name, set()).add(str(version))
    return {name: sorted(values) for name, values in sorted(found.items())}


def metrics_of(headline: pd.DataFrame, verdicts: list[Verdict], runs: RunSet) -> dict:
    """What ``dvc metrics`` shows and compares: the headline numbers by task and method, verdicts counted, runs used."""
    columns = ["accuracy", "pass_max", "difference", "entropy_kept", "rollouts_to_target"]
    numbers: dict[str, dict] = {}
    for row in headline.to_dict("records"):
        values = {c: round(float(row[c]), 6) for c in columns if c in row and row[c] is not None and not pd.isna(row[c])}
        numbers.setdefault(row["task"], {})[row["method"]] = values
    counts: dict[str, int] = {}
    for v in verdicts:
        counts[v.verdict.lower().replace(" ", "_")] = counts.get(v.verdict.lower().replace(" ", "_"), 0) + 1
    return {
        "results": numbers,
        "verdicts": counts,
        "runs": {
            "used": len(runs.runs),
            "evaluations": len(runs.evaluations),
            "problems": sum(f.kind in ("missing", "broken") for f in runs.findings),
        },
    }


PLOTS = {
    "reward": ("rollout", "reward"),
    "entropy": ("rollout", "entropy"),
    "accuracy": ("validation", "greedy"),
    "clip": ("update", "clip"),
}
"""File name -> (source, metric) of the CSV files for ``dvc plots``: step, series (task-method), value (mean over seeds)."""


def write_plots(folder: Path, book: Book) -> None:
    """CSV files for ``dvc plots show`` and ``dvc plots diff``."""
    folder.mkdir()
    curves = book.tables["curves"]
    for name, (source, metric) in PLOTS.items():
        part = curves[(curves["source"] == source) & (curves["metric"] == metric)]
        mean = part.groupby(["task", "method", "step"], observed=True, sort=True)["value"].mean().reset_index()
        mean["series"] = mean["task"].astype(str) + "-" + mean["method"].astype(str)
        write_csv(folder / f"{name}.csv", mean[["step", "series", "value"]])
    table = book.tables["evaluation"]
    table = table[table["metric"].str.startswith("pass@")]
    rows = table.assign(series=table["task"] + "-" + table["split"] + "-" + table["method"])
    write_csv(folder / "pass_at_k.csv", rows[["k", "series", "estimate"]].rename(columns={"estimate": "value"}))


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """CSV with nine significant digits, the same bytes on every machine."""
    table.to_csv(path, index=False, float_format="%.9g", lineterminator="\n")


def plain(value: Any) -> Any:
    """Numbers as JSON has them: nine significant digits; null where one is not finite or missing."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return None if value is pd.NA else value
