"""Pictures of one update, token by token, for notebooks/one_step.ipynb: the loss before it, and what it moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from tepo_core.analysis.figures.style import INK, LOOKS, RC
from tepo_core.analysis.step import Shown
from tepo_core.objectives.methods import TokenOutput, resolve
from tepo_core.objectives.surrogates import around_one

RAISED, LOWERED, DECISIVE = "#0072B2", "#D55E00", "#f2d27a"
LABELS = {"\\boxed{": "box", "<eos>": "∎"}  # tokens whose text is too long for a tick
AVERAGES = {"token_mean": "mean over all tokens", "seq_mean_token_mean": "mean over tokens, then over responses"}
NARROW = 8  # tokens; a shorter response has its title on two lines
RATIO_TICKS = (0.01, 0.1, 0.25, 0.5, 1, 2, 4, 10, 100)


def token_losses_figure(responses: Sequence[Shown], shares: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Figure:
    """What each token adds to J and how strongly it is pushed; one column a response, one row a method of the clipped family.

    shares: method -> what each token adds to J, [B, T]. weights: method -> dJ/dlogprob, [B, T]. Bars are shares, dots are
    weights; they coincide where the ratio is 1 and nothing but the token's own ratio moves with its log-prob."""
    figure = _figure()
    with rc_context(RC):
        axes = _grid(figure, responses, len(shares), 1.6)
        _share_scale(axes)
        for row, name in enumerate(shares):
            for axis, response in zip(axes[row], responses, strict=True):
                count = len(response.texts)
                values = shares[name][response.row, :count].numpy()
                colours = np.where(values >= 0, RAISED, LOWERED)
                axis.bar(range(count), values, width=0.72, color=list(colours), alpha=0.75)
                axis.plot(range(count), weights[name][response.row, :count].numpy(), "o", color=INK, markersize=3.2)
                axis.axhline(0, color=INK, linewidth=0.7)
            _name(axes[row, 0], _words(name), LOOKS[name].colour)
        figure.supylabel("share of J (bar), dJ / d log π (dot)", fontsize=8.5)
        handles = [
            Patch(color=RAISED, alpha=0.75, label="adds to J: raise the token"),
            Patch(color=LOWERED, alpha=0.75, label="takes from J: lower it"),
            Line2D([], [], marker="o", linestyle="", color=INK, markersize=3.2, label="gradient weight"),
            _decisive_handle(),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def moved_figure(responses: Sequence[Shown], before_BT: Tensor, after_BT: Tensor, seen: Mapping[str, TokenOutput]) -> Figure:
    """The same responses after an update. First row: probability of every token, from ``before_BT`` to ``after_BT``, both
    log-probs. Then a row a method with what it makes of the move: the ratio, on a log scale, over its clip range; tokens that
    are clipped, and tokens that pay the KL penalty. seen: method -> ``Method.loss(...).token``."""
    figure = _figure()
    with rc_context(RC):
        axes = _grid(figure, responses, 1 + len(seen), 1.4)
        _share_scale(axes[1:])
        for axis, response in zip(axes[0], responses, strict=True):
            _arrows(axis, response, before_BT.exp(), after_BT.exp())
        _name(axes[0, 0], "probability of the token", INK)
        for row, name in enumerate(seen, start=1):
            for axis, response in zip(axes[row], responses, strict=True):
                axis.axhspan(*around_one(resolve(name).settings.clip), color=LOOKS[name].colour, alpha=0.12, linewidth=0)
                axis.axhline(1, color=INK, linewidth=0.7)
                _ratio_dots(axis, response, seen[name], LOOKS[name].colour)
            _name(axes[row, 0], _words(name), LOOKS[name].colour)
        _ratio_ticks(axes[1, 0])
        handles = [
            Line2D([], [], marker="o", linestyle="", color=INK, markersize=4.5, label="ratio, gradient flows"),
            Line2D(
                [],
                [],
                marker="o",
                linestyle="",
                color=INK,
                markerfacecolor="white",
                markersize=4.5,
                label="clipped: its term has no gradient",
            ),
            Line2D(
                [], [], marker="s", linestyle="", color=INK, markerfacecolor="none", markersize=8, label="pays the KL penalty"
            ),
            Patch(color=INK, alpha=0.12, label="inside the clip range"),
            _decisive_handle(),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _figure() -> Figure:
    """An empty figure that no shell knows of: a notebook shows it (``canvas.show``)."""
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _grid(figure: Figure, responses: Sequence[Shown], rows: int, height: float) -> np.ndarray:
    """Axes as wide as their responses are long, token texts below, the decisive tokens on yellow."""
    widths = [len(response.texts) + 0.6 for response in responses]
    figure.set_size_inches(10.5, height * rows + 0.7)
    figure.get_layout_engine().set(h_pad=0.12)  # room for the words over a row
    axes = figure.subplots(rows, len(responses), sharey="row", squeeze=False, width_ratios=widths)
    for row in range(rows):
        for axis, response in zip(axes[row], responses, strict=True):
            count = len(response.texts)
            axis.set_xlim(-0.8, count - 0.2)
            axis.grid(axis="x", visible=False)
            for t in np.flatnonzero(response.decisive):
                axis.axvspan(t - 0.5, t + 0.5, color=DECISIVE, alpha=0.55, linewidth=0, zorder=0)
            axis.set_xticks(range(count), [LABELS.get(text, text) for text in response.texts], family="DejaVu Sans Mono")
            axis.tick_params(axis="x", length=0, labelbottom=row == rows - 1)
            for t, label in enumerate(axis.get_xticklabels()):
                label.set(
                    fontweight="bold" if response.decisive[t] else "normal", fontsize=9 if len(label.get_text()) == 1 else 6.5
                )
    for axis, response in zip(axes[0], responses, strict=True):
        words = ["right" if response.correct else "wrong", f"A = {response.advantage:+.2f}".replace("-", "−")]
        axis.set_title((", " if len(response.texts) > NARROW else "\n").join(words), loc="center", pad=18)
    return axes


def _share_scale(axes: np.ndarray) -> None:
    """One y axis for all rows, so that methods can be compared."""
    for axis in axes[1:, 0]:
        axis.sharey(axes[0, 0])


def _ratio_ticks(axis: Axes) -> None:
    """Log scale with few ticks around 1, the edges of the data kept."""
    axis.set_yscale("log")
    for other in axis.get_shared_y_axes().get_siblings(axis):
        other.minorticks_off()
    low, high = axis.get_ylim()
    axis.set_yticks([tick for tick in RATIO_TICKS if low <= tick <= high])
    axis.yaxis.set_major_formatter("{x:g}")


def _words(name: str) -> str:
    """A method by what stands in its ratio and how tokens are averaged."""
    options = resolve(name).settings
    unit = {"token": "token", "sequence": "response", "block": f"{options.block.size} tokens" if options.block else ""}[
        options.ratio
    ]
    return f"{name}: ratio of {'the ' * (options.ratio != 'block')}{unit}, {AVERAGES[options.aggregate]}"


def _name(axis: Axes, words: str, colour: str) -> None:
    axis.text(0, 1.03, words, transform=axis.transAxes, fontsize=8.5, color=colour, weight="bold", va="bottom", in_layout=False)


def _arrows(axis: Axes, response: Shown, before_BT: Tensor, after_BT: Tensor) -> None:
    for t in range(len(response.texts)):
        before, after = float(before_BT[response.row, t]), float(after_BT[response.row, t])
        colour = RAISED if after >= before else LOWERED
        axis.plot([t, t], [before, after], color=colour, linewidth=2.2, solid_capstyle="butt")
        axis.plot(t, before, "o", color="white", markeredgecolor=colour, markersize=4)
        axis.plot(t, after, "o", color=colour, markersize=4.5)
    axis.set_ylim(-0.04, 1.06)


def _ratio_dots(axis: Axes, response: Shown, seen: TokenOutput, colour: str) -> None:
    count = len(response.texts)
    grids_BT = (seen.ratio_BT, seen.clipped_BT, seen.mask_BT)
    ratio, cut, pays = (grid_BT[response.row, :count].numpy() for grid_BT in grids_BT)
    x = np.arange(count)
    axis.vlines(x, 1, ratio, color=colour, linewidth=1.2)
    axis.plot(x[~cut], ratio[~cut], "o", color=colour, markersize=4.5)
    axis.plot(x[cut], ratio[cut], "o", color=colour, markerfacecolor="white", markersize=4.5)
    axis.plot(x[pays], ratio[pays], "s", color=colour, markerfacecolor="none", markersize=8, markeredgewidth=0.9)


def _decisive_handle() -> Patch:
    return Patch(color=DECISIVE, alpha=0.55, label="decisive token: its fact was taught wrong")
