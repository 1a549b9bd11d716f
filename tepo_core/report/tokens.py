"""The token view: chosen responses of the runs, every token with its entropy, ratio, advantage and mask."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tepo_core.runs.folder import run_name
from tepo_core.runs.read import RunSet

FIELDS = ("entropy", "entropy_change", "ratio", "advantage", "mask", "clipped", "gradient")
"""What tokens can be shaded by. ``entropy`` is that of the sampling policy."""
EACH = 2
"""Responses shown of each outcome at each moment."""
LONGEST = 400
"""Tokens of a response that are shown; longer ones say that they are cut."""


def token_view(runs: RunSet, tasks: Iterable[str], data: Path) -> list[dict]:
    """Responses of one seed a method: right and wrong ones, at the first and the last recorded rollout, to the same prompts where both
    have some in common.

    Each: task, method, seed, moment (before | after), step, correct, prompt, cut, tokens (columns text, kind and
    :data:`FIELDS`). ``data``: folder of the prepared problems, for prompts."""
    shown = []
    for task in tasks:
        for method in runs.methods:
            for seed, run in runs.of(task, method).items():
                found = _of_run(run.folder, data / run_name(task, seed) / "train.jsonl")
                if found:
                    shown += [{"task": task, "method": method, "seed": seed, **view} for view in found]
                    break  # one seed is enough to look at
    return shown


def _prompts(folder: Path, problems: Path, wanted: set[str]) -> dict[str, str]:
    """Prompt of each wanted problem id: from the run's recorded responses, else from the problems it was trained on."""
    found: dict[str, str] = {}
    if (folder / "responses.parquet").is_file():
        table = pq.read_table(folder / "responses.parquet", columns=["prompt_id", "prompt"]).to_pandas()
        found = dict(zip(table["prompt_id"].astype(str), table["prompt"].astype(str), strict=True))
    if wanted - set(found) and problems.is_file():
        with problems.open(encoding="utf-8") as lines:
            found |= {record["id"]: record["prompt"] for record in map(json.loads, lines) if record["id"] in wanted}
    return found


def _of_run(folder: Path, problems: Path) -> list[dict]:
    tokens_path = folder / "tokens.parquet"
    if not tokens_path.is_file():
        return []
    tokens = pq.read_table(tokens_path).to_pandas()
    if not len(tokens):
        return []
    steps = sorted(tokens["step"].unique())
    views, prompt_ids = [], []
    ends = [set(tokens.loc[tokens["step"] == step, "prompt_id"].astype(str)) for step in (steps[0], steps[-1])]
    shared = ends[0] & ends[1]
    for moment, step in dict.fromkeys((("before", steps[0]), ("after", steps[-1]))):
        here = tokens[tokens["step"] == step]
        for correct in (True, False):
            for response in _chosen(here[here["correct"] == correct], shared):
                rows = here[here["response"] == response].sort_values("position")
                prompt_ids.append(str(rows["prompt_id"].iloc[0]))
                views.append({"moment": moment, "step": int(step), "correct": correct, "cut": len(rows) > LONGEST})
                views[-1]["tokens"] = _columns(rows.head(LONGEST))
    prompts = _prompts(folder, problems, set(prompt_ids))
    return [{**view, "prompt": prompts.get(i, i)[-600:]} for view, i in zip(views, prompt_ids, strict=True)]


def _chosen(tokens: pd.DataFrame, shared: set[str]) -> list[int]:
    """The first responses of one moment and outcome; those to prompts that the other moment has, too, in the prompts' order, before the
    others."""
    pairs = tokens[["response", "prompt_id"]].drop_duplicates().astype({"prompt_id": str})
    order = sorted((p not in shared, p if p in shared else "", int(r)) for r, p in pairs.itertuples(index=False))
    return [response for *_, response in order[:EACH]]


def _columns(rows: pd.DataFrame) -> dict[str, list]:
    rows = rows.assign(entropy_change=rows["entropy"] - rows["entropy_old"])
    rows = rows.assign(entropy=rows["entropy_old"])
    columns: dict[str, list] = {
        "text": [str(t) for t in rows["text"]],
        "kind": ["" if pd.isna(k) else str(k) for k in rows["kind"]],
    }
    for name in FIELDS:
        values = rows[name].to_numpy(dtype=float) if name in rows else np.full(len(rows), np.nan)
        columns[name] = [None if not np.isfinite(v) else float(f"{v:.4g}") for v in values]
    return columns


COLOURS = {True: "213,94,0", False: "0,114,178"}


def shade(tokens: pd.DataFrame, field: str) -> str:
    """A response as HTML for a notebook, every token shaded by ``field``; pointing at a token shows its numbers.

    ``tokens``: the rows of tokens.parquet of one response. ``ratio`` is shaded by its distance from 1; orange is above,
    blue below. Raises ``ValueError`` for a field that is not recorded."""
    if field not in FIELDS:
        raise ValueError(f"field = {field!r}; allowed: {', '.join(FIELDS)}")
    rows = tokens.sort_values("position")
    columns = _columns(rows)
    centre = 1.0 if field == "ratio" else 0.0
    sizes = [abs(v - centre) for v in columns[field] if v is not None]
    top = max([*sizes, 1e-12])
    parts = []
    for i, text in enumerate(columns["text"]):
        value = columns[field][i]
        strength = 0.0 if value is None else 0.75 * abs(value - centre) / top
        colour = COLOURS[value is None or value >= centre]
        title = escape(", ".join(f"{name} {columns[name][i]}" for name in ("kind", *FIELDS)))
        parts.append(f'<span title="{title}" style="background:rgba({colour},{strength:.3f})">{escape(text) or "∎"}</span>')
    return f'<p style="font-family:monospace;font-size:1.1em;line-height:2">{"".join(parts)}</p>'
