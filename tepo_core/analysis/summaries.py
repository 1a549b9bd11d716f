"""One row of numbers a run, and their intervals a method: everything claims, tables and figures compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tepo_core.analysis import entropy as ent
from tepo_core.analysis import stability as stab
from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.statistics import (
    Interval,
    TimeToTarget,
    paired_improvement,
    paired_interval,
    rollouts_to_target,
    seed_interval,
    seeds_needed,
    shared_problem_variance,
)
from tepo_core.config import Study
from tepo_core.evaluation.passk import pass_at_k
from tepo_core.runs.folder import BASE
from tepo_core.runs.metrics import Series
from tepo_core.runs.read import Evaluation, Run, RunSet
from tepo_core.tasks.problem import TOKEN_KINDS

CURVE = "greedy"
"""Validation curve that times to a target are read from; ``sample`` where a run has no greedy validation."""


def primary_splits(evaluation: Evaluation) -> list[str]:
    """The splits whose mean is "accuracy": ``test`` where there is one, else every split (benchmark sets, equally weighted)."""
    return ["test"] if "test" in evaluation.splits else list(evaluation.splits)


def split_metric(evaluation: Evaluation, split: str, metric: str) -> np.ndarray | None:
    """Per-problem values of ``accuracy``, ``greedy`` or ``pass@<k>`` on one split; ``None`` where it was not evaluated."""
    _, correct, samples = evaluation.counts(split)
    if metric == "greedy":
        return evaluation.greedy(split)
    if not samples:
        return None
    k = 1 if metric == "accuracy" else int(metric.removeprefix("pass@"))
    return np.asarray(pass_at_k(samples, correct, k), dtype=float) if k <= samples else None


def largest_k(evaluation: Evaluation) -> int | None:
    """Largest k that every primary split reports."""
    ks = [max(map(int, evaluation.splits[s]["pass@k"]), default=0) for s in primary_splits(evaluation)]
    return min(ks) or None if ks else None


def evaluation_row(evaluation: Evaluation) -> dict[str, float | None]:
    """Accuracy, greedy, pass@k at the largest k, longer problems, cut-off share."""
    k = largest_k(evaluation)

    def mean(metric: str, splits: Sequence[str]) -> float | None:
        values = [split_metric(evaluation, s, metric) for s in splits if s in evaluation.splits]
        return float(np.mean([v.mean() for v in values])) if values and all(v is not None and len(v) for v in values) else None

    splits = primary_splits(evaluation)
    accuracy, greedy = mean("accuracy", splits), mean("greedy", splits)
    return {
        "accuracy": accuracy if accuracy is not None else greedy,
        "greedy": greedy,
        "pass_max": mean(f"pass@{k}", splits) if k else None,
        "long_accuracy": mean("accuracy", ["long"]),
        "truncated": float(np.mean([evaluation.splits[s]["truncation_rate"] for s in splits])),
    }


def validation_curve(run: Run, name: str = CURVE) -> tuple[np.ndarray, np.ndarray]:
    """Steps and held-out accuracy of a run; sampled accuracy where greedy was not measured."""
    series = run.validation
    return series.steps, series.mean(name if name in series else "sample")


def time_to(run: Run, target: float) -> TimeToTarget | None:
    """Rollouts to a held-out accuracy. A run that stopped early or fell short is censored at its planned end: it never got
    there."""
    found = rollouts_to_target(*validation_curve(run), target)
    if found is None or found.reached:
        return found
    return TimeToTarget(float(horizon(run)), False)


def horizon(run: Run) -> int:
    """Rollouts the run was to have; those it had where its config does not say."""
    return int(run.config.get("train", {}).get("rollouts") or run.rollout.steps[-1])


def run_row(run: Run, study: Study) -> dict[str, float | None]:
    """All numbers of one training run that need no evaluation."""
    rollout, step, update = run.rollout, run.step, run.update
    reward, entropy = rollout.mean("reward"), rollout.mean("entropy")
    start, end = stab.edge_means(entropy)
    law, ahead = ent.fit_law(entropy, reward), ent.extrapolate_law(entropy, reward)
    test = ent.covariance_prediction(entropy, step.mean("covariance"), step.mean("lr")) if "covariance" in step else None
    fall = stab.largest_drawdown(stab.trailing_mean(reward))
    limits = {
        "entropy_share": study.analyse.collapse_entropy_share,
        "reward_share": study.analyse.collapse_reward_share,
    }
    collapse = stab.find_collapse(rollout.steps, entropy, reward, **limits)
    time = time_to(run, study.analyse.target_accuracy)
    curve = validation_curve(run)[1]
    facts = run.validation.mean("fact_correct") if "fact_correct" in run.validation else np.array([])
    kept = _last(run.validation.mean("fact_kept"))
    half = rollouts_to_target(run.validation.steps, facts, 0.5) if len(facts) else None
    moved = _later_updates(update)
    grad = step.mean("grad_norm")
    row = {
        "curve_mean": _mean(curve),
        "reward_end": stab.edge_means(reward)[1],
        "rollouts_to_target": time.step if time and time.reached else None,
        "reached": float(time.reached) if time else None,
        "entropy_start": start,
        "entropy_end": end,
        "entropy_kept": ent.entropy_kept(entropy),
        "law_a": law and law.a,
        "law_b": law and law.b,
        "law_ceiling": law and law.ceiling,
        "law_r2": law and law.r2,
        "law_error": ahead and ahead.rmse,
        "covariance_correlation": test and test.correlation,
        "reward_volatility": stab.volatility(reward),
        "reward_drawdown": fall and fall.depth,
        "grad_volatility": stab.volatility(grad),
        "grad_spikes": float(len(stab.spikes(grad))) if "grad_norm" in step else None,
        "kl_old": update.total("kl_old"),
        "kl_base": _last(rollout.mean("kl_base")),
        "ratio_spread": _spread(update),
        "clip": update.total("clip"),
        "mask": update.total("mask"),
        "fell": moved.total("positive_entropy_fell"),
        "length_drift": stab.drift(rollout.mean("length")),
        "zero_variance": rollout.total("zero_variance"),
        "collapse_step": float(collapse.step) if collapse else None,
        "collapse_reward": collapse and collapse.reward,
        "facts_corrected": _last(facts),
        "facts_kept": kept,
        "facts_half": half.step if half and half.reached else None,
    }
    row.update(kind_shares(moved if "gradient@decisive" in update else update))
    row["fell_uncertain"] = fell_uncertain(run)
    row["collapse_kind"] = collapse.kind if collapse else None
    return row


def _later_updates(update: Series) -> Series:
    """Updates after the first of each rollout. In the first the policy is still the sampler: nothing has moved, nothing
    can have fallen."""
    if update.updates is None or not (update.updates > 1).any():
        return update
    keep = update.updates > 1
    pick = lambda columns: {name: value[keep] for name, value in columns.items()}  # noqa: E731
    return Series(update.steps[keep], pick(update.num), pick(update.den), pick(update.values), update.updates[keep])


def kind_shares(update: Series) -> dict[str, float | None]:
    """Shares of the gradient in the logits, tokens, entropy change, clipping and mask that fall on each kind of token, over all given
    updates."""
    row: dict[str, float | None] = {}
    for name in ("gradient", "tokens"):
        for kind in TOKEN_KINDS:
            row[f"{name}_{kind}"] = update.total(f"{name}@{kind}")
    for name, column in (("entropy", "entropy_change"), ("clip", "clip"), ("mask", "mask")):
        sums = {
            kind: float(np.nansum(np.abs(update.num[f"{column}@{kind}"]))) if f"{column}@{kind}" in update else None
            for kind in TOKEN_KINDS
        }
        total = sum(v for v in sums.values() if v is not None)
        for kind, value in sums.items():
            row[f"{name}_{kind}"] = value / total if value is not None and total else None
    tokens = row["tokens_decisive"]
    for name in ("gradient", "entropy", "clip", "mask"):
        share = row[f"{name}_decisive"]
        row[f"{name}_focus"] = share / tokens if share is not None and tokens else None
    return row


UNCERTAIN = 0.05
"""Nats. Below it a position is all but decided, and the sign of a change of entropy there is mostly rounding."""


def fell_uncertain(run: Run) -> float | None:
    """Share of recorded tokens with positive advantage and entropy of at least :data:`UNCERTAIN` whose entropy fell;
    ``None`` with fewer than twenty of them."""
    path = run.folder / "tokens.parquet"
    columns = ["advantage", "logprob", "logprob_old", "entropy", "entropy_old"]
    if not path.is_file() or not set(columns) <= set(pq.read_schema(path).names):
        return None
    table = {name: pq.read_table(path, columns=[name])[name].to_numpy() for name in columns}
    chosen = (table["advantage"] > 0) & (table["entropy_old"] >= UNCERTAIN) & (table["logprob"] != table["logprob_old"])
    if chosen.sum() < 20:
        return None
    return float((table["entropy"] < table["entropy_old"])[chosen].mean())


def _last(values: np.ndarray) -> float | None:
    good = values[np.isfinite(values)]
    return float(good[-1]) if len(good) else None


def _mean(values: np.ndarray) -> float | None:
    good = values[np.isfinite(values)]
    return float(good.mean()) if len(good) else None


def _spread(update: Series) -> float | None:
    """Standard deviation of the ratio over all tokens of all updates.

    From the mean of (r - 1)^2; records without it have the second moment alone, which cannot tell a spread below 1e-3."""
    mean = update.total("ratio")
    if "ratio_dev_sq" in update:
        variance = update.total("ratio_dev_sq") - (mean - 1) ** 2
    elif "ratio_sq" in update:
        variance = update.total("ratio_sq") - mean**2
    else:
        return None
    return float(np.sqrt(max(variance, 0.0))) if np.isfinite(variance) else None


def run_table(runs: RunSet, study: Study) -> pd.DataFrame:
    """One row a (task, method, seed), the base policy included, in the order of the study; columns of :data:`METRICS`."""
    rows = []
    for task in runs.tasks:
        for method in [BASE, *runs.methods]:
            trained, evaluated = runs.of(task, method), runs.evaluated(task, method)
            for seed in sorted(set(trained) | set(evaluated)):
                row = {"task": task, "method": method, "seed": seed}
                if seed in trained:
                    row.update(run_row(trained[seed], study))
                if seed in evaluated:
                    row.update(evaluation_row(evaluated[seed]))
                rows.append(row)
    columns = ["task", "method", "seed", *METRICS, "reached", "collapse_kind", "collapse_reward"]
    frame = pd.DataFrame(rows, columns=columns)
    numeric = [c for c in columns if c not in ("task", "method", "seed", "collapse_kind")]
    frame[numeric] = frame[numeric].astype(float)
    return frame


def seed_values(table: pd.DataFrame, task: str, method: str, metric: str) -> dict[int, float]:
    """Finite values of a metric by seed."""
    values = table[metric].to_numpy()
    mine = (table["task"].to_numpy() == task) & (table["method"].to_numpy() == method) & np.isfinite(values)
    return {int(s): float(v) for s, v in zip(table["seed"].to_numpy()[mine], values[mine], strict=True)}


def level(table: pd.DataFrame, runs: RunSet, task: str, method: str, metric: str, confidence: float) -> Interval:
    """A method's mean over seeds, with its interval; where all seeds share one problem set, the variance over problems is
    added."""
    values = seed_values(table, task, method, metric)
    bounds = (0.0, 1.0) if METRICS[metric].share else None
    variance = problem_variance(runs, task, method, None, metric, values)
    return seed_interval(list(values.values()), confidence, bounds=bounds, problem_variance=variance)


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two methods on one metric: first minus second, over the seeds that both have."""

    interval: Interval
    seeds: tuple[int, ...]
    improvement: float | None
    needed: int | None


def compare(
    table: pd.DataFrame, runs: RunSet, task: str, first: str, second: str, metric: str, confidence: float
) -> Comparison:
    """Paired differences over common seeds; where all seeds share one problem set, the variance over problems is added."""
    a, b = seed_values(table, task, first, metric), seed_values(table, task, second, metric)
    seeds = tuple(sorted(set(a) & set(b)))
    differences = [a[s] - b[s] for s in seeds]
    variance = problem_variance(runs, task, first, second, metric, seeds)
    interval = paired_interval([a[s] for s in seeds], [b[s] for s in seeds], confidence, problem_variance=variance)
    return Comparison(interval, seeds, paired_improvement(differences), seeds_needed(differences, confidence=confidence))


PROBLEM_METRICS = {"accuracy": "accuracy", "greedy": "greedy", "pass_max": "pass@"}


def shares_problems(evaluated: Iterable[Evaluation], split: str) -> bool:
    """Whether several seeds were evaluated on one and the same problem set, as on a benchmark. The built-in tasks draw
    their problems anew for every seed, and their ids say so."""
    ids = [e.counts(split)[0] for e in evaluated if split in e.splits]
    return len(ids) > 1 and all(other == ids[0] for other in ids)


def problem_variance(runs: RunSet, task: str, first: str, second: str | None, metric: str, seeds: Iterable[int]) -> float:
    """Squared standard error over problems of a level (``second`` None) or of a paired difference, where all seeds share
    their problems; else 0, since the spread between seeds then holds it already."""
    seeds = list(seeds)
    a, b = runs.evaluated(task, first), runs.evaluated(task, second) if second else {}
    if metric not in PROBLEM_METRICS or not seeds or any(s not in a or (second and s not in b) for s in seeds):
        return 0.0
    splits = primary_splits(a[seeds[0]])
    total = 0.0
    for split in splits:
        if not shares_problems([a[s] for s in seeds], split):
            continue
        rows = []
        for seed in seeds:
            name = f"pass@{largest_k(a[seed])}" if metric == "pass_max" else PROBLEM_METRICS[metric]
            values = split_metric(a[seed], split, name)
            other = split_metric(b[seed], split, name) if second else 0.0
            if values is None or other is None or (second and len(other) != len(values)):
                return 0.0
            rows.append(values - other)
        total += shared_problem_variance(np.stack(rows)) / len(splits) ** 2
    return total
