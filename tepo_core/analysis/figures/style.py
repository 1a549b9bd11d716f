"""How figures look: one colour, marker and dash a method everywhere, deterministic bytes, profile name, watermark.

Every colour has a contrast of at least 3 against white and against the report's dark background, so that one picture
serves both. Colours alone do not tell fifteen methods apart, least of all to colour-blind readers: the marker and the dash
do."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from tepo_core.analysis.book import Book, is_evidence
from tepo_core.analysis.figures.canvas import FAINT, INK, RC, png
from tepo_core.config import Study

DARK, LIGHT = "#15171c", "#ffffff"
BASE_COLOUR = "#7a7a7a"

SOLID, DASH, DOT, DASHDOT, LONG = "solid", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))


@dataclass(frozen=True)
class Look:
    """Colour, marker and dash of a method."""

    colour: str
    marker: str
    dash: str | tuple


LOOKS = {
    "base": Look(BASE_COLOUR, "|", DOT),
    "grpo": Look("#0072B2", "o", SOLID),
    "tepo": Look("#D55E00", "D", SOLID),
    "tepo_kl": Look("#c2447a", "P", LONG),
    "mpo": Look("#009E73", "^", DASHDOT),
    "dapo": Look("#b8860b", "s", DASH),
    "gspo": Look("#8c6bb1", "v", DASH),
    "kl_cov": Look("#3b9cc9", "X", DOT),
    "clip_cov": Look("#8a7f22", "p", DOT),
    "reinforce": Look("#6d6d6d", "*", SOLID),
    "dr_grpo": Look("#5f7fd1", "h", DASHDOT),
    "gspo_token": Look("#b07aa1", "<", DASHDOT),
    "gmpo": Look("#3d8f3d", ">", LONG),
    "cispo": Look("#a0522d", "d", DOT),
    "sapo": Look("#2e8b8b", "8", LONG),
    "holder": Look("#CC6677", "H", DASHDOT),
}
SPARE_COLOURS = ("#2a7fb8", "#b5651d", "#8c6bb1", "#3d8f3d", "#c2447a", "#8a7f22")
SPARE_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "h", "<", ">", "p", "d", "8")
SPARE_DASHES = (DASH, DOT, DASHDOT, LONG, SOLID)


def looks_of(book: Book) -> dict[str, Look]:
    """The look of every method of a study."""
    return _looks(tuple(book.methods), tuple(sorted(book.presets.items())))


@cache
def _looks(methods: tuple[str, ...], presets: tuple[tuple[str, str], ...]) -> dict[str, Look]:
    return looks_for(methods, dict(presets))


def looks_for(methods: Sequence[str], presets: dict[str, str] | None = None) -> dict[str, Look]:
    """The look of every method. A preset has its own for ever; a variant or an imported run keeps its preset's colour, and
    takes the next marker that nobody in the study has, and the next dash. Methods of no known preset share spare colours."""
    presets = presets or {}
    out = {"base": LOOKS["base"], **{m: LOOKS[m] for m in methods if m in LOOKS}}
    taken = {look.marker for look in out.values()}
    free = [m for m in SPARE_MARKERS if m not in taken] or list(SPARE_MARKERS)
    others = [m for m in methods if m not in LOOKS]
    strangers = list(dict.fromkeys(f for m in others if (f := presets.get(m, m.split("@")[0])) not in LOOKS))
    for i, method in enumerate(others):
        family = presets.get(method, method.split("@")[0])
        if family in LOOKS:
            colour, dashes = LOOKS[family].colour, [d for d in SPARE_DASHES if d != LOOKS[family].dash]
        else:
            colour, dashes = SPARE_COLOURS[strangers.index(family) % len(SPARE_COLOURS)], SPARE_DASHES
        out[method] = Look(colour, free[i % len(free)], dashes[i % len(dashes)])
    return out


def stamp(figure: Figure, study: Study) -> None:
    """Write the profile's name on the figure and, below ``full``, the watermark."""
    with matplotlib.rc_context(RC):
        strip = 0.16 / figure.get_figheight()  # room for the profile's name, so that it covers nothing
        figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
        label = f"profile: {study.profile}"
        figure.text(0.999, 0.001, label, ha="right", va="bottom", fontsize=7, color=FAINT, in_layout=False)
        if study.report.watermark and not is_evidence(study):
            figure.text(
                0.5,
                0.5,
                "not evidence",
                ha="center",
                va="center",
                rotation=24,
                fontsize=min(54, 7 * figure.get_figwidth()),
                color=FAINT,
                alpha=0.13,
                weight="bold",
                zorder=-5,
                in_layout=False,
            )


def render(figure: Figure) -> tuple[bytes, bytes]:
    """SVG and PNG bytes, the same for the same figure: no date, no software version, fixed ids.

    Drawn through the canvases directly: ``savefig`` draws every figure twice as often."""
    svg = io.StringIO()
    with matplotlib.rc_context(RC):
        figure.set_facecolor("white")
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
        figure.set_layout_engine("none")  # the layout stands; both formats have the same
    return svg.getvalue().encode(), png(figure)


def inline_svg(svg: str, prefix: str, alt: str) -> str:
    """The SVG as an element of a page: ids made unique by ``prefix``, ink in the page's text colour, no background,
    labelled by ``alt``."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', body)
    body = body.replace(INK, "currentColor")
    body = re.sub(r'(<g id="[^"]*patch_1">\s*<path d="[^"]*" style="fill: )#ffffff', r"\1none", body, count=1)
    head, rest = body.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{_attribute(alt)}">{rest.rstrip()}'


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
