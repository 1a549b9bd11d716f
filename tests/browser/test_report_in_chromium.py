"""The report in a real browser with the network off: no error, no request, narrow and wide, light and dark, by keyboard.

Started by ``make test-browser``; skipped where no Chromium is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from chrome import Chrome, find_chromium
from report_pages import make_notebook
from run_factory import Truth, make_runs, make_study

from tepo_core.analysis.stage import analyse
from tepo_core.report.stage import build_report

ROOT = Path(__file__).parents[2]
BINARY = find_chromium()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"),
]
WIDTHS = (360, 1400)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("browser")
    study = make_study(
        methods=["grpo", "dapo", "gmpo", "sapo", "clip_cov", "tepo_kl", "tepo_kl_all"],
        seeds=[0, 1],
        variants={"tepo_kl_all": {"preset": "tepo_kl", "kl": {"mask": "all"}, "entropy_test": None}},
    )
    make_runs(root, study, {"tepo_kl": Truth(gain=0.6, mask=0.08, noise=0.01), "grpo": Truth(noise=0.01)})
    shutil.rmtree(root / "runs/train/facts-dapo-s1")
    make_notebook(root / "runs/train/facts-grpo-s0/notebook.ipynb", "grpo")
    shutil.copy(ROOT / "claims.yaml", root)
    analyse(study, root)
    return build_report(study, root)


@pytest.fixture(scope="module")
def chrome():
    with Chrome(BINARY) as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_opens_offline_without_error_and_without_a_request(chrome: Chrome, report, width: int, dark: bool) -> None:
    for page in [report.index, *report.pages]:
        chrome.open(page, width, dark=dark)
        chrome.run("new Promise(done => setTimeout(done, 300))")
        assert chrome.errors == []
        assert all(url.startswith(("file://", "data:", "blob:")) for url in chrome.requests), chrome.requests
        assert len([url for url in chrome.requests if url.startswith("file://")]) == 1
        assert chrome.run("document.documentElement.scrollWidth <= innerWidth"), f"{page.name} scrolls sideways at {width}"


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_the_edge(chrome: Chrome, report, width: int) -> None:
    """Whatever is wider than the page sits in a box that scrolls by itself."""
    chrome.open(report.index, width)
    outside = chrome.run(
        """[...document.querySelectorAll('main *')].filter(e => {
             const box = e.getBoundingClientRect();
             return box.width && box.right > innerWidth + 1 && !e.closest('.scroll, details:not([open])');
           }).map(e => e.tagName + '.' + e.className).slice(0, 5)"""
    )
    assert outside == []


def first_column(chrome: Chrome, table: str, column: int) -> list[str]:
    return chrome.run(f"[...document.querySelector('#{table}').tBodies[0].rows].map(r => r.cells[{column}].innerText)")


def test_tables_sort_by_click_and_by_keyboard(chrome: Chrome, report) -> None:
    chrome.open(report.index, 1400)
    table = "table-headline-facts"
    before = first_column(chrome, table, 0)
    head = f"document.querySelector('#{table}').tHead.rows[0].cells"
    chrome.run(f"{head}[1].querySelector('button').click()")
    values = [float(text.split()[0]) for text in first_column(chrome, table, 1)]
    assert values == sorted(values, reverse=True) and chrome.run(f"{head}[1].getAttribute('aria-sort')") == "descending"
    chrome.run(f"{head}[1].querySelector('button').click()")
    values = [float(text.split()[0]) for text in first_column(chrome, table, 1)]
    assert values == sorted(values) and chrome.run(f"{head}[1].getAttribute('aria-sort')") == "ascending"
    chrome.run(f"{head}[0].querySelector('button').focus()")
    chrome.press("Enter")
    assert first_column(chrome, table, 0) == sorted(before)
    assert chrome.run(f"{head}[1].getAttribute('aria-sort')") is None
    # a dash is no number: it comes last both ways
    chrome.run(f"{head}[2].querySelector('button').click()")
    assert first_column(chrome, table, 0)[-1] == "base"
    chrome.run(f"{head}[2].querySelector('button').click()")
    assert first_column(chrome, table, 0)[-1] == "base"


def test_csv_and_svg_can_be_saved(chrome: Chrome, report) -> None:
    chrome.open(report.index, 1400)
    chrome.run(
        "window.saved = []; HTMLAnchorElement.prototype.click = () => {};"
        "URL.createObjectURL = blob => { saved.push(blob); return 'blob:null/x'; };"
    )
    chrome.run("document.querySelector('button[data-csv=runs]').click()")
    chrome.run("document.querySelector('button.save-svg').click()")
    text = chrome.run("saved[0].text()")
    lines = text.strip().split("\n")
    assert lines[0].startswith("task,method,seed,accuracy") and len(lines) == 1 + 2 * 8
    svg = chrome.run("saved[1].text()")
    assert svg.startswith("<?xml") and "currentColor" not in svg and svg.rstrip().endswith("</svg>")


def test_token_view_switches_and_reads_by_keyboard(chrome: Chrome, report) -> None:
    chrome.open(report.index, 1400)
    shown = "[...document.querySelectorAll('#token-view .token')].map(t => t.style.backgroundColor)"
    entropy = chrome.run(shown)
    assert len(entropy) > 30 and len(set(entropy)) >= 3
    change = "(e => {{ e.value = '{1}'; e.dispatchEvent(new Event('change')); }})(document.querySelector('#token-{0}'))"
    chrome.run(change.format("field", "ratio"))
    ratio = chrome.run(shown)
    assert len(ratio) == len(entropy) and ratio != entropy
    assert chrome.run("document.querySelector('#token-scale').textContent").startswith("Orange above 1")
    assert chrome.run("[...document.querySelectorAll('#token-view h3')].map(h => h.textContent)") == [
        "before training (rollout 1, seed 0)",
        "after training (rollout 31, seed 0)",
    ]
    chrome.run(change.format("method", "tepo_kl"))
    chrome.run(change.format("field", "mask"))
    assert "in the mask" in chrome.run("document.querySelector('#token-scale').textContent")
    chrome.run("document.querySelector('#token-view .text').focus()")
    chrome.press("ArrowRight")
    chrome.press("ArrowRight")
    readout = chrome.run("document.querySelector('#token-view .readout').textContent")
    second = chrome.run("document.querySelectorAll('#token-view .text')[0].children[1].textContent")
    assert readout.startswith(f'"{second}"') and "entropy" in readout


def test_dark_mode_by_button_and_by_preference(chrome: Chrome, report) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('figure svg text, figure svg use, figure svg')).color"
    chrome.open(report.index, 1400)
    light = chrome.run(background), chrome.run(ink)
    chrome.run("document.getElementById('theme').click()")
    dark = chrome.run(background), chrome.run(ink)
    assert light == ("rgb(255, 255, 255)", "rgb(27, 31, 36)") and dark == ("rgb(21, 23, 28)", "rgb(230, 232, 235)")
    assert chrome.run("document.getElementById('theme').textContent") == "Light mode"
    chrome.open(report.index, 1400, dark=True)
    assert (chrome.run(background), chrome.run(ink)) == dark
    chrome.run("document.getElementById('theme').click()")
    assert chrome.run(background) == "rgb(255, 255, 255)"


CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = parse(c).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b; };
  const colour = e => getComputedStyle(e).backgroundColor;
  const ground = e => { for (; e; e = e.parentElement) if (parse(colour(e))[3] !== 0) return colour(e);
    return colour(document.body); };
  const bad = [];
  const kinds = 'p, li, td, th, a, button, summary, dt, dd, .verdict, .muted, .chip, h1, h2, h3, figcaption';
  for (const e of document.querySelectorAll(kinds)) {
    if (!e.innerText?.trim() || e.closest('#token-view') || !e.getClientRects().length) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) bad.push(e.tagName + '.' + e.className + ' ' + ratio.toFixed(2) + ' ' + e.innerText.slice(0, 40));
  }
  return bad;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_on_its_ground(chrome: Chrome, report, dark: bool) -> None:
    for page in [report.index, *report.pages]:
        chrome.open(page, 1400, dark=dark)
        assert chrome.run(CONTRAST) == []


def test_everything_can_be_reached_by_keyboard(chrome: Chrome, report) -> None:
    chrome.open(report.index, 1400)
    chrome.press("Tab")
    assert chrome.run("document.activeElement.className") == "skip"
    seen = []
    for _ in range(60):
        chrome.press("Tab")
        seen.append(chrome.run("document.activeElement.id || document.activeElement.textContent.trim().slice(0, 24)"))
    assert "theme" in seen and "Claims" in seen and "accuracy" in seen and len(set(seen)) > 30
    outline = chrome.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    # every box that scrolls can be focused, so that it can be scrolled without a mouse
    assert chrome.run("[...document.querySelectorAll('.scroll')].every(e => e.tabIndex === 0 && e.getAttribute('aria-label'))")
    assert chrome.run("[...document.querySelectorAll('select')].every(e => e.closest('label'))")


def test_equations_are_drawn(chrome: Chrome, report) -> None:
    chrome.open(report.index, 1400)
    sizes = chrome.run("[...document.querySelectorAll('.equation math')].map(m => m.getBoundingClientRect().height)")
    assert len(sizes) == 7 and min(sizes) > 15
    assert chrome.run("[...document.querySelectorAll('.equation')].every(e => !e.textContent.includes('\\\\'))"), (
        "LaTeX left in an equation"
    )


def test_without_javascript_the_answer_is_still_there(chrome: Chrome, report) -> None:
    chrome.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chrome.open(report.index, 360)
        assert "On facts, tepo_kl" in chrome.run("document.querySelector('#answer').innerText")
        assert chrome.run("document.querySelectorAll('figure svg').length") == 13
    finally:
        chrome.send("Emulation.setScriptExecutionDisabled", value=False)
