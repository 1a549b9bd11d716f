"""The tables of the analysis: tidy data frames that figures, claims and the report read, and nothing else does the counting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tepo_core.analysis import entropy as ent
from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.statistics import (
    SeedProblemBootstrap,
    bootstrap_interval,
    iqm,
    seed_interval,
    shared_problem_variance,
)
from tepo_core.analysis.summaries import (
    PROBLEM_METRICS,
    compare,
    largest_k,
    level,
    primary_splits,
    seed_values,
    shares_problems,
    split_metric,
)
from tepo_core.config import Study
from tepo_core.runs.folder import BASE
from tepo_core.runs.metrics import Series
from tepo_core.runs.read import Evaluation, RunSet
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


def methods_table(table: pd.DataFrame, runs: RunSet, evaluation: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Every metric of every method, long: mean over seeds with its t interval (low, high) and its bootstrap interval
    (boot_low, boot_high: over seeds, and over problems where the metric is an accuracy on one split)."""
    rows = []
    found = {(r["task"], r["method"], r["split"], r["metric"]): r for r in evaluation.to_dict("records")}
    for task in runs.tasks:
        for method in [BASE, *runs.methods]:
            evaluated = runs.evaluated(task, method)
            for metric in METRICS:
                interval = level(table, runs, task, method, metric, study.analyse.confidence)
                if not interval.n:
                    continue
                names = evaluation_names(evaluated, metric)
                if names and (task, method, *names) in found:
                    boot = [found[task, method, *names][key] for key in ("bootstrap_low", "bootstrap_high")]
                else:
                    values = list(seed_values(table, task, method, metric).values())
                    rng = numpy_generator("analysis", "level", task, method, metric)
                    settings = {"reps": study.analyse.bootstrap, "confidence": study.analyse.confidence, "rng": rng}
                    drawn = bootstrap_interval([values], lambda x: x.mean(axis=1), **settings)
                    boot = [drawn.low, drawn.high]
                row = {"task": task, "method": method, "metric": metric, **interval.as_dict()}
                rows.append(row | {"boot_low": boot[0], "boot_high": boot[1]})
    columns = ["task", "method", "metric", "estimate", "low", "high", "n", "reason", "boot_low", "boot_high"]
    return pd.DataFrame(rows, columns=columns).astype({"boot_low": float, "boot_high": float})


def evaluation_names(evaluated: Mapping[int, Evaluation], metric: str) -> tuple[str, str] | None:
    """(split, metric) of the evaluation table that a metric of the run table stands for; ``None`` where it is none, or a
    mean over several splits."""
    if metric not in PROBLEM_METRICS or not evaluated:
        return None
    first = next(iter(evaluated.values()))
    splits = primary_splits(first)
    name = f"pass@{largest_k(first)}" if metric == "pass_max" else PROBLEM_METRICS[metric]
    return (splits[0], name) if len(splits) == 1 else None


def paired_bootstrap(
    runs: RunSet, task: str, first: str, second: str, metric: str, seeds: tuple[int, ...], study: Study, samplers: dict
) -> tuple[float | None, float | None]:
    """Hierarchical bootstrap interval of a paired difference: the same seeds and problems are redrawn for both methods.

    (None, None) for metrics that are no accuracy on one split, and with fewer than two seeds."""
    a, b = runs.evaluated(task, first), runs.evaluated(task, second)
    names = evaluation_names(a, metric)
    if names is None or len(seeds) < 2 or any(s not in a or s not in b for s in seeds):
        return None, None
    pairs = [(split_metric(a[s], *names), split_metric(b[s], *names)) for s in seeds]
    if any(x is None or y is None or len(x) != len(y) for x, y in pairs):
        return None, None
    sizes = [len(x) for x, _ in pairs]
    key = (task, names[0], seeds)
    if key not in samplers:
        rng = numpy_generator("analysis", "bootstrap", task, names[0], *seeds)
        shared = shares_problems([a[s] for s in seeds], names[0])
        samplers[key] = SeedProblemBootstrap(sizes, reps=study.analyse.bootstrap, rng=rng, shared=shared)
    found = samplers[key].interval([x - y for x, y in pairs], study.analyse.confidence)
    return found.low, found.high


def pairs_table(table: pd.DataFrame, runs: RunSet, study: Study, presets: Mapping[str, str]) -> pd.DataFrame:
    """Paired differences of every method from the base policy, from the reference method and from its own preset, long.

    low, high: t interval over seeds, which decides verdicts. boot_low, boot_high: hierarchical bootstrap over seeds and
    problems, for accuracies on one split."""
    rows = []
    confidence, samplers = study.analyse.confidence, {}
    reference = reference_method(runs.methods)
    for task in runs.tasks:
        for method in runs.methods:
            for other in dict.fromkeys([BASE, reference, presets.get(method)]):
                if other == method or other not in (BASE, *runs.methods):
                    continue
                for metric in METRICS:
                    found = compare(table, runs, task=task, first=method, second=other, metric=metric, confidence=confidence)
                    if found.seeds:
                        boot = paired_bootstrap(
                            runs,
                            task,
                            first=method,
                            second=other,
                            metric=metric,
                            seeds=found.seeds,
                            study=study,
                            samplers=samplers,
                        )
                        rows.append(
                            {
                                "task": task,
                                "method": method,
                                "against": other,
                                "metric": metric,
                                **found.interval.as_dict(),
                                "improvement": found.improvement,
                                "seeds_needed": found.needed,
                                "boot_low": boot[0],
                                "boot_high": boot[1],
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
        "boot_low",
        "boot_high",
    ]
    types = {"seeds_needed": "Int64", "boot_low": float, "boot_high": float}
    return pd.DataFrame(rows, columns=columns).astype(types)


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
    shared = shares_problems(evaluated.values(), split)
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
            samplers[key] = SeedProblemBootstrap(sizes, reps=study.analyse.bootstrap, rng=rng, shared=shared)
        values = [float(g.mean()) for g in groups.values()]
        variance = shared_problem_variance(np.stack(list(groups.values()))) if shared else 0.0
        interval = seed_interval(values, study.analyse.confidence, bounds=(0.0, 1.0), problem_variance=variance)
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
                "problems": len({i for e in evaluated.values() for i in e.counts(split)[0]}),
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
                    "problems": len({i for e in evaluated.values() for i in e.counts(split)[0]}),
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
