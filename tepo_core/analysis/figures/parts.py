"""What the figures share: the tables in a shape to draw from, curves with bands, rows of points with intervals, words for
trends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tepo_core.analysis.book import Book
from tepo_core.analysis.figures.canvas import FAINT, INK
from tepo_core.analysis.figures.style import Look, looks_of
from tepo_core.analysis.stability import trailing_mean


@dataclass(frozen=True)
class Drawing:
    """A figure with its words. alt: the trend for who cannot see it. caption: what is drawn and how to read it."""

    figure: Figure
    title: str
    caption: str
    alt: str


def span(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, lowest and highest over seeds at every step, NaN left out."""
    with np.errstate(invalid="ignore"):
        good = np.isfinite(values)
        count = good.sum(axis=0)
        mean = np.where(good, values, 0.0).sum(axis=0) / np.where(count == 0, np.nan, count)
        low = np.where(good, values, np.inf).min(axis=0, initial=np.inf)
        high = np.where(good, values, -np.inf).max(axis=0, initial=-np.inf)
    return mean, np.where(count == 0, np.nan, low), np.where(count == 0, np.nan, high)


def draw_curves(
    axis: Axes,
    book: Book,
    task: str,
    source: str,
    metric: str,
    methods: Sequence[str],
    *,
    band: bool = False,
    smooth: int = 1,
) -> dict[str, tuple[float, float]]:
    """Mean over seeds of a metric for every method, with the range of the seeds as a band. Returns first and last means.

    Markers sit at every tenth of a long curve and at every point of a short one."""
    ends = {}
    for method in methods:
        steps, values = book.curve(task, method, source, metric)
        if not len(steps):
            continue
        if smooth > 1:
            values = np.stack([trailing_mean(row, smooth) for row in values])
        look = looks_of(book)[method]
        mean, low, high = span(values)
        every = max(1, len(steps) // 8)
        axis.plot(
            steps,
            mean,
            color=look.colour,
            linestyle=look.dash,
            marker=look.marker,
            markevery=(every // 2, every),
            markersize=4,
            label=method,
            zorder=3,
        )
        if band and len(values) > 1:
            axis.fill_between(steps, low, high, color=look.colour, alpha=0.18, linewidth=0, zorder=2)
        finite = mean[np.isfinite(mean)]
        ends[method] = (float(finite[0]), float(finite[-1]))
    return ends


def legend_below(figure: Figure, book: Book, methods: Sequence[str], columns: int = 8) -> None:
    """One legend for the figure, under the panels, in the order of the methods."""
    handles = []
    for method in methods:
        look = looks_of(book)[method]
        handles.append(Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker, markersize=4, label=method))
    if handles:
        columns = min(columns, len(handles), max(1, int(figure.get_figwidth() / 1.15)))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=3)


def draw_rows(
    axis: Axes, book: Book, task: str, methods: Sequence[str], metric: str, *, labels: bool = True
) -> dict[str, float]:
    """One row a method: every seed as a hollow point, mean and bootstrap interval as a filled point with a bar.

    Returns the means. A method without an interval (one seed, or no variation) has no bar."""
    means = {}
    for row, method in enumerate(methods):
        look = looks_of(book)[method]
        values = book.seeds(task, method, metric)
        found = book.level(task, method, metric)
        if found is None or not len(values):
            axis.text(0.02, row, "not measured", transform=axis.get_yaxis_transform(), va="center", fontsize=7, color=FAINT)
            continue
        axis.plot(
            values,
            np.full(len(values), row + 0.22),
            "o",
            markerfacecolor="none",
            markeredgecolor=look.colour,
            markersize=4,
            alpha=0.9,
        )
        draw_interval(axis, row - 0.08, found, look, "boot_")
        means[method] = float(found["estimate"])
    finish_rows(axis, methods, labels)
    return means


def draw_interval(axis: Axes, row: float, found: pd.Series, look: Look, kind: str = "") -> None:
    """A filled point at the estimate and, where there is an interval, its bar: t, or with ``kind`` "boot_" bootstrap."""
    low, high = found[f"{kind}low"], found[f"{kind}high"]
    if pd.notna(low) and pd.notna(high):
        axis.plot([low, high], [row, row], color=look.colour, linewidth=2.2, solid_capstyle="butt", zorder=3)
    marker = look.marker if look.marker != "|" else "s"
    axis.plot(
        [found["estimate"]],
        [row],
        marker=marker,
        color=look.colour,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.7,
        zorder=4,
    )


def finish_rows(axis: Axes, methods: Sequence[str], labels: bool = True) -> None:
    """Rows from top to bottom in the order of the methods."""
    axis.set_yticks(range(len(methods)), methods if labels else [""] * len(methods))
    axis.set_ylim(len(methods) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)


def zero_line(axis: Axes, at: float = 0.0, *, vertical: bool = True) -> None:
    """A thin line of no difference."""
    (axis.axvline if vertical else axis.axhline)(at, color=INK, linewidth=0.8, zorder=1)


def ranked(values: dict[str, float], digits: int = 3) -> str:
    """Words for a set of numbers: highest, lowest, and the spread."""
    if not values:
        return "nothing was measured"
    order = sorted(values, key=lambda m: -values[m])
    if len(order) == 1:
        return f"{order[0]} {values[order[0]]:.{digits}f}"
    return f"highest {order[0]} ({values[order[0]]:.{digits}f}), lowest {order[-1]} ({values[order[-1]]:.{digits}f})"


def trend(ends: dict[str, tuple[float, float]], digits: int = 3) -> str:
    """Words for curves: from where to where each goes."""
    parts = []
    for method, (first, last) in ends.items():
        moved = abs(last - first)
        word = (
            "stays near" if moved <= 0.02 * max(abs(first), abs(last), 1e-12) else ("rises to" if last > first else "falls to")
        )
        parts.append(f"{method} {word} {last:.{digits}f} from {first:.{digits}f}")
    return "; ".join(parts) if parts else "nothing was measured"
