"""The answer first: the headline table, one sentence a method, and the question answered in words with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tepo_core.analysis.book import Book, with_base
from tepo_core.analysis.metrics import METRICS
from tepo_core.runs.folder import BASE

LEVELS = ("accuracy", "greedy", "pass_max", "long_accuracy", "curve_mean", "entropy_end", "entropy_kept")


def headline_table(book: Book) -> pd.DataFrame:
    """One row a task and method: levels and paired differences, each with low and high where an interval exists.

    Levels and gain (accuracy over the base policy): hierarchical bootstrap over seeds and problems. difference: accuracy over
    the reference method, with the paired t interval that decides verdicts. time_ratio: rollouts to where the
    reference ended, over the reference's. rollouts_to_target: mean, cut at the horizon; reached: seeds that got there."""
    rows = []
    times = book.tables["times"]
    for task in book.tasks:
        for method in with_base(book.methods):
            seeds = len(book.seeds(task, method, "accuracy")) or len(book.seeds(task, method, "reward_end"))
            if not seeds:
                continue
            row: dict = {"task": task, "method": method, "seeds": seeds}
            for metric in LEVELS:
                _put(row, metric, book.level(task, method, metric), "boot_")
            _put(row, "gain", book.pair(task, method, BASE, "accuracy"), "boot_")
            _put(row, "difference", book.pair(task, method, book.reference, "accuracy") if book.reference else None)
            mine = times[(times["task"] == task) & (times["method"] == method)]
            if len(mine):
                time = mine.iloc[0]
                row |= {"rollouts_to_target": time["mean_restricted"], "reached": int(time["reached"])}
                _put(
                    row,
                    "time_ratio",
                    time[["own_ratio", "own_ratio_low", "own_ratio_high"]].set_axis(["estimate", "low", "high"]),
                )
            rows.append(row)
    names = [f"{m}{s}" for m in [*LEVELS, "gain", "difference", "time_ratio"] for s in ("", "_low", "_high")]
    table = pd.DataFrame(rows, columns=["task", "method", "seeds", *names, "rollouts_to_target", "reached"])
    return table.astype({"reached": "Int64"})


def _put(row: dict, name: str, found: pd.Series | None, kind: str = "") -> None:
    for suffix, key in (("", "estimate"), ("_low", f"{kind}low"), ("_high", f"{kind}high")):
        row[name + suffix] = None if found is None else found[key]


def number(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """A number for a sentence; an en dash where there is none."""
    if value is None or pd.isna(value):
        return "–"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "−")


def between(low: float | None, high: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """An interval for a sentence: `` [low, high]``, or empty where there is none."""
    if low is None or high is None or pd.isna(low) or pd.isna(high):
        return ""
    return f" [{number(low, digits, sign=sign)}, {number(high, digits, sign=sign)}]"


def decided(found: pd.Series | None) -> str:
    """``higher``, ``lower``, ``undecided``, or ``unknown`` where there is no interval."""
    if found is None or pd.isna(found["low"]) or pd.isna(found["high"]):
        return "unknown"
    return "higher" if found["low"] > 0 else "lower" if found["high"] < 0 else "undecided"


WORDS = {
    "higher": "is better than", "lower": "is worse than", "undecided": "cannot be told apart from",
    "unknown": "cannot be judged against",
}  # fmt: skip


def answer(book: Book) -> list[str]:
    """Does a token-level objective beat the reference? One sentence a task for each subject of the study, then what it
    rests on."""
    out = []
    reference = book.reference
    subjects = [m for m in ("tepo", "tepo_kl", "mpo") if m in book.methods] or [m for m in book.methods if m != reference]
    for task in book.tasks:
        for method in subjects:
            found = book.pair(task, method, reference, "accuracy") if reference else None
            if found is None:
                continue
            text = (
                f"On {task}, {method} {WORDS[decided(found)]} {reference}: held-out accuracy differs by "
                f"{number(found['estimate'], sign=True)}{between(found['low'], found['high'], sign=True)}, "
                f"{int(found['n'])} {'seed' if found['n'] == 1 else 'seeds'}"
            )
            if decided(found) == "unknown":
                text += f" ({found['reason']}, so no interval)"
            if decided(found) == "undecided" and pd.notna(found["seeds_needed"]):
                text += f"; if the true difference is the one observed, about {int(found['seeds_needed'])} seeds would show it"
            elif decided(found) == "undecided":
                text += "; more than a thousand seeds would be needed to show a difference this small"
            out.append(text + ".")
    if not out:
        out = ["No pair of methods shares a seed, so nothing can be compared.", *single_run_sentences(book.tables["gains"])]
    return out


def single_run_sentences(gains: pd.DataFrame) -> list[str]:
    """For a study with one seed: what its runs gained on the problems they were asked, and what that does not say."""
    rows = gains[gains["metric"] == "accuracy"]
    if rows.empty or rows["seed"].nunique() != 1:
        return []
    return [
        f"On {row.task}, the run of {row.method} answers {number(row.run)} of the samples on split {row.split} right, its base "
        f"policy {number(row.base)}: {number(row.gain, sign=True)}{between(row.low, row.high, sign=True)}. With one seed the "
        f"interval is over {row.problems} problems alone: it speaks of this run, not of the method."
        for row in rows.itertuples()
    ]


def credit_sentences(book: Book) -> list[str]:
    """Where credit falls, in words, for tasks that know their decisive tokens: gradient of the logits, and what clipping hits."""
    out = []
    for task in book.tasks:
        share = {m: book.level(task, m, "tokens_decisive") for m in book.trained(task)}
        share = {m: float(row["estimate"]) for m, row in share.items() if row is not None}
        if not share:
            continue
        text = f"On {task}, decisive tokens are {100 * sum(share.values()) / len(share):.1f} % of all tokens"
        for name, words in (
            ("gradient", "get {} times their share of the gradient in the logits"),
            ("clip", "and {} times their share of the clipping"),
        ):
            found = {m: book.level(task, m, f"{name}_focus") for m in share}
            found = {m: float(row["estimate"]) for m, row in found.items() if row is not None}
            if found:
                low, high = min(found, key=found.get), max(found, key=found.get)
                span = f"{number(found[low], 1)} ({low})"
                if len(found) > 1:
                    span = f"between {span} and {number(found[high], 1)} ({high})"
                text += (", " if name == "gradient" else " ") + words.format(span)
        out.append(text + ".")
    return out


def sentences(book: Book) -> list[dict]:
    """One sentence a task and method: accuracy, gain over the base, difference from the reference, entropy, speed."""
    out = []
    for row in headline_table(book).to_dict("records"):
        task, method = row["task"], row["method"]
        parts = [f"accuracy {number(row['accuracy'])}{between(row['accuracy_low'], row['accuracy_high'])}"]
        if method != BASE:
            parts[0] += (
                f", {number(row['gain'], sign=True)}{between(row['gain_low'], row['gain_high'], sign=True)} over the "
                "base policy"
            )
            if method != book.reference:
                difference = number(row["difference"], sign=True)
                parts.append(
                    f"{difference}{between(row['difference_low'], row['difference_high'], sign=True)} from {book.reference}"
                )
            if pd.notna(row["entropy_kept"]):
                parts.append(f"keeps {100 * row['entropy_kept']:.0f} % of its entropy")
            parts += collapses(book, task, method)
            if pd.notna(row["rollouts_to_target"]):
                parts.append(reaching(row, book.study.analyse.target_accuracy))
        out.append({"task": task, "method": method, "text": "; ".join(parts) + "."})
    return out


def reaching(row: Mapping[str, Any], target: float) -> str:
    """How many seeds reach the target accuracy, and when. A mean over seeds that never do is no time, so none is given."""
    reached, seeds = int(row["reached"]), int(row["seeds"])
    if not reached:
        return f"no seed reaches {target:g}"
    others = "" if reached == seeds else ", the others counted at their last"
    return f"{reached} of {seeds} seeds reach {target:g} ({number(row['rollouts_to_target'], 0)} rollouts on average{others})"


def collapses(book: Book, task: str, method: str) -> list[str]:
    """Seeds in which the stated rule says "collapsed", with the step and the reward at that step: a solved task has little
    entropy left, and only the reward tells the two apart."""
    runs = book.tables["runs"]
    runs = runs[(runs["task"] == task) & (runs["method"] == method) & runs["collapse_step"].notna()]
    out = []
    for kind, rows in runs.groupby("collapse_kind", sort=True):
        rule = book.study.analyse.collapse_entropy_share if kind == "entropy" else book.study.analyse.collapse_reward_share
        step, reward = rows["collapse_step"].min(), rows["collapse_reward"].mean()
        whose = "start" if kind == "entropy" else "peak"
        out.append(
            f"{kind} falls below {100 * rule:g} % of its {whose} in {len(rows)} seed{'s' if len(rows) > 1 else ''}, "
            f"first at rollout {step:.0f} (training reward there {number(reward, 2)})"
        )
    return out


def metric_help() -> dict[str, str]:
    """What each number means, for the report's tables."""
    return {m.name: m.meaning for m in METRICS.values()}
