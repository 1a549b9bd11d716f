"""Rollouts until a target accuracy: by seed, with runs that never get there, and as ratios between methods."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tepo_core.analysis.statistics import TimeToTarget, restricted_mean_time, time_ratio
from tepo_core.analysis.summaries import horizon, time_to, validation_curve
from tepo_core.analysis.tables import reference_method
from tepo_core.config import Study
from tepo_core.runs.read import RunSet


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
