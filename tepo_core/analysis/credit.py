"""Does credit predict learning? Gradient weight on decisive tokens against which planted wrong facts get corrected, and how soon.

Only tasks that plant wrong facts can answer (:mod:`tepo_core.tasks.arithmetic`): there the decisive tokens are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy import stats

from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.runs import RunSet
from tepo_core.analysis.statistics import seed_interval
from tepo_core.analysis.summaries import horizon, seed_values
from tepo_core.tasks.arithmetic import PLANS, TOKEN, Fact, plant_facts, token_kinds

EARLY = 0.5
"""Share of the rollouts whose recorded gradient counts as "before": credit must come before the correction that it predicts."""


def credit_tables(runs: RunSet, table: pd.DataFrame, confidence: float = 0.95) -> dict[str, pd.DataFrame]:
    """``credit_prediction``: rank correlations between and within runs; ``facts``: one row a (run, bad fact). Empty without planted facts."""
    tasks = [t for t in runs.tasks if t in PLANS]
    rows: list[dict] = []
    parts = []
    for task in tasks:
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
    """Inside each seed, over its methods: does more gradient weight on decisive tokens go with more, or sooner, correction?"""
    rows = []
    for outcome in ("facts_corrected", "facts_half"):
        per_seed = []
        for seed in runs.seeds:
            x, y = [], []
            for method in runs.methods:
                share = seed_values(table, task, method, "gradient_decisive").get(seed)
                value = seed_values(table, task, method, outcome).get(seed)
                if outcome == "facts_half" and value is None and (task, method, seed) in runs.runs:
                    value = 2.0 * horizon(runs.runs[task, method, seed])  # never got there: ranks behind all that did
                if share is not None and value is not None:
                    x.append(share)
                    y.append(value)
            per_seed.append(rank_correlation(x, y))
        interval = seed_interval(per_seed, confidence, bounds=(-1.0, 1.0))
        if interval.n:
            rows.append(_row(task, "run", METRICS["gradient_decisive"].label, outcome, interval))
    return rows


def _within_runs(facts: pd.DataFrame, task: str, confidence: float) -> list[dict]:
    """Inside each run, over its bad facts: correlation of early gradient weight, and of the planted chance, with correction."""
    rows = []
    for predictor in ("early_gradient", "early_tokens", "p_right"):
        per_seed = [
            np.nanmean(values)
            for _, group in facts.groupby("seed", sort=True)
            if np.isfinite(
                values := [rank_correlation(g[predictor], g["right"]) for _, g in group.groupby("method", sort=True)]
            ).any()
        ]
        interval = seed_interval(per_seed, confidence, bounds=(-1.0, 1.0))
        if interval.n:
            rows.append(_row(task, "fact", predictor, "right", interval))
    return rows


def _row(task: str, level: str, predictor: str, outcome: str, interval) -> dict:
    return {
        "task": task, "level": level, "predictor": predictor, "outcome": outcome, "correlation": interval.estimate,
        "low": interval.low, "high": interval.high, "n": interval.n, "reason": interval.reason,
    }  # fmt: skip


def fact_table(runs: RunSet, task: str) -> pd.DataFrame:
    """One row a run and bad fact that the final greedy answers met at least once.

    early_gradient: summed |dJ/dlogp| on tokens that answer the fact, over the records of the first half of the run; early_tokens:
    how many those are; asked, right: how often the final greedy answers met the fact, and the share of right digits."""
    parts = []
    for (name, method, seed), run in sorted(runs.runs.items()):
        evaluation = runs.evaluations.get((name, method, seed))
        tokens_path = run.folder / "tokens.parquet"
        if name != task or evaluation is None or not tokens_path.is_file():
            continue
        facts = plant_facts(task, seed)
        final = answers_by_fact(greedy_texts(evaluation.folder / "samples.parquet"), facts)
        early = recorded_by_fact(pq.read_table(tokens_path).to_pandas(), facts, EARLY * horizon(run))
        rows = [
            {
                "task": task, "method": method, "seed": seed, "fact": key, "p_right": facts[key].p_right, "asked": asked, "right": right / asked,
                "early_gradient": early.get(key, (0.0, 0))[0], "early_tokens": early.get(key, (0.0, 0))[1],
            }
            for key, (asked, right) in sorted(final.items())
        ]  # fmt: skip
        parts.append(pd.DataFrame(rows))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def greedy_texts(path) -> list[str]:
    """Greedy answers (sample -1) of an evaluation, or its first samples where there are none."""
    if not path.is_file():
        return []
    table = pq.read_table(path, columns=["sample", "text"])
    least = pc.min(table["sample"])
    return table.filter(pc.equal(table["sample"], least))["text"].to_pylist()


def answers_by_fact(texts: Sequence[str], facts: dict[str, Fact]) -> dict[str, tuple[int, int]]:
    """Bad fact -> (times a response answered it, times the digit was right), by the response's own running values."""
    counts: dict[str, tuple[int, int]] = {}
    for text in texts:
        tokens = TOKEN.findall(text)
        for token, (kind, key) in zip(tokens, token_kinds(tokens, facts), strict=True):
            if kind == "decisive" and key is not None:
                asked, right = counts.get(key, (0, 0))
                counts[key] = asked + 1, right + (token == str(facts[key].truth))
    return counts


def recorded_by_fact(tokens: pd.DataFrame, facts: dict[str, Fact], last_step: float) -> dict[str, tuple[float, int]]:
    """Bad fact -> (summed gradient weight, number) of recorded tokens that answer it, up to rollout ``last_step``."""
    tokens = tokens[tokens["step"] <= last_step]
    sums: dict[str, tuple[float, int]] = {}
    for _, response in tokens.groupby(["step", "response"], sort=True):
        response = response.sort_values("position")
        for (kind, key), weight in zip(token_kinds(list(response["text"]), facts), response["gradient"], strict=True):
            if kind == "decisive" and key is not None and np.isfinite(weight):
                total, count = sums.get(key, (0.0, 0))
                sums[key] = total + float(weight), count + 1
    return sums
