"""Tables of the report: what a reader sees in a cell, what it sorts by, and the full numbers as CSV."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from tepo_core.analysis.answer import between, number
from tepo_core.analysis.book import Book, with_base
from tepo_core.analysis.metrics import METRICS
from tepo_core.runs.folder import BASE


@dataclass(frozen=True)
class Cell:
    """``text`` is shown, ``sort`` decides the order; ``tone`` (good, bad, or empty) colours it."""

    text: str
    sort: float | str = ""
    tone: str = ""


@dataclass
class Table:
    """id: anchor and file name of its CSV. columns: (label, help). note: how to read it."""

    id: str
    title: str
    note: str
    columns: list[tuple[str, str]]
    rows: list[list[Cell]] = field(default_factory=list)
    csv: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, for alignment."""
        return [
            all(not isinstance(row[i].sort, str) or row[i].text == "–" for row in self.rows) for i in range(len(self.columns))
        ]


def text_cell(value: Any) -> Cell:
    """A cell of words."""
    return Cell(str(value), str(value))


def number_cell(value: Any, digits: int = 3, *, sign: bool = False) -> Cell:
    """A cell with one number; an en dash sorts last."""
    if value is None or pd.isna(value):
        return Cell("–", float("-inf"))
    return Cell(number(float(value), digits, sign=sign), float(value))


def interval_cell(row: Any, name: str, digits: int = 3, *, sign: bool = False, better: int = 0) -> Cell:
    """Estimate with its interval; coloured where the interval of a difference excludes 0 and a direction is better."""
    estimate, low, high = (row.get(name + suffix) for suffix in ("", "_low", "_high"))
    if estimate is None or pd.isna(estimate):
        return Cell("–", float("-inf"))
    tone = ""
    if sign and better and low is not None and not pd.isna(low):
        tone = "good" if better * low > 0 and better * high > 0 else "bad" if better * low < 0 and better * high < 0 else ""
    return Cell(number(estimate, digits, sign=sign) + between(low, high, digits, sign=sign), float(estimate), tone)


def headline(frame: pd.DataFrame, book: Book, task: str) -> Table:
    """The table under the answer."""
    k = book.study.evaluate.k[-1]
    columns = [
        ("method", ""),
        ("accuracy", METRICS["accuracy"].meaning),
        ("over base", "gain over the base policy of the same seed, paired"),
        (f"from {book.reference}", "difference of accuracy, paired by seed"),
        ("greedy", METRICS["greedy"].meaning),
        (f"pass@{k}", "unbiased pass@k at the largest k"),
        ("entropy kept", METRICS["entropy_kept"].meaning),
        ("entropy at end", METRICS["entropy_end"].meaning),
        ("mean of curve", METRICS["curve_mean"].meaning),
        ("rollouts to target", "mean over seeds of min(rollouts to the target, planned rollouts); seeds that got there"),
        (f"time / {book.reference}", "rollouts to where the reference ended, over the reference's; below 1 is sooner"),
        ("seeds", ""),
    ]
    table = Table(f"headline-{task}", f"Results on {task}", "", columns)
    for row in frame[frame["task"] == task].to_dict("records"):
        to_target = Cell("–", float("inf"))
        if not row["reached"]:
            to_target = Cell(f"not reached (0/{row['seeds']})", float("inf"))
        elif not pd.isna(row["rollouts_to_target"]):
            to_target = Cell(
                f"{row['rollouts_to_target']:.0f} ({int(row['reached'])}/{row['seeds']})",
                float(row["rollouts_to_target"]),
            )
        table.rows.append(
            [
                text_cell(row["method"]),
                interval_cell(row, "accuracy"),
                interval_cell(row, "gain", sign=True, better=1),
                interval_cell(row, "difference", sign=True, better=1),
                interval_cell(row, "greedy"),
                interval_cell(row, "pass_max"),
                interval_cell(row, "entropy_kept"),
                interval_cell(row, "entropy_end", 4),
                interval_cell(row, "curve_mean"),
                to_target,
                interval_cell(row, "time_ratio", 2),
                Cell(str(row["seeds"]), row["seeds"]),
            ]
        )
    return table


RUN_COLUMNS = (
    "accuracy",
    "greedy",
    "pass_max",
    "long_accuracy",
    "curve_mean",
    "rollouts_to_target",
    "entropy_start",
    "entropy_end",
    "entropy_kept",
    "law_r2",
    "law_ceiling",
    "law_error",
    "reward_volatility",
    "reward_drawdown",
    "grad_spikes",
    "clip",
    "mask",
    "fell",
    "gradient_decisive",
    "facts_corrected",
    "collapse_step",
)


def runs(book: Book) -> Table:
    """Every run, so that no seed hides in a mean."""
    frame = book.tables["runs"]
    names = [n for n in RUN_COLUMNS if frame[n].notna().any()]
    columns = [("task", ""), ("method", ""), ("seed", ""), *((METRICS[n].label, METRICS[n].meaning) for n in names)]
    table = Table("runs", "Every run", "One row a run. A dash: not measured, or it never happened.", columns)
    for row in frame.to_dict("records"):
        cells = [text_cell(row["task"]), text_cell(row["method"]), Cell(str(row["seed"]), row["seed"])]
        table.rows.append(cells + [number_cell(row[n], METRICS[n].digits) for n in names])
    return table


def gains(book: Book) -> Table:
    """Every run against its own base policy."""
    note = (
        f"Brackets: {100 * book.study.analyse.confidence:.0f} % bootstrap over problems alone, base and run paired. They speak of "
        "one run and its base policy, not of the method; with one seed they are all there is."
    )
    names = ("task", "method", "seed", "split", "metric", "base", "run", "gain", "problems")
    table = Table("gains", "Every run against its base", note, [(name, "") for name in names])
    for row in book.tables["gains"].to_dict("records"):
        words = [text_cell(row[name]) for name in ("task", "method")]
        words += [Cell(str(row["seed"]), row["seed"]), text_cell(row["split"]), text_cell(row["metric"])]
        both = {"gain": row["gain"], "gain_low": row["low"], "gain_high": row["high"]}
        gained = interval_cell(both, "gain", sign=True, better=1)
        table.rows.append([*words, number_cell(row["base"]), number_cell(row["run"]), gained, number_cell(row["problems"], 0)])
    return table


def evaluation(book: Book) -> Table:
    """Every policy on every split."""
    columns = [
        ("task", ""),
        ("split", ""),
        ("method", ""),
        ("metric", ""),
        ("mean over seeds", "with hierarchical bootstrap over seeds and problems; too narrow where few seeds differ much"),
        ("t interval", "over seeds; very wide with three"),
        ("IQM", "interquartile mean"),
        ("problems", "distinct, over all seeds"),
        ("samples", "a problem"),
        ("seeds", ""),
    ]
    note = "Levels. Differences between methods, paired by seed, are in the next table."
    table = Table("evaluation", "Evaluation, every split", note, columns)
    for row in book.tables["evaluation"].to_dict("records"):
        both = {"x": row["estimate"], "x_low": row["bootstrap_low"], "x_high": row["bootstrap_high"]}
        wide = between(row["low"], row["high"]).strip() or "–"
        cells = [text_cell(row[name]) for name in ("task", "split", "method", "metric")]
        cells += [interval_cell(both, "x"), Cell(wide, wide), number_cell(row["iqm"])]
        table.rows.append(cells + [number_cell(row[name], 0) for name in ("problems", "samples", "n")])
    return table


PAIR_METRICS = (
    "accuracy",
    "greedy",
    "pass_max",
    "long_accuracy",
    "curve_mean",
    "entropy_kept",
    "entropy_end",
    "reward_volatility",
    "reward_drawdown",
    "gradient_decisive",
    "facts_corrected",
)


def pairs(book: Book) -> Table:
    """Paired differences from the reference method, with what they rest on."""
    columns = [
        ("task", ""),
        ("method", ""),
        ("against", ""),
        ("metric", ""),
        ("difference", "paired by seed, with t interval; it decides verdicts"),
        ("bootstrap", "of the same difference, over seeds and problems; too narrow where few seeds differ much"),
        ("seeds better", "share of seeds in which the method is higher; ties count half"),
        ("seeds", ""),
        ("seeds needed", "to show a true difference of this size with power 0.8; an order of magnitude"),
    ]
    table = Table("pairs", "Paired differences", "Green: better with an interval that excludes 0. Red: worse.", columns)
    frame = book.tables["pairs"]
    frame = frame[frame["metric"].isin(PAIR_METRICS) & ((frame["against"] == book.reference) | (frame["metric"] == "accuracy"))]
    for row in frame.to_dict("records"):
        metric = METRICS[row["metric"]]
        both = {"x": row["estimate"], "x_low": row["low"], "x_high": row["high"]}
        drawn = between(row["boot_low"], row["boot_high"], sign=True).strip() or "–"
        needed = (
            Cell("> 1000", float("inf"))
            if pd.isna(row["seeds_needed"]) and row["n"] > 1
            else number_cell(row["seeds_needed"], 0)
        )
        table.rows.append(
            [
                text_cell(row["task"]),
                text_cell(row["method"]),
                text_cell(row["against"]),
                text_cell(metric.label),
                interval_cell(both, "x", max(metric.digits, 3), sign=True, better=metric.better),
                Cell(drawn, drawn),
                number_cell(row["improvement"], 2),
                number_cell(row["n"], 0),
                needed,
            ]
        )
    return table


STABILITY = (
    "reward_volatility",
    "reward_drawdown",
    "grad_volatility",
    "grad_spikes",
    "kl_old",
    "ratio_spread",
    "clip",
    "length_drift",
    "zero_variance",
    "covariance_correlation",
    "law_a",
    "law_b",
    "law_r2",
    "law_ceiling",
    "law_error",
    "fell",
    "fell_uncertain",
    "kl_base",
)


def mechanism(book: Book) -> Table:
    """Stability, drift and the entropy law, a row a method."""
    return _levels(
        book, "stability", "Stability, drift and the entropy law", STABILITY, "Mean over seeds with bootstrap interval."
    )


def credit(book: Book) -> Table | None:
    """Shares of the gradient in the logits, entropy change, clipping and mask by kind of token; ``None`` where the truth is not known."""
    names = [
        f"{what}_{kind}"
        for kind in ("decisive", "digit", "copied", "format")
        for what in ("tokens", "gradient", "entropy", "clip", "mask")
    ]
    if not book.tables["runs"]["gradient_decisive"].notna().any():
        return None
    note = (
        "Where the gradient of the logits (over all responses that share a prefix, so that opposite ones cancel), entropy "
        "change, clipping and TEPO's mask fall. Decisive: digits whose planted fact "
        "is wrong; digit: other computed "
        "digits; copied: operands and signs. Shares of entropy change can exceed 1 or be negative where kinds move "
        "against each other."
    )
    return _levels(book, "credit", "Credit by kind of token", names, note)


def _levels(book: Book, anchor: str, title: str, names, note: str) -> Table:
    used = [n for n in names if book.tables["runs"][n].notna().any()]
    table = Table(anchor, title, note, [("task", ""), ("method", ""), *((METRICS[n].label, METRICS[n].meaning) for n in used)])
    for task in book.tasks:
        for method in with_base(book.methods):
            found = {n: book.level(task, method, n) for n in used}
            if method == BASE or not any(v is not None for v in found.values()):
                continue
            cells = [text_cell(task), text_cell(method)]
            for name, value in found.items():
                both = (
                    {} if value is None else {"x": value["estimate"], "x_low": value["boot_low"], "x_high": value["boot_high"]}
                )
                cells.append(interval_cell(both, "x", METRICS[name].digits))
            table.rows.append(cells)
    return table


def frame_table(anchor: str, title: str, note: str, frame: pd.DataFrame, digits: int = 3) -> Table:
    """Any small data frame as it is."""
    table = Table(anchor, title, note, [(str(c), "") for c in frame.columns])
    for row in frame.itertuples(index=False):
        cells = []
        for value in row:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            whole = is_number and not pd.isna(value) and float(value).is_integer()
            cells.append(number_cell(value, 0 if whole else digits) if is_number or value is None else text_cell(value))
        table.rows.append(cells)
    return table
