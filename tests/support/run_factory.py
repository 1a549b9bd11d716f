"""Synthetic runs in the run format, with known truth, for tests of the analysis and the report.

A run's reward rises as ``start + gain (1 - exp(-s / tau))`` and its entropy follows the law R = -a exp(H) + b exactly
where ``noise`` is 0, so tests know what the analysis must find. Nothing here trains a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from tepo_core import config
from tepo_core.evaluation import samples as evaluation
from tepo_core.files import write_json
from tepo_core.runs import folder as run_record
from tepo_core.runs.config import run_config
from tepo_core.runs.metrics import metric_line
from tepo_core.seeding import numpy_generator
from tepo_core.tasks.arithmetic import plant_facts, token_kinds
from tepo_core.tasks.problem import TOKEN_KINDS

TOKEN_SHARE = {"decisive": 0.05, "digit": 0.15, "copied": 0.4, "format": 0.4}


@dataclass(frozen=True)
class Truth:
    """What a method's runs are made of. ``decisive``: share of the gradient weight on decisive tokens; ``clip``, ``mask``:
    shares of tokens."""

    start: float = 0.3
    gain: float = 0.5
    tau: float = 20.0
    entropy_start: float = 0.4
    entropy_end: float = 0.05
    decisive: float = 0.4
    clip: float = 0.02
    mask: float = 0.0
    fell: float = 0.6
    noise: float = 0.0
    seed_shift: float = 0.02

    def reward(self, step: np.ndarray | float, shift: float) -> np.ndarray:
        return np.clip(self.start + shift + self.gain * (1 - np.exp(-np.asarray(step, dtype=float) / self.tau)), 0.0, 1.0)

    def entropy(self, step: np.ndarray | float) -> np.ndarray:
        """Inverts the law whose reward goes from ``start`` at ``entropy_start`` towards ``start + gain`` at ``entropy_end``."""
        share = 1 - np.exp(-np.asarray(step, dtype=float) / self.tau)
        high, low = np.exp(self.entropy_start), np.exp(self.entropy_end)
        return np.log(high - (high - low) * share)


DEFAULT = {
    "grpo": Truth(),
    "dapo": Truth(gain=0.52, tau=15.0),
    "gspo": Truth(gain=0.5, tau=22.0, clip=0.12),
    "kl_cov": Truth(gain=0.45, tau=25.0, entropy_end=0.2),
    "tepo": Truth(gain=0.55, tau=12.0, clip=0.1, decisive=0.5),
    "tepo_kl": Truth(gain=0.5, tau=18.0, mask=0.08, entropy_end=0.1),
    "mpo": Truth(gain=0.5, tau=20.0),
}


def make_study(**changes) -> config.Study:
    """A small valid study; keyword arguments replace top-level groups (mappings are merged into the defaults)."""
    values = {
        "profile": "quick",
        "tasks": ["facts"],
        "methods": ["grpo", "dapo", "tepo"],
        "seeds": [0, 1, 2],
        "train": {
            "rollouts": 40,
            "validate_every": 5,
            "record_every": 10,
            "minibatches": 2,
            "epochs": 2,
            "prompts_per_rollout": 4,
            "group_size": 4,
        },
        "evaluate": {"splits": ["test", "long"], "samples": 4, "k": [1, 2, 4]},
        "data": {"test_size": 20, "long_size": 10},
        "analyse": {"bootstrap": 200},
    }
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(values.get(key), dict) and isinstance(value, Mapping) else value
    return config.parse_study(values)


def make_runs(root: Path, study: config.Study, truths: Mapping[str, Truth] | None = None) -> None:
    """Write warm-ups, trainings and evaluations of every declared combination below ``root``/runs."""
    truths = {**DEFAULT, **(truths or {})}
    for task in study.tasks:
        for seed in study.seeds:
            make_warmup(root, study, task, seed)
            base = replace(truths[study.methods[0]], gain=0.0, noise=0.0)
            make_evaluation(root, study, task, "base", seed, base)
            for method in study.methods:
                truth = truths.get(method, Truth())
                make_run(root, study, task, method, seed, truth)
                make_evaluation(root, study, task, method, seed, truth)


def seed_shift(task: str, seed: int, truth: Truth) -> float:
    """How much better or worse all methods of a seed are: the base policies differ."""
    return float(numpy_generator(task, seed, "shift").normal() * truth.seed_shift)


def make_warmup(root: Path, study: config.Study, task: str, seed: int) -> Path:
    folder = run_record.run_folder(root, "warmup", task, seed)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", run_config(study, "warmup", task, seed))
    (folder / "metrics.jsonl").write_text(metric_line("warmup", 1, {"loss": (2.0, 1.0)}, {}), encoding="utf-8")
    run_record.finish(folder)
    return folder


def make_run(
    root: Path, study: config.Study, task: str, method: str, seed: int, truth: Truth, folder: Path | None = None
) -> Path:
    """One training run."""
    folder = folder or run_record.run_folder(root, "train", task, seed, method)
    folder.mkdir(parents=True)
    train = study.train_for(method)
    preset = study.variants.get(method, {}).get("preset", method)
    extra = {"preset": preset, "objective": {}, "train": train.model_dump(), "rollout": study.rollout.model_dump()}
    write_json(folder / "config.json", run_config(study, "train", task, seed, method, **extra))
    rng = numpy_generator(task, method, seed, "factory")
    shift = seed_shift(task, seed, truth)
    lines = [_validation_line(task, 0, truth, shift, rng)]
    for step in range(1, train.rollouts + 1):
        lines.append(_rollout_line(step, train, truth, shift, rng))
        lines += [_update_line(step, u, train, truth, rng) for u in range(1, train.minibatches * train.epochs + 1)]
        if train.validate_every and step % train.validate_every == 0:
            lines.append(_validation_line(task, step, truth, shift, rng))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    tokens, responses = _records(task, seed, train, truth, rng)
    tokens.to_parquet(folder / "tokens.parquet")
    responses.to_parquet(folder / "responses.parquet")
    if task.startswith("facts"):
        _fact_records(task, seed, train, truth, rng).to_parquet(folder / "facts.parquet")
    run_record.finish(folder)
    return folder


def _noisy(value: float, truth: Truth, rng: np.random.Generator) -> float:
    return float(value + truth.noise * rng.normal()) if truth.noise else float(value)


def _rollout_line(step: int, train: config.Train, truth: Truth, shift: float, rng: np.random.Generator) -> str:
    n = train.prompts_per_rollout * train.group_size
    reward = _noisy(truth.reward(step - 1, shift), truth, rng)
    entropy = float(truth.entropy(step - 1)) * (1 + shift)
    tokens = 20 * n
    sums = {
        "reward": (reward * n, n),
        "correct": (reward * n, n),
        "format": (0.98 * n, n),
        "truncated": (0.01 * n, n),
        "length": (tokens, n),
        "entropy": (entropy * tokens, tokens),
        "entropy_sampled": (entropy * tokens * 1.01, tokens),
        "zero_variance": (reward * train.prompts_per_rollout / 2, train.prompts_per_rollout),
        "all_correct": (reward * train.prompts_per_rollout / 3, train.prompts_per_rollout),
        "all_wrong": (reward * train.prompts_per_rollout / 6, train.prompts_per_rollout),
    }
    values = {
        "prompts_sampled": train.prompts_per_rollout,
        "prompts_kept": train.prompts_per_rollout,
        "responses": n,
        "tokens": tokens,
    }
    return metric_line("rollout", step, sums, values)


def _update_line(step: int, update: int, train: config.Train, truth: Truth, rng: np.random.Generator) -> str:
    tokens = 320
    change = float(truth.entropy(step) - truth.entropy(step - 1)) * (update - 1) / (train.minibatches * train.epochs)
    moved = 0.0 if update == 1 else 1.0
    spread = 0.05 * moved
    sums = {
        "entropy": (float(truth.entropy(step - 1) + change) * tokens, tokens),
        "entropy_change": (change * tokens, tokens),
        "kl_old": (0.002 * moved * tokens, tokens),
        "log_ratio": (0.0, tokens),
        "abs_log_ratio": (spread * tokens, tokens),
        "log_ratio_sq": (spread**2 * tokens, tokens),
        "ratio": (tokens, tokens),
        "ratio_dev_sq": (spread**2 * tokens, tokens),
        "clip": (truth.clip * moved * tokens, tokens),
        "clip_low": (truth.clip * moved * tokens / 4, tokens),
        "clip_high": (truth.clip * moved * tokens * 3 / 4, tokens),
        "kl_penalty": (0.001 * moved * truth.mask * tokens, tokens),
        "mask": (truth.mask * moved * tokens, tokens),
        "mask_kl": (0.001 * moved * truth.mask * tokens, truth.mask * moved * tokens),
        "positive": (tokens / 2, tokens),
        "positive_entropy_fell": (truth.fell * moved * tokens / 2, tokens / 2 * moved),
        "covariance": (-change * 1e3 * tokens, tokens),
    }
    total = 10.0
    for kind in TOKEN_KINDS:
        share = truth.decisive if kind == "decisive" else (1 - truth.decisive) / 3
        count = TOKEN_SHARE[kind] * tokens
        sums[f"gradient@{kind}"] = (share * total, total)
        sums[f"tokens@{kind}"] = (count, tokens)
        sums[f"entropy_change@{kind}"] = (change * tokens * share, count)
        sums[f"clip@{kind}"] = (truth.clip * moved * count, count)
        sums[f"mask@{kind}"] = (truth.mask * moved * count, count)
    values = {
        "loss": 0.01,
        "grad_norm": _noisy(0.5, truth, rng),
        "lr": 1e-4,
        "ratio_max": 1 + 3 * spread,
        "ratio_min": 1 - 3 * spread,
    }
    return metric_line("update", step, sums, values, update=update)


def _validation_line(task: str, step: int, truth: Truth, shift: float, rng: np.random.Generator) -> str:
    p = _noisy(truth.reward(step, shift), truth, rng)
    sums = {"greedy": (p * 128, 128), "sample": (p * 0.95 * 512, 512), "format": (128, 128)}
    if task.startswith("facts"):
        sums["fact_correct"] = (max(p - truth.start, 0) * 52, 52)
    return metric_line("validation", step, sums, {})


def _records(
    task: str, seed: int, train: config.Train, truth: Truth, rng: np.random.Generator
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Token and response records: short chains whose digit after ``=`` is right with the reward's probability."""
    facts = plant_facts(task, seed) if task.startswith("facts") else {}
    tokens, responses = [], []
    steps = [s for s in range(1, train.rollouts + 1) if train.record_every and (s - 1) % train.record_every == 0]
    for step in steps:
        p = float(truth.reward(step - 1, 0.0))
        for response in range(4):
            a, b = int(rng.integers(10)), int(rng.integers(1, 10))
            right = bool(rng.random() < p)
            digit = (a + b) % 10 if right else (a + b + 1) % 10
            pieces = [str(a), "+", str(b), "=", str(digit), "\\boxed{", str(digit), "}", ""]
            kinds = token_kinds(pieces, facts)
            responses.append(
                (
                    step,
                    response,
                    f"p{response}",
                    f"{a}+{b}=",
                    "".join(pieces),
                    float(right),
                    "correct" if right else "wrong",
                    "stop",
                    9,
                )
            )
            for position, (text, (kind, fact)) in enumerate(zip(pieces, kinds, strict=True)):
                old = float(truth.entropy(step - 1)) * (2.0 if kind == "decisive" else 0.5)
                fell = rng.random() < truth.fell
                entropy = old * (0.9 if fell else 1.05)
                logprob_old = -float(rng.exponential(old))
                logprob = min(logprob_old + (0.05 if right else -0.05), -1e-4)
                tokens.append(
                    (
                        step,
                        4,
                        response,
                        f"p{response}",
                        position,
                        ord(text[0]) if text else 1,
                        text,
                        kind,
                        logprob_old,
                        logprob,
                        old,
                        entropy,
                        float(np.exp(logprob - logprob_old)),
                        0.7 if right else -0.7,
                        right and fell and truth.mask > 0,
                        bool(rng.random() < truth.clip),
                        abs(logprob) / 100,
                        right,
                        fact,
                    )
                )
    token_names = [
        "step",
        "update",
        "response",
        "prompt_id",
        "position",
        "token_id",
        "text",
        "kind",
        "logprob_old",
        "logprob",
        "entropy_old",
        "entropy",
        "ratio",
        "advantage",
        "mask",
        "clipped",
        "gradient",
        "correct",
        "fact",
    ]
    response_names = ["step", "response", "prompt_id", "prompt", "text", "reward", "outcome", "finish", "length"]
    return pd.DataFrame(tokens, columns=token_names), pd.DataFrame(responses, columns=response_names)


def _fact_records(task: str, seed: int, train: config.Train, truth: Truth, rng: np.random.Generator) -> pd.DataFrame:
    """Probability of the right digit of every fact at each validation; facts planted with a higher chance are corrected
    sooner."""
    rows = []
    for step in range(0, train.rollouts + 1, train.validate_every or train.rollouts):
        for key, fact in sorted(plant_facts(task, seed).items()):
            prob = (
                0.98
                if not fact.bad
                else float(np.clip(fact.p_right + truth.gain * step / train.rollouts * (0.5 + 3 * fact.p_right), 0, 1))
            )
            rows.append((step, key, fact.bad, fact.p_right, prob, int(prob > 0.5)))
    return pd.DataFrame(rows, columns=["step", "fact", "bad", "p_right", "prob_right", "correct"])


def make_evaluation(
    root: Path, study: config.Study, task: str, method: str, seed: int, truth: Truth, folder: Path | None = None
) -> Path:
    """One evaluated policy: every problem's accuracy is drawn around the reward at the end of training."""
    folder = folder or run_record.run_folder(root, "evaluate", task, seed, method)
    rng = numpy_generator(task, seed, "problems")  # the same problems for every method of a seed
    p = float(truth.reward(study.train.rollouts, seed_shift(task, seed, truth)))
    rows = []
    for split in study.evaluate.splits:
        size = study.data.long_size if split == "long" else study.data.test_size
        ease = rng.normal(size=size)
        for i in range(size):
            chance = float(np.clip(p - (0.1 if split == "long" else 0.0) + 0.15 * ease[i], 0.0, 1.0))
            draws = numpy_generator(task, method, seed, split, i)
            for sample in range(-1, study.evaluate.samples):
                right = bool(draws.random() < chance)
                rows.append(
                    {
                        "split": split,
                        "problem_id": f"{task}-s{seed}-{split}-{i:05d}",
                        "sample": sample,
                        "gold": "9",
                        "finish": "stop",
                        "outcome": "correct" if right else "wrong",
                        "extracted": "9" if right else "1",
                        "token_ids": [1, 2, 3],
                        "length": 3,
                        "text": "4+5=9\\boxed{9}" if right else "4+5=1\\boxed{1}",
                        "logprob_sum": -1.0,
                        "entropy_mean": float(truth.entropy(study.train.rollouts)),
                    }
                )
    samples = pa.Table.from_pylist(rows, schema=evaluation.SCHEMA)
    summary = evaluation.summarise(samples, study.evaluate.k, {"temperature": study.evaluate.temperature})
    evaluation.write_evaluation(folder, samples, summary, run_config(study, "evaluate", task, seed, method))
    return folder
