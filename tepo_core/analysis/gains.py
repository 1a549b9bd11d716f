"""Every run against its own base policy, with an interval over problems: what a single run can say.

The interval is that of this run and its base on the distribution of problems. It holds no variation between seeds, so it
speaks of two policies and never of a method."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from tepo_core.analysis.statistics import bootstrap_interval
from tepo_core.analysis.summaries import split_metric
from tepo_core.config import Study
from tepo_core.runs.folder import BASE
from tepo_core.runs.read import Evaluation, RunSet
from tepo_core.seeding import numpy_generator

COLUMNS = ("task", "method", "seed", "split", "metric", "base", "run", "gain", "low", "high", "problems")
METRICS = ("accuracy", "greedy")


def gains_table(runs: RunSet, study: Study) -> pd.DataFrame:
    """One row a (run, split, metric): both levels and their difference, problems paired and redrawn together.

    No interval with fewer than two problems, or where all differences are the same."""
    rows = []
    for task in runs.tasks:
        bases = runs.evaluated(task, BASE)
        for method in (m for m in runs.methods if m != BASE):
            for seed, evaluated in runs.evaluated(task, method).items():
                if seed not in bases:
                    continue
                for split, metric, base_P, run_P in _pairs(bases[seed], evaluated):
                    found = bootstrap_interval(
                        [run_P - base_P],
                        lambda drawn: drawn.mean(axis=1),
                        reps=study.analyse.bootstrap,
                        confidence=study.analyse.confidence,
                        rng=numpy_generator("analysis", "gains", task, method, seed, split, metric),
                    )
                    levels = float(base_P.mean()), float(run_P.mean())
                    rows.append((task, method, seed, split, metric, *levels, found.estimate, found.low, found.high, len(run_P)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _pairs(base: Evaluation, run: Evaluation) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """(split, metric, values of the base, values of the run) over the same problems."""
    for split in run.splits:
        if split not in base.splits:
            continue
        for metric in METRICS:
            first, second = split_metric(base, split, metric), split_metric(run, split, metric)
            if first is not None and second is not None and len(first) == len(second):
                yield split, metric, np.asarray(first, dtype=float), np.asarray(second, dtype=float)
