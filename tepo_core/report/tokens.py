"""The token view: chosen responses of the runs, every token with its entropy, ratio, advantage and mask."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from tepo_core.analysis.runs import RunSet

FIELDS = ("entropy", "entropy_change", "ratio", "advantage", "mask", "clipped", "gradient")
"""What tokens can be shaded by. ``entropy`` is that of the sampling policy."""
EACH = 2
"""Responses shown of each outcome at each moment."""
LONGEST = 400
"""Tokens of a response that are shown; longer ones say that they are cut."""


def token_view(runs: RunSet, tasks: Iterable[str]) -> list[dict]:
    """Responses of one seed a method: right and wrong ones, at the first and the last recorded rollout.

    Each: task, method, seed, moment (before | after), step, correct, prompt, cut, tokens (columns text, kind and
    :data:`FIELDS`)."""
    shown = []
    for task in tasks:
        for method in runs.methods:
            for seed, run in runs.of(task, method).items():
                found = _of_run(run.folder)
                if found:
                    shown += [{"task": task, "method": method, "seed": seed, **view} for view in found]
                    break  # one seed is enough to look at
    return shown


def _of_run(folder: Path) -> list[dict]:
    tokens_path, responses_path = folder / "tokens.parquet", folder / "responses.parquet"
    if not tokens_path.is_file():
        return []
    tokens = pq.read_table(tokens_path).to_pandas()
    if not len(tokens):
        return []
    prompts = {}
    if responses_path.is_file():
        table = pq.read_table(responses_path, columns=["step", "response", "prompt"]).to_pandas()
        prompts = dict(zip(zip(table["step"], table["response"], strict=True), table["prompt"], strict=True))
    steps = sorted(tokens["step"].unique())
    views = []
    for moment, step in dict.fromkeys((("before", steps[0]), ("after", steps[-1]))):
        here = tokens[tokens["step"] == step]
        for correct in (True, False):
            chosen = sorted(here.loc[here["correct"] == correct, "response"].unique())[:EACH]
            for response in chosen:
                rows = here[here["response"] == response].sort_values("position")
                views.append(
                    {
                        "moment": moment,
                        "step": int(step),
                        "correct": correct,
                        "prompt": str(prompts.get((step, response), ""))[-600:],
                        "cut": len(rows) > LONGEST,
                        "tokens": _columns(rows.head(LONGEST)),
                    }
                )
    return views


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
