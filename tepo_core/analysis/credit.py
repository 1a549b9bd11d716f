"""Does credit predict learning? Gradient weight on decisive tokens against which planted wrong facts get corrected, and when.

Only tasks that plant wrong facts can answer (:mod:`tepo_core.tasks.arithmetic`): there the decisive tokens are known, and
validation asks every fact by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from scipy import stats

from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.statistics import Interval, seed_interval
from tepo_core.analysis.summaries import horizon, seed_values
from tepo_core.runs.read import Run, RunSet

EARLY = 0.3
"""Share of the rollouts whose recorded gradient counts as early: credit must come before the correction that it predicts."""
NEVER = 2.0
"""A fact or run that is never corrected ranks behind all that are: its time is this many horizons."""


def credit_tables(runs: RunSet, table: pd.DataFrame, confidence: float) -> dict[str, pd.DataFrame]:
    """``credit_prediction``: rank correlations between and within runs; ``facts``: one row a (run, bad fact).

    Empty where no run has planted facts."""
    rows: list[dict] = []
    parts = []
    for task in runs.tasks:
        rows += _between_runs(runs, table, task, confidence)
        facts = fact_table(runs, task)
        if len(facts):
            parts.append(facts)
            rows += _within_runs(facts, task, confidence)
    if not rows:
        return {}
    columns = ["task", "level", "predictor", "outcome", "correlation", "low", "high", "n", "reason"]
    out = {"credit_prediction": pd.DataFrame(rows, columns=columns)}
    if parts:
        out["facts"] = pd.concat(parts, ignore_index=True)
    return out


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN with fewer than four pairs or without spread."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(stats.spearmanr(x, y).statistic)


def _between_runs(runs: RunSet, table: pd.DataFrame, task: str, confidence: float) -> list[dict]:
    """Inside each seed, over its methods: does more gradient in the logits of decisive tokens go with more, or sooner, correction?"""
    rows = []
    shares = {method: seed_values(table, task, method, "gradient_decisive") for method in runs.methods}
    for outcome in ("facts_corrected", "facts_half"):
        values = {method: seed_values(table, task, method, outcome) for method in runs.methods}
        per_seed = []
        for seed in runs.seeds:
            x, y = [], []
            for method in runs.methods:
                value = values[method].get(seed)
                if outcome == "facts_half" and value is None and (task, method, seed) in runs.runs:
                    value = NEVER * horizon(runs.runs[task, method, seed])
                if seed in shares[method] and value is not None:
                    x.append(shares[method][seed])
                    y.append(value)
            per_seed.append(rank_correlation(x, y))
        interval = seed_interval(per_seed, confidence, bounds=(-1.0, 1.0))
        if interval.n:
            rows.append(_row(task, "run", METRICS["gradient_decisive"].label, outcome, interval))
    return rows


FACT_PREDICTORS = ("early_gradient", "early_records", "start_probability")
FACT_OUTCOMES = ("end_probability", "corrected_at")


def _within_runs(facts: pd.DataFrame, task: str, confidence: float) -> list[dict]:
    """Inside each run, over its bad facts; mean over the methods of a seed, interval over seeds."""
    rows = []
    for predictor in FACT_PREDICTORS:
        for outcome in FACT_OUTCOMES:
            per_seed = []
            for _, group in facts.groupby("seed", sort=True):
                found = [rank_correlation(g[predictor], g[outcome]) for _, g in group.groupby("method", sort=True)]
                found = [value for value in found if np.isfinite(value)]
                if found:
                    per_seed.append(float(np.mean(found)))
            interval = seed_interval(per_seed, confidence, bounds=(-1.0, 1.0))
            if interval.n:
                rows.append(_row(task, "fact", predictor, outcome, interval))
    return rows


def _row(task: str, level: str, predictor: str, outcome: str, interval: Interval) -> dict:
    return {
        "task": task,
        "level": level,
        "predictor": predictor,
        "outcome": outcome,
        "correlation": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "n": interval.n,
        "reason": interval.reason,
    }


def fact_table(runs: RunSet, task: str) -> pd.DataFrame:
    """One row a run and planted wrong fact; empty where nothing was recorded.

    start_probability, end_probability: of the right digit, before and after training. corrected_at: first validation at which
    it is above 1/2 (:data:`NEVER` horizons if it never is). early_gradient: summed |dJ/dlogits| on recorded tokens that answer
    the fact in the first part of the run (:data:`EARLY`); early_records: how many those are."""
    parts = [_facts_of(run) for key, run in sorted(runs.runs.items()) if key[0] == task]
    parts = [part for part in parts if part is not None]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _facts_of(run: Run) -> pd.DataFrame | None:
    facts_path, tokens_path = run.folder / "facts.parquet", run.folder / "tokens.parquet"
    if not facts_path.is_file():
        return None
    facts = pq.read_table(facts_path).to_pandas()
    facts = facts[facts["bad"].astype(bool)].sort_values(["fact", "step"])
    if not len(facts):
        return None
    ends = facts.groupby("fact", sort=True)["prob_right"].agg(start_probability="first", end_probability="last")
    first = facts[facts["correct"] == 1].groupby("fact", sort=True)["step"].min()
    table = ends.assign(corrected_at=first.reindex(ends.index).fillna(NEVER * horizon(run)).astype(float))
    table = table.join(early_gradient(tokens_path, EARLY * horizon(run)) if tokens_path.is_file() else EMPTY)
    table[["early_gradient", "early_records"]] = table[["early_gradient", "early_records"]].fillna(0.0)
    return table.reset_index().assign(task=run.task, method=run.method, seed=run.seed)


EMPTY = pd.DataFrame({"early_gradient": [], "early_records": []}, index=pd.Index([], name="fact"), dtype=float)


def early_gradient(path, last_step: float) -> pd.DataFrame:
    """Summed gradient in the logits and number of recorded tokens by the fact that they answer, up to rollout ``last_step``."""
    if "fact" not in pq.read_schema(path).names:
        return EMPTY
    tokens = pq.read_table(path, columns=["step", "fact", "gradient"]).to_pandas()
    tokens = tokens[(tokens["step"] <= last_step) & tokens["fact"].notna() & np.isfinite(tokens["gradient"].astype(float))]
    if not len(tokens):
        return EMPTY
    return tokens.groupby("fact", sort=True)["gradient"].agg(early_gradient="sum", early_records="count")
