"""The ``evaluate`` stage: sample and grade every problem of the configured splits with one policy, and keep every sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from tepo_core.config import Study
from tepo_core.evaluation.samples import describe, evaluate_policy, settings_for, summarise, write_evaluation
from tepo_core.grading.graders import make_grader
from tepo_core.model.policy import load_policy, resolve_device, set_threads
from tepo_core.progress import Progress
from tepo_core.rollout.engines import make_engine
from tepo_core.runs.config import run_config
from tepo_core.runs.folder import BASE, run_folder, run_name
from tepo_core.tasks.data import data_folder, grader_kind, load_split


@dataclass(frozen=True)
class EvaluateResult:
    """An evaluated policy."""

    folder: Path
    summary: dict[str, Any]
    samples: pa.Table

    def table(self) -> pd.DataFrame:
        """One row a split: greedy, avg@n, pass@k, format and truncation rates, length, entropy; time-outs and errors, if any:
        they count as not right."""
        rows = {}
        for split, s in self.summary["splits"].items():
            passes = {f"pass@{k}": value for k, value in s["pass@k"].items()}
            named = {"problems": s["problems"], "greedy": s["greedy"], f"avg@{s['samples']}": s["avg"], **passes}
            rest = {name: s[name] for name in ("format_rate", "truncation_rate", "mean_length", "entropy")}
            lost = {name: s["outcomes"][name] for name in ("timeout", "error") if s["outcomes"][name]}
            rows[split] = {**named, **rest, **lost}
        return pd.DataFrame(rows).T

    def examples(self, count: int = 5) -> pd.DataFrame:
        """The first greedy responses of each split with their outcome."""
        frame = self.samples.select(["split", "problem_id", "sample", "gold", "text", "outcome"]).to_pandas()
        return frame[frame["sample"] < 0].groupby("split", sort=False).head(count).drop(columns="sample")


def evaluate_run(study: Study, task: str, method: str, seed: int, root: Path, out: Path | None = None) -> EvaluateResult:
    """Evaluate the policy of a training run, or of the warm-up when ``method`` is ``base``; write ``runs/evaluate/...``.

    Samples depend on the weights, the problem and the seed, so all methods of a seed answer with the same random numbers.
    Raises ``ConfigError`` for a missing policy and ``DataError`` for missing or changed data, before any sampling."""
    cfg, out = study.evaluate, out or run_folder(root, "evaluate", task, seed, method)
    kind = "warmup" if method == BASE else "train"
    source = run_folder(root, kind, task, seed, None if method == BASE else method) / "policy"
    problems = {split: load_split(data_folder(root, task, seed), split)[: cfg.limit or None] for split in cfg.splits}
    set_threads(study)
    policy = load_policy(source, study.policy)
    policy.model.to(resolve_device(study.compute))
    graders = {split: make_grader(grader_kind(split if split in study.data.eval_sets else task)) for split in problems}
    engine = make_engine(study, policy, study.train)
    progress = Progress(sum(len(p) for p in problems.values()), f"evaluate {run_name(task, seed, method)}")
    try:
        samples = evaluate_policy(
            engine,
            policy.tokenizer,
            problems,
            graders,
            cfg,
            seed_labels=(seed, task),
            progress=_reporter(progress, len(problems)),
            encode=policy.encode,
            decode=policy.decode,
            context=policy.context,
            rows_at_once=study.rollout.batch_size,
        )
    finally:
        engine.close()
        for grader in graders.values():
            grader.close()
    settings = {split: settings_for(cfg, split) for split in problems}
    summary = summarise(samples, {split: one.k for split, one in settings.items()}, describe(settings))
    config = run_config(study, "evaluate", task, seed, method, evaluate=cfg.model_dump())
    write_evaluation(out, samples, summary, config)
    return EvaluateResult(out, summary, samples)


def _reporter(progress: Progress, splits: int) -> Any:
    """Progress in responses: each split reports (done, total) of its own."""
    seen: dict[str, int] = {}

    def report(done: int, total: int, split: str) -> None:
        seen[split] = done
        progress.total = total * splits
        progress.update(sum(seen.values()), split=split)

    return report
