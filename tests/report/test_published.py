"""The papers' numbers: every row has its source and setting, averages come from the cells, ours never enter theirs."""

import json
from pathlib import Path

import pytest

from tepo_core.evaluation.samples import average_of_cells
from tepo_core.report.published import OURS, our_cells, published_table, read_published
from tepo_core.tasks.benchmark_table import BENCHMARKS
from tepo_core.tasks.problem import DataError

FILE = Path(__file__).parents[2] / "data" / "published.yaml"


def test_averages_are_recomputed_and_differ_from_the_printed_ones():
    frame = published_table(read_published(FILE)).set_index("method")
    means = frame.loc[["GRPO", "GRPO with clip-higher", "Clip-Cov", "KL-Cov"], ["mean of cells", "printed average"]]
    assert means["mean of cells"].round(2).tolist() == [39.09, 39.84, 41.74, 41.09]
    assert means["printed average"].tolist() == [38.6, 38.8, 40.4, 40.6]
    assert frame.loc["KL-Cov", "mean of cells"] == pytest.approx(average_of_cells([22.6, 12.9, 61.4, 80.8, 29.1, 42.6, 38.2]))


def test_every_number_has_a_source_a_model_and_a_confidence():
    frame = published_table(read_published(FILE))
    assert frame[["model", "source", "confidence"]].notna().all().all() and set(frame["whose"]) == {"published"}
    assert frame.set_index("method").loc["TEPO", "confidence"] == "low"
    sets = {name for entry in read_published(FILE)["tables"] for name in entry["sets"]}
    assert {OURS.get(name, name) for name in sets} - set(BENCHMARKS) == {"math"}  # the whole of MATH is not a set of this study


def test_ours_stand_beside_and_change_nothing():
    published = read_published(FILE)
    with_ours = published_table(published, {("grpo", "amc83"): 0.5, ("grpo", "math500"): 0.25})
    theirs = with_ours[with_ours["whose"] == "published"].reset_index(drop=True)
    assert theirs.equals(published_table(published)[theirs.columns])
    mine = with_ours[with_ours["whose"] == "this study"]
    assert mine["method"].tolist() == ["GRPO"] and mine["amc"].tolist() == [50.0] and mine["math500"].tolist() == [25.0]
    assert mine["mean of cells"].isna().all() and mine["source"].isna().all()


def test_our_cells_are_means_over_seeds_of_evaluated_benchmarks(tmp_path):
    for seed, greedy in ((0, 0.5), (1, 0.7)):
        run = tmp_path / f"gsm8k-train-grpo-s{seed}"
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"method": "grpo"}))
        split = {"samples": 0, "avg": None, "greedy": greedy}
        splits = {"math500": split, "aime24": {"samples": 32, "avg": 0.1, "greedy": None}, "test": split}
        (run / "summary.json").write_text(json.dumps({"splits": splits}))
    assert our_cells(tmp_path) == {("grpo", "math500"): pytest.approx(0.6), ("grpo", "aime24"): pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("source: arXiv 2602.14386\n", "source:\n", "table 'mpo': 'source' is missing"),
        ("confidence: medium\n", "confidence: sure\n", "allowed: high, medium, low"),
        ("cells: [86.6, 76.3]", "cells: [86.6]", "row 'PPO': needs 2 cells"),
        ("cells: [86.6, 76.3]", "cells: [866, 76.3]", "in per cent"),
        ("tables:", "tables: [", "not valid YAML"),
    ],
)
def test_faults_are_named(tmp_path, old, new, message):
    text = FILE.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "published.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_published(tmp_path / "published.yaml")
    with pytest.raises(DataError, match="no such file"):
        read_published(tmp_path / "none.yaml")
