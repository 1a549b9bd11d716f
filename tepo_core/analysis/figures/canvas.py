"""What every picture starts from: settings of the study's own, no global state, and PNG bytes that are always the same.

A notebook shows a figure with :func:`show`. Nothing depends on the hooks of an interactive shell, so a page has its pictures whoever
started its kernel."""

from __future__ import annotations

import io

import matplotlib
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT = "#1b1f24", "#8a8f98"
DPI = 160
RC = {
    "svg.hashsalt": "tepo-study",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "axes.titlelocation": "left",
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    "savefig.facecolor": "white",
    "path.simplify": True,
}
"""Settings of every figure: the user's own matplotlibrc changes nothing."""


def panels(rows: int, columns: int, *, width: float = 9.6, height: float = 3.0, **options) -> tuple[Figure, list[Axes]]:
    """A grid of axes as a flat list, no global state; ``height`` is that of one row, inches. Call it inside
    ``rc_context(RC)``."""
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.ravel())


def png(figure: Figure) -> bytes:
    """PNG bytes of a figure as it stands, the same for the same figure: no date, no software version."""
    target = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.dpi = DPI
        FigureCanvasAgg(figure).print_png(target, metadata={"Software": None})
    return target.getvalue()


def show(figure: Figure, alt: str = "") -> Image:
    """The figure as the value of a notebook's cell, at 96 pixels an inch; ``alt`` says in words what it shows."""
    return Image(data=png(figure), width=round(96 * figure.get_figwidth()), alt=alt or None)
