"""How figures look: fixed looks, contrast on light and dark, watermark, deterministic and inlinable SVG."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from run_factory import make_study

from tepo_core.analysis.book import is_evidence
from tepo_core.analysis.figures.canvas import RC, panels
from tepo_core.analysis.figures.parts import ranked, span, trend
from tepo_core.analysis.figures.style import DARK, LIGHT, LOOKS, inline_svg, looks_for, render, stamp
from tepo_core.objectives.methods import PRESETS


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("method", list(LOOKS))
def test_colours_are_seen_on_light_and_on_dark(method: str) -> None:
    assert contrast(LOOKS[method].colour, LIGHT) >= 3 and contrast(LOOKS[method].colour, DARK) >= 3


def test_every_preset_has_a_look_and_no_two_are_alike() -> None:
    assert set(PRESETS) <= set(LOOKS)
    assert len({(look.colour, look.marker) for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.marker for look in LOOKS.values()}) == len(LOOKS)  # markers alone tell methods apart


def test_variants_and_imports_keep_the_colour_of_their_preset() -> None:
    looks = looks_for(
        ["tepo", "tepo_b", "tepo_c", "tepo@verl", "mine"], {"tepo_b": "tepo", "tepo_c": "tepo", "tepo@verl": "tepo"}
    )
    assert len({looks[m].colour for m in ("tepo", "tepo_b", "tepo_c", "tepo@verl")}) == 1
    assert len({looks[m].marker for m in looks}) == len(looks)
    assert looks_for(["dapo", "tepo"])["tepo"] == looks_for(["tepo"])["tepo"]  # fixed, whatever else is in the study


def drawing(study):
    with matplotlib.rc_context(RC):
        figure, (axis,) = panels(1, 1, width=4, height=2)
        axis.plot([0, 1], [0, 1], marker="o")
        axis.set_title("a < b")
    stamp(figure, study)
    return figure


def test_bytes_are_the_same_and_hold_no_date_or_version() -> None:
    study = make_study()
    svg, png = render(drawing(study))
    assert (svg, png) == render(drawing(study))
    assert b"<dc:date>" not in svg and b"Matplotlib v" not in svg and b"Software" not in png


def test_profile_and_watermark_are_on_the_figure() -> None:
    quick = render(drawing(make_study()))[0].decode()
    assert "profile: quick" in quick and "not evidence" in quick
    full = render(drawing(make_study(profile="full")))[0].decode()
    assert "profile: full" in full and "not evidence" not in full
    assert not is_evidence(make_study(profile="full", seeds=[0]))  # one seed is no evidence whatever the profile
    assert "not evidence" not in render(drawing(make_study(report={"watermark": False})))[0].decode()


def test_inlined_svg_has_its_own_ids_and_the_pages_ink() -> None:
    import xml.etree.ElementTree as tree

    svg = render(drawing(make_study()))[0].decode()
    one, two = (inline_svg(svg, name, 'rises "a" < b & c') for name in ("one", "two"))
    nodes = tree.fromstring(one)
    assert nodes.get("role") == "img" and nodes.get("aria-label") == 'rises "a" < b & c' and nodes.get("width") is None
    ids = {node.get("id") for node in nodes.iter() if node.get("id")}
    assert ids and all(i.startswith("one-") for i in ids) and not ids & {n.get("id") for n in tree.fromstring(two).iter()}
    link = "{http://www.w3.org/1999/xlink}href"
    assert {node.get(link)[1:] for node in nodes.iter() if node.get(link)} <= ids
    assert "currentColor" in one and "<metadata" not in one and "fill: #ffffff" not in one.split("axes_1")[0]


def test_words_for_trends() -> None:
    assert (
        trend({"a": (0.2, 0.8), "b": (0.5, 0.501), "c": (1.0, 0.1)}, 1)
        == "a rises to 0.8 from 0.2; b stays near 0.5 from 0.5; c falls to 0.1 from 1.0"
    )
    assert ranked({"a": 1.0, "b": 3.0, "c": 2.0}, 0) == "highest b (3), lowest a (1)"
    assert trend({}) == ranked({}) == "nothing was measured"


def test_span_leaves_out_what_is_missing() -> None:
    nan = float("nan")
    mean, low, high = span(np.array([[1.0, nan, nan], [3.0, 4.0, nan]]))
    assert mean[:2].tolist() == [2.0, 4.0] and low[:2].tolist() == [1.0, 4.0] and high[:2].tolist() == [3.0, 4.0]
    assert np.isnan([mean[2], low[2], high[2]]).all()
