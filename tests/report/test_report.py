"""The report: self-contained, complete, small, the same bytes for the same runs, honest about what is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_pages import make_notebook
from run_factory import Truth, make_runs, make_study

from tepo_core.analysis.stage import analyse
from tepo_core.config import ConfigError
from tepo_core.report import sections
from tepo_core.report.method_cards import flatten, mathml
from tepo_core.report.notebooks import equations_as_mathml
from tepo_core.report.provenance import collect, git_state, wall_times
from tepo_core.report.stage import MOST_BYTES, build_report
from tepo_core.report.tables import Cell, interval_cell, number_cell
from tepo_core.report.tokens import shade, token_view

ROOT = Path(__file__).parents[2]
FIGURES = ["final_accuracy", "learning_curves", "sensitivity"]


@pytest.fixture(scope="module")
def study():
    return make_study(
        methods=["grpo", "tepo_kl", "tepo_kl_all"],
        seeds=[0, 1],
        train={"rollouts": 20},
        variants={"tepo_kl_all": {"preset": "tepo_kl", "kl": {"mask": "all"}, "entropy_test": None}},
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, study) -> Path:
    root = tmp_path_factory.mktemp("report")
    make_runs(root, study, {"tepo_kl": Truth(gain=0.6, mask=0.08, noise=0.01), "grpo": Truth(noise=0.01)})
    shutil.copy(ROOT / "claims.yaml", root)
    make_notebook(root / "runs/train/facts-grpo-s0/notebook.ipynb", "grpo")
    (root / "runs/train/facts-old-s0").mkdir()
    make_notebook(root / "runs/train/facts-old-s0/notebook.ipynb", "old")  # left over from an earlier matrix
    data = root / "data/prepared/facts-s0"
    data.mkdir(parents=True)
    (data / "manifest.json").write_text(json.dumps({"counts": {"test": 2}, "notes": {"bad facts": 54}}), encoding="utf-8")
    for split, prompts in {"train": ["1+1=", "2+2="], "test": ["2+2=", "3+3="], "warmup": ["3+3=", "2+2="]}.items():
        (data / f"{split}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), encoding="utf-8")
    (root / ".tepo/timings").mkdir(parents=True)
    (root / ".tepo/timings/train-facts-grpo-s0.json").write_text('{"seconds": 31.26}', encoding="utf-8")
    analyse(study, root, figures=FIGURES)
    return root


@pytest.fixture(scope="module")
def report(root: Path, study):
    return build_report(study, root)


@pytest.fixture(scope="module")
def html(report) -> str:
    return report.index.read_text(encoding="utf-8")


class Page(HTMLParser):
    """Tags with attributes, the stack checked for balance."""

    VOID = {"meta", "link", "br", "hr", "img", "input", "path", "use"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.stack and self.stack[-1] == tag, f"</{tag}> closes {self.stack[-3:]}"
            self.stack.pop()


def test_nothing_is_loaded_from_anywhere(html: str, report) -> None:
    for text in [html, *(p.read_text(encoding="utf-8") for p in report.pages)]:
        for tag, attributes in Page(text).tags:
            for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                target = attributes.get(name) or ""
                assert not re.match(r"(https?:)?//", target), (tag, target)
                assert tag not in ("iframe", "object", "embed")
        assert "@import" not in text and not re.search(r"url\((?!#|data:)", text)
        assert "Content-Security-Policy" in text and "default-src 'none'" in text


def test_page_is_well_formed_and_links_and_labels_have_their_targets(html: str) -> None:
    page = Page(html)
    assert not page.stack
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        target = attributes.get("href") or ""
        if target.startswith("#"):
            assert target[1:] in ids, (tag, target)
        for name in ("aria-labelledby",):
            assert attributes.get(name, ids[0]) in ids
    buttons = {a["data-csv"] for t, a in page.tags if t == "button" and "data-csv" in a}
    assert buttons and {f"csv-{name}" for name in buttons} <= set(ids)


def test_figures_are_labelled_in_words(html: str, root: Path) -> None:
    described = json.loads((root / "reports/analysis/analysis.json").read_text(encoding="utf-8"))["figures"]
    labels = {a.get("aria-label") for t, a in Page(html).tags if t == "svg"}
    assert len(described) == 3 and labels == {f["alt"] for f in described}


def test_answer_comes_before_everything_else(html: str) -> None:
    order = [
        html.index(f'<section id="{name}"')
        for name in ("answer", "claims", "figures", "tokens", "tables", "methods", "provenance")
    ]
    assert order == sorted(order)
    assert "On facts, tepo_kl " in html[order[0] : order[1]]
    assert "profile: quick" in html and "not evidence" in html[: order[0]]


def test_size(report) -> None:
    assert 50_000 < report.size < MOST_BYTES


def without_provenance(text: str) -> str:
    parts = re.split(r"<!-- provenance:(?:begin|end) -->", text)
    assert len(parts) == 3
    return parts[0] + parts[2]


def test_equal_runs_give_equal_bytes_provenance_aside(
    root: Path, study, report, html: str, tmp_path: Path, monkeypatch
) -> None:
    import tepo_core.report.stage as build

    monkeypatch.setattr(build, "collect", lambda *_: {"git": {"revision": "another", "dirty": True}})
    again = build_report(study, root, out=tmp_path)
    other = again.index.read_text(encoding="utf-8")
    assert other != html and without_provenance(other) == without_provenance(html)
    assert [p.read_bytes() for p in again.pages] == [p.read_bytes() for p in report.pages]
    assert json.loads(again.provenance.read_text(encoding="utf-8"))["git"]["revision"] == "another"


def test_one_page_for_each_notebook_of_a_declared_run(report) -> None:
    (page,) = report.pages
    text = page.read_text(encoding="utf-8")
    assert page.name == "train-facts-grpo-s0.html"
    assert '<details class="code"><summary>Code</summary>' in text and "hello" in text
    assert re.search(r'<a href="#grpo-results">grpo results</a>', text) and 'id="grpo-results"' in text
    assert "<math" in text and "$x^2$" not in text
    assert "alert(1)" not in text and "<td>7</td>" in text
    assert "../index.html" in text


def test_a_broken_notebook_is_named(root: Path, study, tmp_path: Path) -> None:
    path = root / "runs/train/facts-grpo-s1/notebook.ipynb"
    path.write_text("{", encoding="utf-8")
    try:
        with pytest.raises(ValueError, match=r"facts-grpo-s1/notebook.ipynb: not a notebook"):
            build_report(study, root, out=tmp_path)
    finally:
        path.unlink()


def test_what_is_missing_is_said_on_the_first_screen(root: Path, study, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("reports"))
    shutil.rmtree(copy / "runs/train/facts-tepo_kl-s1")
    analyse(study, copy, figures=["final_accuracy"])
    text = build_report(study, copy).index.read_text(encoding="utf-8")
    first = text[text.index('<section id="answer"') : text.index('<section id="claims"')]
    assert "What is missing" in first and "runs/train/facts-tepo_kl-s1" in first and "dvc repro train" in first
    assert "No such" not in first


def test_an_analysis_of_another_study_is_refused(root: Path, study) -> None:
    with pytest.raises(ConfigError, match="made for profile quick.*params.yaml says profile quick with grpo, mpo"):
        build_report(make_study(methods=["grpo", "mpo"], seeds=[0]), root)
    with pytest.raises(ConfigError, match="no analysis here; run 'dvc repro analyse' first"):
        build_report(study, root / "runs")


def test_sensitivity_section_compares_variants_with_their_preset(html: str) -> None:
    part = html[html.index('id="sensitivity"') : html.index('<section id="methods"')]
    assert "Choices in tepo_kl" in part and "tepo_kl_all" in part and "{kl: {mask: all}, entropy_test: null}" in part
    assert part.count("<figure") == 1 and "Choices that the papers leave open" in part


def test_chance_note_counts_by_hand(study) -> None:
    """One variant, four outcomes: [1, 2] and [-2, -1] exclude 0, [-1, 1] does not, one has no interval: 2 of 3, 0.15 by chance."""
    intervals = {"accuracy": (1, 2), "curve_mean": (-2, -1), "pass_max": (-1, 1), "entropy_kept": (float("nan"), float("nan"))}
    book = SimpleNamespace(
        tasks=["facts"],
        methods=["grpo", "tepo_kl", "tepo_kl_all"],
        presets={"grpo": "grpo", "tepo_kl": "tepo_kl", "tepo_kl_all": "tepo_kl"},
        pair=lambda task, method, against, metric: dict(zip(("low", "high"), intervals[metric], strict=True)),
    )
    note = sections.chance_note(book, study)
    assert note.startswith("Of the 3 intervals") and "2 exclude 0; about 0 would" in note
    assert sections.chance_note(book, study.model_copy(update={"variants": {}})) == ""


def test_settings_show_every_parameter(html: str, study) -> None:
    part = html[html.index('<section id="settings"') : html.index('<section id="reproduce"')]
    groups = study.model_dump()
    groups["policy"] |= {f"tiny.{name}": value for name, value in groups["policy"].pop("tiny").items()}
    for group, values in groups.items():
        if isinstance(values, dict) and group != "variants":
            for name in values:
                assert f"<dt>{name}</dt>" in part, f"{group}.{name}"


def test_tables_of_data_count_the_overlap_from_the_files(root: Path, study) -> None:
    counts, overlap = sections.data_tables(root, study)
    assert [c.text for c in counts.rows[0]] == ["facts-s0", "2", "54"]
    # test holds 2+2= and 3+3=: one is in training, both are in the warm-up
    assert [c.text for c in overlap.rows[0]] == ["facts-s0", "test", "2", "1", "2"]


def test_checklist_answers_from_the_data(root: Path, study, html: str) -> None:
    facts = json.loads((root / "reports/analysis/analysis.json").read_text(encoding="utf-8"))
    claims = json.loads((root / "reports/analysis/claims.json").read_text(encoding="utf-8"))
    from tepo_core.analysis.figures.draw import read_book

    book = read_book(study, root / "reports/analysis")
    items = {item: (state, detail) for state, item, detail in sections.checklist(study, facts, claims, book)}
    assert items["All declared runs are in"] == ("yes", "6 of 6; 0 missing or broken parts")
    assert items["Several seeds"][0] == "part" and items["A profile meant as evidence"][0] == "no"
    assert "All declared runs are in" in html


def test_one_seed_says_that_nothing_can_be_concluded() -> None:
    study = make_study(seeds=[0])
    assert "nothing can be concluded" in sections.lead(study, {"tasks": ["facts"]})


# -- parts -----------------------------------------------------------------------------------------------------------------


def test_provenance(root: Path, study, html: str) -> None:
    found = collect(study, root)
    assert found["parameters"]["profile"] == "quick" and set(found["data"]) == {"facts-s0"}
    assert found["wall_times"] == {"train-facts-grpo-s0": 31.3} and found["hardware"]["cores"] >= 1
    assert "train-facts-grpo-s0" in html and found["parameters"]["digest"] in html
    assert wall_times(root / "nowhere") == {}


def test_git_state_ignores_what_the_pipeline_writes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    assert git_state(tmp_path / "none") == {"revision": None, "dirty": None, "changed": []}
    git("init", "-q")
    (tmp_path / "reports").mkdir()
    for name in ("code.py", "reports/index.html"):
        (tmp_path / name).write_text("1", encoding="utf-8")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    (tmp_path / "reports/index.html").write_text("2", encoding="utf-8")
    state = git_state(tmp_path)
    assert state["dirty"] is False and re.fullmatch(r"[0-9a-f]{40}", state["revision"])
    (tmp_path / "code.py").write_text("2", encoding="utf-8")
    assert git_state(tmp_path)["changed"] == ["code.py"]


def test_token_view(root: Path, study) -> None:
    from tepo_core.runs.read import load_runs

    views = token_view(load_runs(study, root), ["facts"], root / "data/prepared")
    assert {v["method"] for v in views} == {"grpo", "tepo_kl", "tepo_kl_all"} and {v["seed"] for v in views} == {0}
    assert {v["moment"] for v in views} == {"before", "after"} and {v["step"] for v in views} == {1, 11}
    view = views[0]
    assert "".join(view["tokens"]["text"]).endswith("}") and view["prompt"].endswith("=")
    assert len({len(column) for column in view["tokens"].values()}) == 1


def test_shaded_response() -> None:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "position": [1, 0],
            "text": ["<b>", "6"],
            "kind": ["digit", None],
            "entropy": [0.2, 0.1],
            "entropy_old": [0.4, 0.1],
            "ratio": [1.5, 0.5],
            "advantage": [1.0, 1.0],
            "mask": [True, False],
            "clipped": [False, False],
            "gradient": [0.1, 0.2],
        }
    )
    text = shade(frame, "ratio")
    assert text.index(">6<") < text.index("&lt;b&gt;") and "<b>" not in text
    assert "rgba(0,114,178,0.750)" in text and "rgba(213,94,0,0.750)" in text  # below 1 blue, above 1 orange
    with pytest.raises(ValueError, match="field = 'mood'; allowed: entropy"):
        shade(frame, "mood")


def test_cells() -> None:
    assert number_cell(None) == Cell("–", float("-inf"))
    assert number_cell(-0.5, 2, sign=True).text == "−0.50"
    better = {"x": 0.05, "x_low": 0.01, "x_high": 0.09}
    assert interval_cell(better, "x", 2, sign=True, better=1) == Cell("+0.05 [+0.01, +0.09]", 0.05, "good")
    assert interval_cell(better, "x", 2, sign=True, better=-1).tone == "bad"
    assert interval_cell({"x": 0.05, "x_low": -0.01, "x_high": 0.09}, "x", sign=True, better=1).tone == ""
    assert interval_cell({"x": 0.5}, "x").text == "0.500" and interval_cell({}, "x").text == "–"


def test_equations_become_mathml() -> None:
    assert mathml(r"\frac{1}{N}\sum_i s_i A_i").startswith("<math") and "\n" not in mathml("a+b")
    text = equations_as_mathml("with $x^2$ and `$HOME` costs 5\\$ or 6\\$, then $$\\sum_i a_i$$ end")
    assert text.count("<math") == 2 and "`$HOME`" in text and 'display="block"' in text and "5\\$ or 6\\$" in text
    assert equations_as_mathml("$a_$") == "$a_$"  # what cannot be converted stays
    assert list(flatten({"clip": [0.2, 0.28], "kl": {"beta": 0.1, "mask": "tepo"}, "p": None})) == [
        ("clip", "[0.2, 0.28]"),
        ("kl.beta", "0.1"),
        ("kl.mask", "tepo"),
    ]


def test_the_token_view_prefers_prompts_that_both_moments_have(tmp_path: Path) -> None:
    """Before and after are compared best on one prompt; without a common one each moment shows what it has."""
    import pandas as pd

    from tepo_core.report.tokens import FIELDS, _of_run

    def token(step: int, response: int, prompt: str, correct: bool) -> dict:
        values = {**dict.fromkeys((*FIELDS, "entropy_old"), 0.5), "position": 0, "text": "x", "kind": "digit"}
        return {**values, "step": step, "response": response, "prompt_id": prompt, "correct": correct}

    def prompts(rows: list[dict]) -> dict[tuple[str, bool], list[str]]:
        pd.DataFrame(rows).to_parquet(tmp_path / "tokens.parquet")
        found: dict[tuple[str, bool], list[str]] = {}
        for view in _of_run(tmp_path, tmp_path / "none.jsonl"):
            found.setdefault((view["moment"], view["correct"]), []).append(view["prompt"])
        return found

    before = [token(1, 0, "a", True), token(1, 1, "b", True), token(1, 2, "z", True), token(1, 3, "z", False)]
    after = [token(9, 4, "c", True), token(9, 5, "d", True), token(9, 6, "z", True), token(9, 7, "b", True)]
    found = prompts([*before, *after])
    assert found["before", True] == found["after", True] == ["b", "z"] and found["before", False] == ["z"]
    found = prompts([*before[:2], *after[:2]])
    assert found["before", True] == ["a", "b"] and found["after", True] == ["c", "d"]
