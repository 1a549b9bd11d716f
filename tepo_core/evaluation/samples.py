"""Evaluation of a policy: every sample is kept, and every number is computed from the kept samples.

``evaluate_policy`` samples and grades; ``summarise`` turns samples into numbers; ``regrade`` grades kept samples again. So
another k, another grader or another statistic never samples again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tepo_core.config import Evaluate
from tepo_core.evaluation.passk import check_k, majority_at_k, pass_at_k
from tepo_core.files import write_json
from tepo_core.grading.exact import canonical_integer
from tepo_core.grading.types import Grader, Outcome
from tepo_core.model.text import prompt_ids, response_text
from tepo_core.rollout.graded import sample_and_grade
from tepo_core.rollout.types import Engine, SamplingParams
from tepo_core.runs.folder import DONE, finish
from tepo_core.seeding import derive_seed
from tepo_core.tasks.problem import DataError, Problem

GREEDY = -1  # sample number of the greedy answer
SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("problem_id", pa.string()),
        ("sample", pa.int32()),  # -1 is the greedy answer
        ("outcome", pa.string()),  # a value of grading.grade.Outcome
        ("extracted", pa.string()),  # the answer that was graded, null without one
        ("token_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("length", pa.int32()),  # tokens, EOS included
        ("logprob_sum", pa.float64()),  # nats, under the tempered distribution
        ("entropy_mean", pa.float64()),  # nats a token; null where the engine does not give it
        ("finish", pa.string()),  # stop | length | prompt_too_long
        ("gold", pa.string()),
    ]
)
# METHODS of the papers: AIME and AMC averaged over 32 samples at T = 0.6, the other sets greedy (arXiv 2505.22617, section 4).
PAPER_SAMPLED = ("aime24", "aime25", "amc23", "amc83")


@dataclass(frozen=True)
class Settings:
    """How one split is sampled. ``samples = 0`` means the greedy answer alone."""

    samples: int
    k: tuple[int, ...]
    temperature: float
    top_p: float
    max_new_tokens: int
    greedy: bool

    def __post_init__(self) -> None:
        if self.samples < 0 or (self.samples == 0 and not self.greedy):
            raise ValueError(f"samples = {self.samples} with greedy = {self.greedy}: nothing to sample; raise samples")
        if self.samples:
            check_k(self.samples, self.k)
        if self.samples and not self.temperature > 0:
            raise ValueError(
                f"temperature = {self.temperature} with samples = {self.samples}: at temperature 0 all samples are the same; "
                "set greedy = true for the greedy answer, and temperature > 0 for the samples"
            )


def settings_for(cfg: Evaluate, split: str) -> Settings:
    """Sampling settings of one split. Protocol ``study`` takes them from ``cfg``; ``paper`` is the papers' own: avg@32 at
    T = 0.6, top-p 1 for AIME and AMC, one greedy answer for every other set (lengths still from ``cfg``)."""
    if cfg.protocol == "study":
        return Settings(cfg.samples, tuple(cfg.k), cfg.temperature, cfg.top_p, cfg.max_new_tokens, cfg.greedy)
    if split in PAPER_SAMPLED:
        return Settings(32, (1, 2, 4, 8, 16, 32), 0.6, 1.0, cfg.max_new_tokens, False)
    return Settings(0, (), 1.0, 1.0, cfg.max_new_tokens, True)


def evaluate_policy(
    engine: Engine,
    tokenizer: Any,
    problems_by_split: Mapping[str, Sequence[Problem]],
    grader: Grader | Mapping[str, Grader],
    cfg: Evaluate,
    seed_labels: Sequence[str | int],
    progress: Callable[[int, int, str], None] | None = None,
    *,
    encode: Callable[[str], list[int]] | None = None,
    decode: Callable[[list[int]], str] | None = None,
    context: int | None = None,
    rows_at_once: int = 4096,
) -> pa.Table:
    """Sample and grade every problem; one row a response (columns: :data:`SCHEMA`), in the order of the problems.

    ``grader`` is one for all splits or one a split. ``encode`` turns a prompt into token ids and ``decode`` a response into
    text (default: :mod:`tepo_core.model.text` with the tokenizer's EOS). ``context`` is the model's window in tokens: a
    prompt that leaves less room than ``max_new_tokens`` is sampled with the room there is; one that leaves none is not asked
    and recorded as outcome ``error``, finish ``prompt_too_long``. Prompts are never cut. ``seed_labels`` name the stream of
    random numbers; the seed of a problem depends on them, its split and its id, not on its neighbours. ``progress(done,
    total, split)`` is called after each batch of at most ``rows_at_once`` responses. Raises :class:`DataError` on an empty
    split or repeated ids.
    """
    encode = encode or (lambda prompt: prompt_ids(tokenizer, prompt))
    decode = decode or (lambda ids: response_text(tokenizer, ids, {tokenizer.eos_token_id}))
    for split, problems in problems_by_split.items():
        check_problems(split, problems)
    plans = {split: settings_for(cfg, split) for split in problems_by_split}
    tables = []
    for split, problems in problems_by_split.items():
        split_sampler = SplitSampler(
            engine=engine,
            grader=grader[split] if isinstance(grader, Mapping) else grader,
            decode=decode,
            encode=encode,
            split=split,
            problems=problems,
            plan=plans[split],
            seed_labels=tuple(seed_labels),
            context=context,
            rows_at_once=rows_at_once,
            progress=progress,
        )
        tables.append(pa.Table.from_pylist(split_sampler.rows(), schema=SCHEMA))
    return pa.concat_tables(tables)


def check_problems(split: str, problems: Sequence[Problem]) -> None:
    """Raise :class:`DataError` when a split is empty, has an empty answer, or repeats an id."""
    if not problems:
        raise DataError(f"split {split!r} has no problems; remove it from evaluate.splits or prepare it")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise DataError(f"split {split!r}: the id {problem.id!r} occurs twice; ids must be unique")
        if not problem.answer.strip():
            raise DataError(f"split {split!r}, problem {problem.id!r}: the answer is empty")
        seen.add(problem.id)


@dataclass(frozen=True)
class SplitSampler:
    """Samples and grades one split: problems that have the same room for an answer together, the roomiest first."""

    engine: Engine
    grader: Grader
    decode: Callable[[list[int]], str]
    encode: Callable[[str], list[int]]
    split: str
    problems: Sequence[Problem]
    plan: Settings
    seed_labels: tuple[str | int, ...]
    context: int | None
    rows_at_once: int
    progress: Callable[[int, int, str], None] | None

    def rows(self) -> list[dict[str, Any]]:
        """One row a response, in the order of the problems and then of the samples, the greedy answer first."""
        plan, prompts = self.plan, [self.encode(problem.prompt) for problem in self.problems]
        limit = plan.max_new_tokens
        room = [limit if self.context is None else min(limit, self.context - len(prompt)) for prompt in prompts]
        modes = ([(True, 1)] if plan.greedy else []) + ([(False, plan.samples)] if plan.samples else [])
        asked = sorted((i for i in range(len(prompts)) if room[i] >= 1), key=lambda i: (-room[i], i))
        ordered = [
            row for i in range(len(prompts)) if room[i] < 1 for greedy, n in modes for row in self._not_asked(i, greedy, n)
        ]
        total, done = len(asked) * sum(n for _, n in modes), 0
        for greedy, n in modes:
            for size, same_room in groupby(asked, key=lambda i: room[i]):
                group, step = list(same_room), max(1, self.rows_at_once // n)
                params = SamplingParams(1.0 if greedy else plan.temperature, plan.top_p, size, greedy=greedy)
                for start in range(0, len(group), step):
                    chunk = group[start : start + step]
                    ordered += self._sampled(chunk, [prompts[i] for i in chunk], n, params)
                    done += len(chunk) * n
                    if self.progress is not None:
                        self.progress(done, total, self.split)
        return [row for _, row in sorted(ordered, key=lambda pair: (pair[0], pair[1]["sample"]))]

    def _sampled(self, chunk: list[int], prompts: list[list[int]], n: int, params: SamplingParams) -> list[tuple[int, dict]]:
        graded = sample_and_grade(
            self.engine,
            self.grader,
            self.decode,
            prompts=prompts,
            golds=[self.problems[i].answer for i in chunk],
            n=n,
            params=params,
            seeds=[derive_seed(*self.seed_labels, "evaluate", self.split, self.problems[i].id) for i in chunk],
        )
        rollouts, rows = graded.rollouts, []
        for b, (text, grade) in enumerate(zip(graded.texts, graded.grades, strict=True)):
            entropies, order = rollouts.entropies[b], chunk[rollouts.prompt_index[b]]
            known = entropies is not None and len(entropies) > 0
            row = {
                "sample": GREEDY if params.greedy else rollouts.sample_index[b],
                "outcome": grade.outcome.value,
                "extracted": grade.extracted,
                "token_ids": list(rollouts.response_ids[b]),
                "text": text,
                "logprob_sum": float(np.sum(rollouts.logprobs[b], dtype=np.float64)),
                "entropy_mean": float(np.mean(entropies)) if known else None,
                "finish": "stop" if rollouts.finished[b] else "length",
            }
            rows.append((order, self._complete(order, row)))
        return rows

    def _not_asked(self, order: int, greedy: bool, n: int) -> list[tuple[int, dict]]:
        """Rows of a problem whose prompt leaves no room for an answer."""
        row = {
            "outcome": Outcome.ERROR.value,
            "extracted": None,
            "token_ids": [],
            "text": self.decode([]),
            "logprob_sum": 0.0,
            "entropy_mean": None,
            "finish": "prompt_too_long",
        }
        return [(order, self._complete(order, {"sample": s, **row})) for s in ([GREEDY] if greedy else range(n))]

    def _complete(self, order: int, row: dict[str, Any]) -> dict[str, Any]:
        problem = self.problems[order]
        return {"split": self.split, "problem_id": problem.id, "gold": problem.answer, "length": len(row["token_ids"]), **row}


def _grade_rows(rows: list[dict[str, Any]], grader: Grader) -> None:
    asked = [row for row in rows if row["finish"] != "prompt_too_long"]
    grades = grader.grade(
        golds=[row["gold"] for row in asked],
        responses=[row["text"] for row in asked],
        truncated=[row["finish"] == "length" for row in asked],
    )
    for row in rows:
        row["outcome"], row["extracted"] = Outcome.ERROR.value, None
    for row, grade in zip(asked, grades, strict=True):
        row["outcome"], row["extracted"] = grade.outcome.value, grade.extracted


def regrade(samples: pa.Table, grader: Grader | Mapping[str, Grader]) -> pa.Table:
    """The same samples with fresh outcomes. Nothing is sampled; golds are those stored with the samples.

    With one grader a split, splits that the mapping does not name keep their grades."""
    rows = samples.select(["split", "text", "gold", "finish", "outcome", "extracted"]).to_pylist()
    for split in dict.fromkeys(row["split"] for row in rows):
        judge = grader.get(split) if isinstance(grader, Mapping) else grader
        if judge is not None:
            _grade_rows([row for row in rows if row["split"] == split], judge)
    for name in ("outcome", "extracted"):
        index = samples.schema.get_field_index(name)
        samples = samples.set_column(index, SCHEMA.field(name), pa.array([row[name] for row in rows], pa.string()))
    return samples


def summarise(
    samples: pa.Table | pd.DataFrame,
    k: Sequence[int] | Mapping[str, Sequence[int]],
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Numbers of an evaluation, recomputed from its samples alone. ``k``: for all splits, or by split.

    Per split: ``avg`` (mean accuracy over samples, avg@n), ``pass@k`` (unbiased) and ``maj@k`` (expected accuracy of a
    majority vote, see :func:`tepo_core.evaluation.passk.majority_at_k`) for every k, ``greedy``, ``format_rate`` (share of samples with
    an answer in the required form), ``truncation_rate`` (share cut off by the length limit), ``mean_length`` (tokens),
    ``entropy`` (nats a token, over all tokens), ``outcomes`` (counts), ``prompts_too_long``, and ``per_problem``: ids, number
    of correct samples, and greedy 1 or 0. Shares are over the samples, or over the greedy answers where there are no
    samples. Problems that could not be asked count in every denominator. Numbers that do not exist are ``None``.
    Raises ``ValueError`` for k > n and :class:`DataError` when problems have different numbers of samples.
    """
    columns = [name for name in SCHEMA.names if name not in ("token_ids", "text", "gold")]
    frame = samples.select(columns).to_pandas() if isinstance(samples, pa.Table) else samples[columns]
    if not len(frame):
        raise DataError("there are no samples to summarise")
    groups = frame.groupby("split", sort=False)
    splits = {split: _summarise_split(split, part, list(k[split] if isinstance(k, Mapping) else k)) for split, part in groups}
    return {"splits": splits, "settings": dict(settings or {})}


def _summarise_split(split: str, frame: pd.DataFrame, k: list[int]) -> dict[str, Any]:
    ids = list(dict.fromkeys(frame["problem_id"]))
    right = frame["outcome"] == Outcome.CORRECT.value
    drawn, greedy = frame[frame["sample"] >= 0], frame[frame["sample"] == GREEDY]
    counts = drawn.groupby("problem_id", sort=False).size()
    n = int(counts.iloc[0]) if len(counts) else 0
    if len(counts) and (set(counts) != {n} or len(counts) != len(ids)):
        raise DataError(f"split {split!r}: problems have between {counts.min()} and {counts.max()} samples; the file is cut")
    correct = right[drawn.index].groupby(drawn["problem_id"]).sum().reindex(ids, fill_value=0).to_numpy()
    greedy_right = right[greedy.index].groupby(greedy["problem_id"]).sum().reindex(ids)
    if n:
        check_k(n, k)
        votes = {pid: _votes(part) for pid, part in drawn.groupby("problem_id", sort=False)}
    shown = drawn if n else greedy
    tokens = int(shown["length"].sum())
    entropy = (shown["entropy_mean"] * shown["length"]).sum(skipna=True)
    known = shown["entropy_mean"].notna() | (shown["length"] == 0)
    return {
        "problems": len(ids),
        "samples": n,
        "avg": float(correct.mean() / n) if n else None,
        "pass@k": {str(x): float(np.mean(pass_at_k(n, correct, x))) for x in k} if n else {},
        "maj@k": {str(x): float(np.mean([majority_at_k(*votes[i], x) for i in ids])) for x in k} if n else {},
        "greedy": float(greedy_right.mean()) if len(greedy) else None,
        "format_rate": float(shown["extracted"].notna().mean()),
        "truncation_rate": float((shown["finish"] == "length").mean()),
        "mean_length": float(shown["length"].mean()),
        "entropy": float(entropy / tokens) if tokens and known.all() else None,
        "outcomes": {outcome.value: int((shown["outcome"] == outcome.value).sum()) for outcome in Outcome},
        "prompts_too_long": int(frame.loc[frame["finish"] == "prompt_too_long", "problem_id"].nunique()),
        "per_problem": {
            "id": ids,
            "correct": [int(c) for c in correct] if n else [],
            "greedy": [int(g) for g in greedy_right] if len(greedy) else [],
        },
    }


def _votes(part: pd.DataFrame) -> tuple[list[str | None], list[bool]]:
    """Votes and correctness of one problem's samples. Spaces and the writing of integers do not make a new answer."""
    votes: list[str | None] = []
    silent = (Outcome.NO_ANSWER.value, Outcome.TRUNCATED.value, Outcome.ERROR.value)
    for answer, outcome in zip(part["extracted"], part["outcome"], strict=True):
        squeezed = "".join(answer.split()) if isinstance(answer, str) and outcome not in silent else None
        votes.append(None if squeezed is None else canonical_integer(squeezed) or squeezed)
    return votes, (part["outcome"] == Outcome.CORRECT.value).tolist()


def headline(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The one number a split is known by: ``{"metric": "avg@32" | "greedy", "value": ...}``.

    avg@n where samples exist, else greedy, as in the papers' tables. Averages over splits are taken from these cells with
    :func:`average_of_cells`, never copied."""
    cells = {}
    for split, numbers in summary["splits"].items():
        name, key = (f"avg@{numbers['samples']}", "avg") if numbers["samples"] else ("greedy", "greedy")
        cells[split] = {"metric": name, "value": numbers[key]}
    return cells


def average_of_cells(cells: Sequence[float]) -> float:
    """Plain mean of table cells. Raises ``ValueError`` on an empty row."""
    if not len(cells):
        raise ValueError("no cells to average")
    return float(np.mean(np.asarray(cells, dtype=float)))


def write_evaluation(
    folder: Path, samples: pa.Table, summary: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> None:
    """Write ``samples.parquet``, ``summary.json``, ``config.json`` (where given) and, last, ``done.json`` with hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)  # never beside files it does not describe
    pq.write_table(samples, folder / "samples.parquet", compression="zstd", store_schema=False)
    write_json(folder / "summary.json", summary)
    if config is not None:
        write_json(folder / "config.json", config)
    finish(folder, names=[p.name for p in folder.iterdir() if p.name in ("config.json", "samples.parquet", "summary.json")])


def read_samples(folder: Path) -> pa.Table:
    """Samples of an evaluated run. Raises :class:`DataError` when the file is missing, damaged or lacks a column."""
    path = Path(folder) / "samples.parquet"
    if not Path(folder).is_dir():
        raise DataError(f"{folder}: no such run; a run is a folder like runs/evaluate/facts-grpo-s0")
    if not path.is_file():
        raise DataError(f"{path}: no such file; evaluate the run first ('dvc repro evaluate')")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a parquet file ({error}); remove the run and evaluate it again") from None
    missing = [name for name in SCHEMA.names if name not in table.column_names]
    if missing:
        raise DataError(f"{path}: column {missing[0]!r} is missing; expected {', '.join(SCHEMA.names)}")
    return table.select(SCHEMA.names).cast(SCHEMA)


def describe(settings: Mapping[str, Settings]) -> dict[str, Any]:
    """Settings per split as JSON, for ``summary.json``."""
    return {split: {**asdict(plan), "k": list(plan.k)} for split, plan in settings.items()}
