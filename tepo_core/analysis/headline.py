"""The answer first: the headline table, one sentence a method, and the question answered in words with intervals."""

from __future__ import annotations

import pandas as pd

from tepo_core.analysis.metrics import METRICS
from tepo_core.analysis.plotting import Book, with_base
from tepo_core.analysis.runs import BASE

LEVELS = ("accuracy", "greedy", "pass_max", "long_accuracy", "curve_mean", "entropy_end", "entropy_kept")


def headline_table(book: Book) -> pd.DataFrame:
    """One row a task and method: levels and paired differences, each with low and high where an interval exists.

    gain: accuracy over the base policy. difference: accuracy over the reference method. time_ratio: rollouts to where the
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
                _put(row, metric, book.level(task, method, metric))
            _put(row, "gain", book.pair(task, method, BASE, "accuracy"))
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


def _put(row: dict, name: str, found: pd.Series | None) -> None:
    for suffix, key in (("", "estimate"), ("_low", "low"), ("_high", "high")):
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
    return out or ["No pair of methods shares a seed, so nothing can be compared."]


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
            if pd.notna(row["rollouts_to_target"]):
                target = book.study.analyse.target_accuracy
                parts.append(
                    f"{int(row['reached'])} of {row['seeds']} seeds reach {target:g} "
                    f"({number(row['rollouts_to_target'], 0)} rollouts on average)"
                )
        out.append({"task": task, "method": method, "text": "; ".join(parts) + "."})
    return out


def metric_help() -> dict[str, str]:
    """What each number means, for the report's tables."""
    return {m.name: m.meaning for m in METRICS.values()}
