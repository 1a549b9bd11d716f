"""Figures of how training worked: stability, ratio and clipping, TEPO's mask, credit on decisive tokens, which tokens lose
entropy."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import NullLocator

from tepo_core.analysis.book import Book, label
from tepo_core.analysis.entropy import SURPRISE_EDGES
from tepo_core.analysis.figures.canvas import FAINT, panels
from tepo_core.analysis.figures.parts import (
    Drawing,
    draw_curves,
    draw_interval,
    draw_rows,
    finish_rows,
    legend_below,
    ranked,
    trend,
    zero_line,
)
from tepo_core.analysis.figures.style import looks_of

STABILITY = (
    "reward_volatility",
    "reward_drawdown",
    "grad_volatility",
    "grad_spikes",
    "kl_old",
    "length_drift",
    "zero_variance",
    "entropy_kept",
)


def stability(book: Book, task: str) -> Drawing | None:
    """Eight numbers on how steadily each method trained, every seed visible."""
    methods = book.trained(task)
    if not methods:
        return None
    figure, axes = panels(2, 4, height=0.8 + 0.24 * len(methods))
    means = {}
    for i, (axis, metric) in enumerate(zip(axes, STABILITY, strict=True)):
        means[metric] = draw_rows(axis, book, task, methods, metric, labels=i % 4 == 0)
        axis.set_title(label(metric))
        axis.tick_params(axis="x", labelsize=7)
        axis.locator_params(axis="x", nbins=4)
        if metric == "length_drift":
            zero_line(axis, 1.0)
        elif metric != "entropy_kept":
            low, high = axis.get_xlim()
            low = min(0.0, low)
            axis.set_xlim(low, high + 0.04 * (high - low))  # the margin grows with the axis, or markers are cut
        if metric == "grad_spikes" and high < 1:
            axis.set_xlim(-0.05, 1)
    return Drawing(
        figure,
        "Stability",
        "Every seed as a hollow point, mean and bootstrap interval as a filled one. Volatility is the "
        "standard deviation of "
        "the change between rollouts; "
        "drawdown the largest fall of the smoothed reward from its peak; a spike a gradient norm six scaled MADs "
        "above the twenty before.",
        f"Reward volatility: {ranked(means['reward_volatility'])}. Largest drawdown: "
        f"{ranked(means['reward_drawdown'])}. "
        f"Gradient spikes: {ranked(means['grad_spikes'], 1)}.",
    )


def ratio_and_clip(book: Book, task: str) -> Drawing | None:
    """Spread of the importance ratio, share of clipped tokens, and KL to the sampling policy, along training."""
    methods = book.overlaid(task)
    if not methods:
        return None
    figure, axes = panels(1, 3, height=3.3)
    spread = draw_curves(axes[0], book, task, "update", "abs_log_ratio", methods, smooth=5)
    clip = draw_curves(axes[1], book, task, "update", "clip", methods, smooth=5)
    kl = draw_curves(axes[2], book, task, "update", "kl_old", methods, smooth=5)
    axes[0].set(title="|log π − log π_old| per token", xlabel="rollout", ylabel="nats, mean over tokens")
    axes[1].set(title="share of clipped tokens", xlabel="rollout")
    axes[2].set(title="KL to the sampling policy (k3)", xlabel="rollout", ylabel="nats per token")
    for axis in axes:
        from_zero(axis)
    shares = [last for _, last in clip.values() if last > 0]
    if shares and max(shares) > 20 * min(shares):  # one method clips a fifth, the others next to nothing
        axes[1].set_yscale("symlog", linthresh=1e-3)
        axes[1].set_yticks([0, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
        axes[1].yaxis.set_minor_locator(NullLocator())
        axes[1].set_ylim(0, 1)
    legend_below(figure, book, methods)
    return Drawing(
        figure,
        "Ratio, clipping and drift",
        "Means over seeds and over all updates of a rollout, smoothed over five rollouts. A method clips what its "
        "own ratio and range say, so "
        "the shares are not comparable as strengths.",
        f"Clipped share at the end: {ranked({m: e[1] for m, e in clip.items()})}. KL: {trend(kl, 5)}. "
        f"Mean absolute log-ratio at the end: {ranked({m: e[1] for m, e in spread.items()}, 4)}.",
    )


def from_zero(axis) -> None:
    """The y axis from 0 to a little above the highest curve."""
    highest = max((float(np.nanmax(line.get_ydata())) for line in axis.lines if len(line.get_ydata())), default=0.0)
    axis.set_ylim(0, 1.08 * highest if highest > 0 else 1.0)


def mask(book: Book, task: str) -> Drawing | None:
    """What TEPO's mask does: tokens in it, KL charged on them, and the premise that A>0 tokens lose entropy."""
    methods = book.trained(task)
    masked = [m for m in book.overlaid(task) if np.nansum(book.seeds(task, m, "mask")) > 0]
    measured = [m for m in methods if len(book.seeds(task, m, "fell"))]
    if not measured:
        return None
    figure, axes = panels(1, 3, height=3.3)
    share = draw_curves(axes[0], book, task, "update", "mask", masked, smooth=5)
    charged = draw_curves(axes[1], book, task, "update", "kl_penalty", masked, smooth=5)
    if not masked:
        for axis in axes[:2]:
            axis.text(
                0.5,
                0.5,
                "no method with a KL penalty\nin this study",
                transform=axis.transAxes,
                ha="center",
                va="center",
                color=FAINT,
            )
    axes[0].set(title="tokens that pay KL", xlabel="rollout", ylabel="share of tokens")
    axes[1].set(title="KL charged on them", xlabel="rollout", ylabel="nats, mean over all tokens")
    for axis in axes[:2]:
        from_zero(axis)
    fell = draw_rows(axes[2], book, task, measured, "fell")
    uncertain = {}
    for row, method in enumerate(measured):
        found = book.level(task, method, "fell_uncertain")
        if found is not None:
            uncertain[method] = float(found["estimate"])
            axes[2].plot(
                found["estimate"], row - 0.08, "s", markerfacecolor="none", color=looks_of(book)[method].colour, markersize=5
            )
    axes[2].set(title="A>0 tokens whose entropy fell", xlim=(0, 1))
    zero_line(axes[2], 0.5)
    if masked:
        legend_below(figure, book, masked)
    return Drawing(
        figure,
        "TEPO's mask and its premise",
        "The mask charges KL only where the advantage is positive and the entropy fell (KL-Cov charges "
        "the tokens it selects). "
        "Right: share of tokens with positive advantage whose entropy fell since sampling, over all "
        "updates after the first; squares: "
        "the same among recorded tokens with at least 0.05 nats, where a change is no rounding. If a "
        "positive advantage implied "
        "falling entropy both would be 1.",
        f"Share of positive-advantage tokens whose entropy fell: {ranked(fell, 2)}; among uncertain "
        f"tokens: {ranked(uncertain, 2)}. "
        f"Tokens that pay KL at the end: {ranked({m: e[1] for m, e in share.items()})}. KL charged: "
        f"{trend(charged, 6)}.",
    )


def credit(book: Book, task: str) -> Drawing | None:
    """How much of the gradient in the logits, entropy change, clipping and KL falls on the decisive tokens, in "
    "multiples of their share."""
    methods = [m for m in book.trained(task) if len(book.seeds(task, m, "gradient_decisive"))]
    if not methods:
        return None
    figure, axes = panels(1, 4, height=0.9 + 0.34 * len(methods))
    means = {}
    names = {
        "gradient": "gradient in the logits",
        "entropy": "entropy change",
        "clip": "clipped tokens",
        "mask": "tokens that pay KL",
    }
    for i, (axis, (name, title)) in enumerate(zip(axes, names.items(), strict=True)):
        means[name] = draw_rows(axis, book, task, methods, f"{name}_focus", labels=i == 0)
        zero_line(axis, 1.0)
        axis.set_title(title)
        low, high = axis.get_xlim()
        axis.set_xlim(min(low, 0.0), max(high, 1.5))
    tokens = np.mean([book.level(task, m, "tokens_decisive")["estimate"] for m in methods])
    figure.supxlabel("share on decisive tokens over their share of all tokens", fontsize=9)
    return Drawing(
        figure,
        "Credit: how much falls on the decisive tokens",
        "Decisive tokens are the digits whose planted fact is wrong. At 1 (line) a method treats them "
        "like any other token; at 5 "
        "they get five times their part. Gradient: of the logits of each state, over all responses that pass through it, so that right "
        "and wrong ones cancel where they agree. Entropy change: absolute, update by update. Every seed is a hollow point.",
        f"Decisive tokens are {100 * tokens:.1f} % of all. In multiples of that share, gradient in the logits: "
        f"{ranked(means['gradient'], 2)}; "
        f"entropy change: {ranked(means['entropy'], 1)}; clipped tokens: {ranked(means['clip'], 1)}.",
    )


def surprise(book: Book, task: str) -> Drawing | None:
    """Share of A>0 tokens whose entropy fell, by how surprising the token was."""
    table = book.tables.get("fell_by_surprise")
    if table is None or not len(table[table["task"] == task]):
        return None
    table = table[(table["task"] == task) & (table["tokens"] >= FEWEST)]
    methods = [m for m in book.overlaid(task) if m in set(table["method"])]
    bins = sorted(set(table["bin"]))
    if not methods:
        return None
    figure, (axis,) = panels(1, 1, width=6.4, height=3.6)
    ends = {}
    for method in methods:
        rows, look = table[table["method"] == method], looks_of(book)[method]
        at = [bins.index(b) for b in rows["bin"]]
        axis.plot(at, rows["fell"], color=look.colour, linestyle=look.dash, marker=look.marker, markersize=4)
        ends[method] = (float(rows["fell"].iloc[0]), float(rows["fell"].iloc[-1]))
    zero_line(axis, 1.0, vertical=False)
    edges = SURPRISE_EDGES
    names = [
        f"{edges[b]:g} to {edges[b + 1]:g}".replace("-inf to", "below").replace(" to inf", " up").replace("-", "−")
        for b in bins
    ]
    axis.set_xticks(range(len(bins)), names, rotation=25, ha="right")
    axis.set(xlabel="surprisal − entropy of the sampled token, nats", ylabel="share whose entropy fell", ylim=(0, 1.04))
    legend_below(figure, book, methods)
    return Drawing(
        figure,
        "Which tokens lose entropy",
        "Recorded tokens with positive advantage at the last update of a rollout, in bins of at least "
        f"{FEWEST} tokens over all seeds. "
        "Raising a token that is more surprising than expected spreads the distribution, so a positive "
        "advantage alone does not mean "
        "falling entropy (line at 1). Bins around 0 hold tokens that were all but certain.",
        f"Share of positive-advantage tokens losing entropy, from the least to the most surprising: {trend(ends, 2)}.",
    )


def facts(book: Book, task: str) -> Drawing | None:
    """Planted wrong facts corrected along training, and gradient in the logits on decisive tokens against the "
    "time to half of them."""
    methods = [m for m in book.overlaid(task) if len(book.curve(task, m, "validation", "fact_correct")[0])]
    if not methods:
        return None
    figure, axes = panels(1, 2, height=3.4)
    ends = draw_curves(axes[0], book, task, "validation", "fact_correct", methods, band=len(methods) <= 3)
    axes[0].set(title="planted wrong facts corrected", xlabel="rollout", ylabel="share, greedy, one step", ylim=(0, 1))
    runs = book.tables["runs"]
    for method in methods:
        mine, look = runs[(runs["task"] == task) & (runs["method"] == method)], looks_of(book)[method]
        axes[1].plot(
            mine["gradient_decisive"],
            mine["facts_corrected"],
            look.marker,
            color=look.colour,
            markersize=5,
            linestyle="none",
        )
    axes[1].set(
        title="does credit predict correction?",
        xlabel="share of the logits' gradient on decisive tokens",
        ylabel="facts corrected at the end",
    )
    note = ""
    table = book.tables.get("credit_prediction")
    if table is not None:
        row = table[(table["task"] == task) & (table["level"] == "run") & (table["outcome"] == "facts_corrected")]
        if len(row) and np.isfinite(row["correlation"].iloc[0]):
            note = f" Within seeds, the rank correlation over methods is {row['correlation'].iloc[0]:.2f}."
    legend_below(figure, book, methods)
    return Drawing(
        figure,
        "Which wrong facts get corrected",
        "Left: share of the planted wrong facts that the greedy policy answers rightly when asked one step. Right: "
        "one point a run." + note,
        f"Facts corrected: {trend(ends, 2)}.{note}",
    )


FEWEST = 20
"""Tokens below which a bin says nothing."""

SENSITIVITY = ("accuracy", "curve_mean", "entropy_kept")


def sensitivity(book: Book, task: str) -> Drawing | None:
    """What each choice that a paper leaves open changes: every variant minus its preset."""
    variants = book.variants(task)
    if not variants:
        return None
    figure, axes = panels(1, len(SENSITIVITY), height=1.0 + 0.26 * len(variants))
    means: dict[str, dict[str, float]] = {}
    for i, (axis, metric) in enumerate(zip(axes, SENSITIVITY, strict=True)):
        means[metric] = {}
        for row, method in enumerate(variants):
            found = book.pair(task, method, book.presets[method], metric)
            if found is not None:
                draw_interval(axis, row, found, looks_of(book)[method])
                means[metric][method] = float(found["estimate"])
        finish_rows(axis, variants, labels=i == 0)
        for row in range(1, len(variants)):
            if book.presets[variants[row]] != book.presets[variants[row - 1]]:
                axis.axhline(row - 0.5, color=FAINT, linewidth=0.7)
        zero_line(axis)
        axis.set_title(label(metric))
    figure.supxlabel("variant minus its preset", fontsize=9)
    return Drawing(
        figure,
        "Choices that the papers leave open",
        "Each row changes one choice of its preset; differences are paired by seed, with t intervals. "
        "What crosses the line cannot be told from no effect.",
        f"Differences in accuracy: {ranked(means['accuracy'])}. In entropy kept: {ranked(means['entropy_kept'])}.",
    )
