"""Figures of what training achieved: learning curves, entropy, the entropy law, pass@k, final accuracy, rollouts to a
target."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from tepo_core.analysis.book import Book, with_base
from tepo_core.analysis.entropy import fit_law
from tepo_core.analysis.figures.canvas import FAINT, panels
from tepo_core.analysis.figures.parts import (
    Drawing,
    draw_curves,
    draw_interval,
    draw_rows,
    finish_rows,
    legend_below,
    ranked,
    span,
    trend,
    zero_line,
)
from tepo_core.analysis.figures.style import looks_of
from tepo_core.runs.folder import BASE


def learning_curves(book: Book, task: str) -> Drawing | None:
    """Training reward, held-out accuracy and entropy against rollouts, all methods in one picture each."""
    methods = book.overlaid(task)
    if not methods:
        return None
    figure, axes = panels(1, 3, height=3.3)
    reward = draw_curves(axes[0], book, task, "rollout", "reward", methods, smooth=5)
    held = "greedy" if any(len(book.curve(task, m, "validation", "greedy")[0]) for m in methods) else "sample"
    accuracy = draw_curves(axes[1], book, task, "validation", held, methods)
    entropy = draw_curves(axes[2], book, task, "rollout", "entropy", methods, smooth=5)
    axes[0].set(title="training reward", xlabel="rollout", ylabel="mean reward, 5 rollouts", ylim=(0, 1))
    axes[1].set(title=f"held-out accuracy ({'greedy' if held == 'greedy' else 'sampled'})", xlabel="rollout", ylim=(0, 1))
    axes[2].set(title=f"entropy at T = {book.study.train.temperature:g}", xlabel="rollout", ylabel="nats per token")
    if all(last > 0 for _, last in entropy.values()):
        log_scale(axes[2])
    legend_below(figure, book, methods)
    return Drawing(
        figure,
        "Learning curves",
        "Means over seeds. Reward and entropy are those of the sampling policy before each rollout's updates; "
        "entropy is exact, over the "
        "whole vocabulary, on a logarithmic axis. Bands over seeds are in the next figure.",
        f"Held-out accuracy: {trend(accuracy)}. Training reward: {trend(reward)}. Entropy: {trend(entropy, 4)}.",
    )


def log_scale(axis) -> None:
    """A logarithmic y axis with plain numbers, at least three where they fit."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)):
        ticks = [t for t in (m * 10.0**e for e in decades for m in steps) if low <= t <= high]
        if len(ticks) >= 3:
            break
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_minor_locator(NullLocator())
    formatter = ScalarFormatter()
    formatter.set_scientific(False)
    axis.yaxis.set_major_formatter(formatter)


def entropy_curves(book: Book, task: str) -> Drawing | None:
    """Entropy of each method with the range of its seeds, the reference method in grey behind it."""
    methods = book.trained(task)
    if not methods:
        return None
    columns = min(4, len(methods))
    rows = math.ceil(len(methods) / columns)
    figure, axes = panels(rows, columns, height=2.1, sharex=True, sharey=True)
    for axis in axes[len(methods) :]:
        axis.set_visible(False)
    ends = {}
    positive = True
    for axis, method in zip(axes, methods, strict=False):
        if book.reference != method and book.reference in methods:
            steps, values = book.curve(task, book.reference, "rollout", "entropy")
            axis.plot(steps, span(values)[0], color=FAINT, linewidth=1.0, zorder=1)
        found = draw_curves(axis, book, task, "rollout", "entropy", [method], band=True)
        ends.update(found)
        positive &= all(v > 0 for v in found.get(method, (1.0,)))
        axis.set_title(method, color=looks_of(book)[method].colour, weight="bold")
        row = book.level(task, method, "entropy_kept")
        if row is not None:
            axis.text(
                0.97,
                0.93,
                f"kept {100 * row['estimate']:.0f} %",
                transform=axis.transAxes,
                ha="right",
                va="top",
                fontsize=8,
            )
    if positive:
        for axis in axes[: len(methods)]:
            log_scale(axis)
    figure.supxlabel("rollout", fontsize=9)
    figure.supylabel(f"entropy, nats per token, T = {book.study.train.temperature:g}", fontsize=9)
    return Drawing(
        figure,
        "Entropy, method by method",
        "Exact entropy of the sampling distribution. Line: mean over seeds; band: lowest to highest seed; "
        "thin grey line: "
        f"{book.reference}. “Kept” is the entropy of the last tenth of the rollouts over that of the first tenth.",
        f"Entropy over training: {trend(ends, 4)}.",
    )


def entropy_law(book: Book, task: str) -> Drawing | None:
    """Reward against entropy at every rollout, with the fitted law R = -a exp(H) + b."""
    methods = [m for m in book.trained(task) if book.level(task, m, "law_a") is not None]
    if not methods:
        return None
    columns = min(4, len(methods))
    figure, axes = panels(math.ceil(len(methods) / columns), columns, height=2.2, sharex=True, sharey=True)
    for axis in axes[len(methods) :]:
        axis.set_visible(False)
    fits, top = {}, 1.05
    for axis, method in zip(axes, methods, strict=False):
        look = looks_of(book)[method]
        entropy, reward = (
            book.curve(task, method, "rollout", "entropy")[1],
            book.curve(task, method, "rollout", "reward")[1],
        )
        axis.plot(entropy.ravel(), reward.ravel(), ".", color=look.colour, markersize=2.2, alpha=0.45, rasterized=True)
        for h, r in zip(entropy, reward, strict=True):
            law = fit_law(h, r)
            if law is not None:
                grid = np.linspace(0, np.nanmax(h), 60)
                axis.plot(grid, law.predict(grid), color=look.colour, linewidth=1.1)
                top = max(top, min(1.4, law.ceiling + 0.06))
                axis.plot(
                    [0],
                    [law.ceiling],
                    marker=look.marker,
                    color=look.colour,
                    markersize=4.5,
                    clip_on=not 0 <= law.ceiling <= 1.4,
                )
        r2, ceiling = book.level(task, method, "law_r2"), book.level(task, method, "law_ceiling")
        fits[method] = float(r2["estimate"])
        axis.set_title(method, color=look.colour, weight="bold")
        text = f"R² {r2['estimate']:.2f}, ceiling {ceiling['estimate']:.2f}"
        axis.text(0.97, 0.97, text, transform=axis.transAxes, ha="right", va="top", fontsize=8)
        axis.set_ylim(0, top)
        axis.set_xlim(left=0)
    figure.supxlabel("entropy H, nats per token", fontsize=9)
    figure.supylabel("training reward R", fontsize=9)
    return Drawing(
        figure,
        "Reward against entropy, and the law R = −a exp(H) + b",
        "A dot a rollout, a line a seed (least squares over the whole run), a marker at H = 0 for the ceiling b − a "
        "that the law "
        "predicts. Training moves from right to left.",
        f"Share of variance explained by the law: {ranked(fits, 2)}.",
    )


def pass_at_k(book: Book, task: str) -> Drawing | None:
    """pass@k of the base policy and of every method, and the paired gain over the base."""
    table = book.tables["evaluation"]
    table = table[(table["task"] == task) & table["metric"].str.startswith("pass@")]
    splits = list(dict.fromkeys(table["split"]))[:3]
    if not splits:
        return None
    variants = set(book.trained(task)) - set(book.overlaid(task))
    methods = [m for m in with_base(book.methods) if m in set(table["method"]) and m not in variants]
    figure, axes = panels(1, len(splits), height=3.3, width=9.6 if len(splits) > 1 else 5.6, sharey=True)
    last: dict[str, float] = {}
    for axis, split in zip(axes, splits, strict=True):
        for i, method in enumerate(methods):
            rows = table[(table["split"] == split) & (table["method"] == method)].sort_values("k")
            look = looks_of(book)[method]
            shift = 2 ** (0.022 * (i - (len(methods) - 1) / 2))
            k, value = rows["k"].to_numpy(dtype=float) * shift, rows["estimate"].to_numpy()
            axis.plot(
                k,
                value,
                color=look.colour,
                linestyle=look.dash,
                marker=look.marker if method != BASE else "s",
                markersize=4,
            )
            known = rows["bootstrap_low"].notna().to_numpy()
            if known.any():
                axis.vlines(
                    k[known],
                    rows["bootstrap_low"][known],
                    rows["bootstrap_high"][known],
                    color=look.colour,
                    linewidth=0.9,
                    alpha=0.6,
                )
            if split == splits[0] and len(value):
                last[method] = float(value[-1])
        ks = sorted(set(table["k"].astype(int)))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(title=f"split: {split}", xlabel="k", ylim=(0, 1.02))
    axes[0].set_ylabel("pass@k, unbiased")
    legend_below(figure, book, methods)
    return Drawing(
        figure,
        "pass@k against k",
        "Unbiased estimator, mean over seeds. Bars: hierarchical bootstrap over seeds and problems (too narrow with "
        "few seeds; intervals used "
        "for verdicts are in the tables). Points are set apart sideways a little.",
        f"pass@k at the largest k on {splits[0]}: {ranked(last)}.",
    )


def final_accuracy(book: Book, task: str) -> Drawing | None:
    """Final accuracy with every seed, the gain over the base and over the reference method, paired by seed."""
    methods = [m for m in with_base(book.methods) if book.level(task, m, "accuracy") is not None]
    if not methods:
        return None
    figure, axes = panels(1, 3, height=0.9 + 0.36 * len(methods))
    means = draw_rows(axes[0], book, task, methods, "accuracy")
    axes[0].set(title="accuracy, held-out", xlim=(0, 1))
    gains: dict[str, float] = {}
    for axis, against in ((axes[1], BASE), (axes[2], book.reference)):
        for row, method in enumerate(methods):
            found = book.pair(task, method, against, "accuracy") if against else None
            if found is not None:
                draw_interval(axis, row, found, looks_of(book)[method], "boot_" if against == BASE else "")
                if against == book.reference:
                    gains[method] = float(found["estimate"])
        finish_rows(axis, methods, labels=False)
        zero_line(axis)
        axis.locator_params(axis="x", nbins=5)
    axes[1].set_title("gain over the base policy")
    axes[2].set_title(f"difference from {book.reference}")
    return Drawing(
        figure,
        "Final accuracy",
        "Left: every seed as a hollow point, mean and interval above it. Left and middle: hierarchical "
        "bootstrap over seeds and "
        "problems, which with few and different seeds is too narrow. Right: differences paired by seed with "
        f"{100 * book.study.analyse.confidence:g} % t intervals, which decide the verdicts. All methods of "
        "a seed start from one base "
        "policy and meet the same problems.",
        f"Final held-out accuracy: {ranked(means)}. Difference from {book.reference}: {ranked(gains)}.",
    )


def rollouts_to_target(book: Book, task: str) -> Drawing | None:
    """Rollouts until the target accuracy, seed by seed, and the ratio of times against the reference method."""
    table = book.tables["times"]
    table = table[table["task"] == task].set_index("method")
    methods = [m for m in book.trained(task) if m in table.index]
    if not methods:
        return None
    runs = book.tables["runs"]
    end = float(table["horizon"].max())
    figure, axes = panels(1, 2, height=1.0 + 0.34 * len(methods))
    means = {}
    for row, method in enumerate(methods):
        look = looks_of(book)[method]
        mine = runs[(runs["task"] == task) & (runs["method"] == method)]
        steps = mine["rollouts_to_target"].to_numpy(dtype=float)
        missed = int((mine["reached"] == 0).sum())
        hit = steps[np.isfinite(steps)]
        axes[0].plot(hit, np.full(len(hit), row + 0.15), "o", markerfacecolor="none", markeredgecolor=look.colour, markersize=4)
        for i in range(missed):
            axes[0].plot([end], [row + 0.15 - 0.12 * i], marker=">", color=look.colour, markersize=5, clip_on=False)
        means[method] = float(table.loc[method, "mean_restricted"])
        axes[0].plot([means[method]], [row - 0.12], marker=look.marker, color=look.colour, markersize=6)
        if np.isfinite(table.loc[method, "own_ratio"]):
            found = table.loc[method, ["own_ratio", "own_ratio_low", "own_ratio_high"]].set_axis(["estimate", "low", "high"])
            draw_interval(axes[1], row, found, look)
    finish_rows(axes[0], methods)
    finish_rows(axes[1], methods, labels=False)
    axes[0].set(title=f"rollouts to held-out accuracy {table['target'].iloc[0]:g}", xlim=(0, end * 1.04), xlabel="rollouts")
    axes[1].set_xscale("log", base=2)
    low, high = axes[1].get_xlim()
    low, high = max(min(low, 0.45), 1 / 64), min(max(high, 2.2), 64)
    axes[1].set_xlim(low, high)
    ticks = [t for t in (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32, 64) if low <= t <= high]
    axes[1].set_xticks(ticks, [f"{t:g}" if t >= 1 else f"1/{round(1 / t)}" for t in ticks])
    axes[1].xaxis.set_minor_locator(NullLocator())
    zero_line(axes[1], 1.0)
    axes[1].set(title=f"time to where {book.reference} ended, over {book.reference}'s", xlabel="ratio (left of 1: sooner)")
    reached = {m: float(table.loc[m, "reached"]) for m in methods}
    return Drawing(
        figure,
        "Rollouts to a target",
        "Left: seeds that reached the profile's target (hollow), seeds that never did (triangles at the end: "
        "censored), and the mean of "
        "min(time, horizon). Right: geometric mean over seeds of the ratio of times, with t interval on the log "
        "scale; censored runs pull it "
        "towards 1.",
        f"Mean rollouts to the target, cut at {end:g}: {ranked(means, 1)}. Seeds that reached it: "
        + ", ".join(f"{m} {int(n)} of {int(table.loc[m, 'seeds'])}" for m, n in reached.items())
        + ".",
    )
