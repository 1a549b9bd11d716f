"""Records of finished studies, and a README whose numbers come from one."""

import gzip
import json
import re
from pathlib import Path

import pytest

from tepo_core.analysis.metrics import METRICS
from tepo_core.commands import headline, keep, profiles
from tepo_core.pipeline.inputs import RecordError

ROOT = Path(__file__).parents[2]


def finished_study(root: Path) -> None:
    """A one-run study as 'make repro' leaves it, as far as a record looks at it."""
    text = profiles.text_of(ROOT, "smoke")
    (root / "params.yaml").write_text(text.replace("methods: [grpo, tepo_kl]", "methods: [grpo]"))
    for folder in ("warmup/facts-s0", "train/facts-grpo-s0", "evaluate/facts-grpo-s0", "evaluate/facts-base-s0"):
        run = root / "runs" / folder
        run.mkdir(parents=True)
        (run / "done.json").write_text("{}")
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        (run / "policy").mkdir()
        (run / "policy" / "model.safetensors").write_bytes(b"weights")
    analysis = root / "reports" / "analysis"
    analysis.mkdir(parents=True)
    row = {
        "task": "facts",
        "method": "grpo",
        "accuracy": 0.5,
        "accuracy_low": 0.4,
        "accuracy_high": 0.6,
        "rollouts_to_target": None,
    }
    (analysis / "headline.json").write_text(json.dumps([row]))
    (analysis / "analysis.json").write_text(json.dumps({"profile": "smoke", "seeds": [0], "answer": ["It depends."]}))
    (root / "reports" / "index.html").write_text("<html>")
    (root / "reports" / "provenance.json").write_text("{}")


def test_record_holds_metrics_and_no_weights(tmp_path):
    finished_study(tmp_path)
    out = keep.keep(tmp_path, "smoke")
    names = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert {"params.yaml", "index.html", "provenance.json", "analysis/headline.json"} <= names
    assert gzip.decompress((out / "runs/train/facts-grpo-s0/metrics.jsonl.gz").read_bytes()) == b'{"step": 1}\n'
    assert not [name for name in names if "safetensors" in name]
    first = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    keep.keep(tmp_path, "smoke")
    assert first == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}, "kept twice, the same bytes"


def test_unfinished_study_is_not_kept(tmp_path):
    finished_study(tmp_path)
    (tmp_path / "runs/evaluate/facts-base-s0/done.json").unlink()
    with pytest.raises(RecordError, match="runs/evaluate/facts-base-s0 is missing"):
        keep.keep(tmp_path, "smoke")
    assert not (tmp_path / "records").exists()


def test_readme_block_by_hand(tmp_path):
    finished_study(tmp_path)
    record = keep.keep(tmp_path, "smoke")
    text = keep.results(record)
    assert "| grpo | 0.500 [0.400, 0.600] | - | - | - | - | - | - |" in text
    assert text.startswith("<!-- results: written by 'tepo readme' from records/smoke -->") and "It depends." in text
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- results: written by 'tepo readme' from records/smoke -->\nold\n<!-- end of results -->\nafter\n"
    )
    assert keep.write_readme(tmp_path) and not keep.write_readme(tmp_path)
    assert readme.read_text() == f"before\n{text}\nafter\n"


def test_readme_says_what_the_record_says():
    """The committed table is the one that 'tepo readme' would write."""
    text = (ROOT / "README.md").read_text()
    blocks = list(keep.MARKED.finditer(text))
    assert blocks
    for block in blocks:
        assert block[0] == keep.results(ROOT / block[1])


def test_a_measure_has_one_name():
    """In the tables of runs, in the terminal, in the README and in the comments of the parameters."""
    name = "rollouts_to_target"
    assert {METRICS[name].label, headline.COLUMNS[name], keep.COLUMNS[name]} == {"rollouts to target"}
    assert "'rollouts to target'" in (ROOT / "params.yaml").read_text()
    shared = headline.COLUMNS.keys() & METRICS.keys()
    assert shared >= {"accuracy", "pass_max", "entropy_end", name}, "a column of the terminal is a measure of the same name"


def test_readme_shows_the_example_that_a_test_executes():
    blocks = [
        re.search(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
        for name in ("README.md", "docs/adding_a_method.md")
    ]
    assert blocks[0][1] == blocks[1][1]
