"""The tables of the analysis: tidy data frames that figures, claims and the report read, and nothing else does the counting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tepo_core.analysis import entropy as ent
from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.runs import BASE, Evaluation, RunSet
from tepo_core.analysis.series import Series
from tepo_core.analysis.statistics import (
    SeedProblemBootstrap,
    TimeToTarget,
    bootstrap_interval,
    iqm,
    restricted_mean_time,
    seed_interval,
    time_ratio,
)
from tepo_core.analysis.summaries import compare, horizon, level, seed_values, split_metric, time_to, validation_curve
from tepo_core.config import ARITHMETIC_TASKS, Study
from tepo_core.seeding import numpy_generator

TOKEN_COLUMNS = (
    "step",
    "kind",
    "logprob_old",
    "logprob",
    "entropy_old",
    "entropy",
    "advantage",
    "mask",
    "clipped",
    "gradient",
)
RUN = ("task", "method", "seed")


def reference_method(methods: list[str]) -> str | None:
    """The method that others are compared with: ``grpo`` where it is in the study, else the first."""
    return "grpo" if "grpo" in methods else (methods[0] if methods else None)


def curves_table(runs: RunSet) -> pd.DataFrame:
    """Every metric of every run along its rollouts, long: task, method, seed, source, metric, step, value.

    source: ``rollout`` (before the step's updates), ``update`` (merged over the step's updates) or ``validation``."""
    parts = []
    for task in runs.tasks:
        for method in runs.methods:
            for seed, run in runs.of(task, method).items():
                for source, series in (("rollout", run.rollout), ("update", run.step), ("validation", run.validation)):
                    parts.append(_long(series).assign(task=task, method=method, seed=seed, source=source))
    columns = [*RUN, "source", "metric", "step", "value"]
    if not parts:
        return pd.DataFrame(columns=columns)
    frame = pd.concat(parts, ignore_index=True)[columns]
    for name in ("task", "method", "source", "metric"):
        frame[name] = frame[name].astype("category")
    return frame


def _long(series: Series) -> pd.DataFrame:
    names = [*series.num, *series.values]
    columns = [series.mean(name) for name in names]
    return pd.DataFrame(
        {
            "metric": np.repeat(np.array(names, dtype=object), len(series)),
            "step": np.tile(series.steps, len(names)),
            "value": np.concatenate(columns) if columns else np.array([]),
        }
    )


def methods_table(table: pd.DataFrame, runs: RunSet, confidence: float) -> pd.DataFrame:
    """Mean and interval over seeds of every metric of every method, long."""
    rows = []
    for task in runs.tasks:
        for method in [BASE, *runs.methods]:
            for metric in METRICS:
                interval = level(table, task, method, metric, confidence)
                if interval.n:
                    rows.append({"task": task, "method": method, "metric": metric, **interval.as_dict()})
    return pd.DataFrame(rows, columns=["task", "method", "metric", "estimate", "low", "high", "n", "reason"])


def pairs_table(table: pd.DataFrame, runs: RunSet, confidence: float, presets: Mapping[str, str]) -> pd.DataFrame:
    """Paired differences of every method from the base policy, from the reference method and from its own preset, long."""
    rows = []
    reference = reference_method(runs.methods)
    for task in runs.tasks:
        for method in runs.methods:
            for other in dict.fromkeys([BASE, reference, presets.get(method)]):
                if other == method or other not in (BASE, *runs.methods):
                    continue
                for metric in METRICS:
                    found = compare(table, runs, task, method, other, metric, confidence)
                    if found.seeds:
                        rows.append(
                            {
                                "task": task,
                                "method": method,
                                "against": other,
                                "metric": metric,
                                **found.interval.as_dict(),
                                "improvement": found.improvement,
                                "seeds_needed": found.needed,
                            }
                        )
    columns = [
        "task",
        "method",
        "against",
        "metric",
        "estimate",
        "low",
        "high",
        "n",
        "reason",
        "improvement",
        "seeds_needed",
    ]
    return pd.DataFrame(rows, columns=columns).astype({"seeds_needed": "Int64"})


def evaluation_table(runs: RunSet, study: Study) -> pd.DataFrame:
    """Accuracy, greedy and pass@k of every policy and split: mean over seeds, t interval, IQM, hierarchical bootstrap interval.

    maj@k comes as recorded, with the t interval only. ``problems`` counts the problems of all seeds (shared sets once)."""
    rows = []
    for task in runs.tasks:
        samplers: dict[tuple, SeedProblemBootstrap] = {}
        for method in [BASE, *runs.methods]:
            evaluated = runs.evaluated(task, method)
            found = {split for e in evaluated.values() for split in e.splits}
            for split in [
                *(s for s in study.evaluate.splits if s in found),
                *sorted(found - set(study.evaluate.splits)),
            ]:
                chosen = {seed: e for seed, e in evaluated.items() if split in e.splits}
                rows.extend(_evaluation_rows(task, method, split, chosen, study, samplers))
    columns = [
        "task",
        "method",
        "split",
        "metric",
        "k",
        "estimate",
        "low",
        "high",
        "n",
        "reason",
        "iqm",
        "bootstrap_low",
        "bootstrap_high",
        "problems",
        "samples",
    ]
    return pd.DataFrame(rows, columns=columns)


def _evaluation_rows(
    task: str, method: str, split: str, evaluated: Mapping[int, Evaluation], study: Study, samplers: dict
) -> list[dict]:
    rows = []
    shared = task not in ARITHMETIC_TASKS
    first = next(iter(evaluated.values()))
    ks = sorted(int(k) for k in first.splits[split]["pass@k"])
    names = [("accuracy", 1), ("greedy", 1), *((f"pass@{k}", k) for k in ks)]
    for metric, k in names:
        groups = {seed: split_metric(e, split, metric) for seed, e in evaluated.items()}
        groups = {seed: g for seed, g in groups.items() if g is not None and len(g)}
        if not groups:
            continue
        sizes = [len(g) for g in groups.values()]
        key = (split, tuple(groups), tuple(sizes))
        if key not in samplers:
            rng = numpy_generator("analysis", "bootstrap", task, split, *groups)
            same = shared and len(set(sizes)) == 1
            samplers[key] = SeedProblemBootstrap(sizes, reps=study.analyse.bootstrap, rng=rng, shared=same)
        values = [float(g.mean()) for g in groups.values()]
        interval = seed_interval(values, study.analyse.confidence, bounds=(0.0, 1.0))
        boot = samplers[key].interval(list(groups.values()), study.analyse.confidence)
        rows.append(
            {
                "task": task,
                "method": method,
                "split": split,
                "metric": metric,
                "k": k,
                **interval.as_dict(),
                "iqm": float(iqm(np.array(values))),
                "bootstrap_low": boot.low,
                "bootstrap_high": boot.high,
                "problems": sizes[0] if shared else sum(sizes),
                "samples": first.counts(split)[2],
            }
        )
    for k in sorted(int(k) for k in first.splits[split].get("maj@k", {})):
        values = [e.splits[split]["maj@k"].get(str(k)) for e in evaluated.values()]
        if all(v is not None for v in values):
            interval = seed_interval(values, study.analyse.confidence, bounds=(0.0, 1.0))
            rows.append(
                {
                    "task": task,
                    "method": method,
                    "split": split,
                    "metric": f"maj@{k}",
                    "k": k,
                    **interval.as_dict(),
                    "problems": len(first.counts(split)[0]),
                    "samples": first.counts(split)[2],
                }
            )
    return rows


def reliability_table(table: pd.DataFrame, runs: RunSet, study: Study) -> pd.DataFrame:
    """IQM of accuracy over tasks and seeds with its stratified bootstrap interval, one row a method (arXiv 2108.13264)."""
    rows = []
    for method in [BASE, *runs.methods]:
        strata = [list(seed_values(table, task, method, "accuracy").values()) for task in runs.tasks]
        rng = numpy_generator("analysis", "iqm", method)
        found = bootstrap_interval(strata, iqm, reps=study.analyse.bootstrap, confidence=study.analyse.confidence, rng=rng)
        if found.n:
            rows.append({"method": method, **found.as_dict()})
    return pd.DataFrame(rows, columns=["method", "estimate", "low", "high", "n", "reason"])


def final_level(runs: RunSet, task: str, method: str, seed: int) -> float | None:
    """Where a run ended: the mean of the last two held-out measurements of its curve."""
    run = runs.runs.get((task, method, seed))
    if run is None:
        return None
    values = validation_curve(run)[1]
    values = values[np.isfinite(values)]
    return float(values[-2:].mean()) if len(values) else None


def times_to(
    runs: RunSet, task: str, first: str, second: str, target: float | None
) -> tuple[list[TimeToTarget], list[TimeToTarget], list[int], int]:
    """Times of two methods on their common seeds, and the horizon. ``target`` None: where the second method ended, seed by
    seed."""
    a, b = runs.of(task, first), runs.of(task, second)
    pairs, end = [], 0
    for seed in sorted(set(a) & set(b)):
        goal = target if target is not None else final_level(runs, task, second, seed)
        if goal is None:
            continue
        times = time_to(a[seed], goal), time_to(b[seed], goal)
        if None not in times:
            pairs.append((*times, seed))
            end = max(end, horizon(a[seed]), horizon(b[seed]))
    return [p[0] for p in pairs], [p[1] for p in pairs], [p[2] for p in pairs], end


def times_table(runs: RunSet, study: Study) -> pd.DataFrame:
    """Rollouts to the profile's target, and ratios of times against the reference method for two targets.

    mean_restricted: mean of min(time, horizon). ratio_*: against the reference to the profile's target; own_ratio_*: to where
    the reference ended, the usual meaning of "converges sooner". Censored runs never got there."""
    rows = []
    reference = reference_method(runs.methods)
    target, confidence = study.analyse.target_accuracy, study.analyse.confidence
    for task in runs.tasks:
        for method in runs.methods:
            own = {seed: time_to(run, target) for seed, run in runs.of(task, method).items()}
            own = {seed: t for seed, t in own.items() if t is not None}
            if not own:
                continue
            end = max(horizon(run) for run in runs.of(task, method).values())
            row = {
                "task": task,
                "method": method,
                "target": target,
                "seeds": len(own),
                "reached": sum(t.reached for t in own.values()),
                "mean_restricted": restricted_mean_time(list(own.values()), end),
                "horizon": end,
            }
            if reference and reference != method:
                for name, goal in (("ratio", target), ("own_ratio", None)):
                    a, b, _, limit = times_to(runs, task, method, reference, goal)
                    if a:
                        found = time_ratio(a, b, limit, confidence)
                        row |= {
                            name: found.interval.estimate,
                            f"{name}_low": found.interval.low,
                            f"{name}_high": found.interval.high,
                            f"{name}_pairs": found.pairs,
                            f"{name}_censored": found.censored_first,
                        }
            rows.append(row)
    names = [f"{n}{s}" for n in ("ratio", "own_ratio") for s in ("", "_low", "_high", "_pairs", "_censored")]
    columns = ["task", "method", "target", "seeds", "reached", "mean_restricted", "horizon", *names]
    return pd.DataFrame(rows, columns=columns)


def read_tokens(runs: RunSet) -> pd.DataFrame:
    """Token records of all runs, only the columns that are needed; empty where none were recorded."""
    parts = []
    for (task, method, seed), run in sorted(runs.runs.items()):
        path = run.folder / "tokens.parquet"
        if path.is_file():
            present = set(pq.read_schema(path).names)
            part = pq.read_table(path, columns=[c for c in TOKEN_COLUMNS if c in present]).to_pandas()
            parts.append(part.reindex(columns=list(TOKEN_COLUMNS)).assign(task=task, method=method, seed=seed))
    if not parts:
        return pd.DataFrame(columns=[*TOKEN_COLUMNS, *RUN])
    frame = pd.concat(parts, ignore_index=True)
    for name in ("mask", "clipped"):
        frame[name] = frame[name].fillna(False).astype(bool)
    return frame[np.isfinite(frame[["logprob_old", "logprob", "entropy_old", "entropy"]].astype(float)).all(axis=1)]


def token_tables(runs: RunSet) -> dict[str, pd.DataFrame]:
    """Token-level study: means by kind of token, and the share losing entropy by surprise."""
    tokens = read_tokens(runs)
    if not len(tokens):
        return {}
    out = {"fell_by_surprise": ent.fell_by_surprise(tokens, ["task", "method"])}
    if tokens["kind"].notna().any():
        out["tokens_by_kind"] = ent.by_kind(tokens, ["task", "method", "kind"])
    return out
