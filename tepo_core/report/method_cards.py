"""The methods of a study as a reader meets them: equation as MathML, source, what is known of it, and the options used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from latex2mathml.converter import convert

from tepo_core.analysis.book import Book
from tepo_core.analysis.figures.style import looks_of
from tepo_core.objectives.methods import PRESETS


@dataclass(frozen=True)
class MethodCard:
    """One method. equation: MathML, or empty where the preset gives none. options: those it was run with, flattened."""

    name: str
    preset: str
    title: str
    equation: str
    latex: str
    source: str
    status: str
    options: list[tuple[str, str]]
    colour: str


def method_cards(book: Book, objectives: dict[str, Any]) -> list[MethodCard]:
    """Cards of all methods, in the order of the study."""
    cards = []
    for method in book.methods:
        name = book.presets.get(method, method)
        preset = PRESETS.get(name)
        latex = str(getattr(preset, "equation", "") or "")
        source = getattr(preset, "source", "not a preset of this study")
        cards.append(
            MethodCard(
                name=method,
                preset=name,
                title=str(getattr(preset, "title", "") or name),
                equation=mathml(latex) if latex else "",
                latex=latex,
                source=source if isinstance(source, str) else ", ".join(map(str, source)),
                status=str(getattr(preset, "status", "unknown")),
                options=list(flatten(objectives.get(method) or {})),
                colour=looks_of(book)[method].colour,
            )
        )
    return cards


def mathml(latex: str, block: bool = True) -> str:
    """LaTeX as MathML, on a line of its own or inside one.

    Raises ``ValueError`` naming the equation where it cannot be converted."""
    try:
        return re.sub(r"\s*\n\s*", "", convert(latex, display="block" if block else "inline"))
    except Exception as error:  # latex2mathml raises its own kinds without a common base
        raise ValueError(f"equation {latex!r} cannot be turned into MathML: {type(error).__name__}: {error}") from None


def flatten(options: dict[str, Any], prefix: str = ""):
    """Nested options as (name, text) pairs, in order; unset ones left out."""
    for key, value in sorted(options.items()):
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", f"{value:g}" if isinstance(value, float) else str(value)
