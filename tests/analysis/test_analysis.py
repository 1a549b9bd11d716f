"""The analyse stage as a whole: known truth is found, equal inputs give equal bytes, one number changes what depends on it
and no more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from run_factory import Truth, make_evaluation, make_run, make_runs, make_study

from tepo_core.analysis import gains
from tepo_core.analysis.answer import answer, between, number
from tepo_core.analysis.credit import early_gradient, fact_table, rank_correlation
from tepo_core.analysis.figures.draw import FIGURES, draw_all, main, read_book
from tepo_core.analysis.stage import analyse
from tepo_core.analysis.statistics import seed_interval, shared_problem_variance
from tepo_core.analysis.summaries import level, run_row, run_table, seed_values
from tepo_core.analysis.tables import evaluation_table
from tepo_core.analysis.times import times_to
from tepo_core.config import ConfigError
from tepo_core.runs import folder as run_record
from tepo_core.runs.read import load_runs

ROOT = Path(__file__).parents[2]
TRUTHS = {"grpo": Truth(noise=0.01), "tepo_kl": Truth(gain=0.6, tau=8.0, decisive=0.5, mask=0.08, noise=0.01)}


@pytest.fixture(scope="module")
def study():
    return make_study(methods=["grpo", "tepo_kl"], seeds=[0, 1, 2])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, study) -> Path:
    root = tmp_path_factory.mktemp("study")
    make_runs(root, study, TRUTHS)
    shutil.copy(ROOT / "claims.yaml", root)
    return root


@pytest.fixture(scope="module")
def analysis(root: Path, study):
    return analyse(study, root)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# -- numbers ---------------------------------------------------------------------------------------------------------------


def test_a_run_in_numbers_is_what_it_was_made_of(root: Path, study, tmp_path: Path) -> None:
    truth = Truth(seed_shift=0.0, mask=0.08, clip=0.1, decisive=0.45, fell=0.7)
    run = load_runs_of(make_run(tmp_path, study, "facts", "tepo_kl", 0, truth))
    row = run_row(run, study)
    steps = np.arange(40)
    assert row["entropy_start"] == pytest.approx(truth.entropy(steps[:4]).mean())
    assert row["entropy_kept"] == pytest.approx(truth.entropy(steps[-4:]).mean() / truth.entropy(steps[:4]).mean())
    assert row["reward_end"] == pytest.approx(truth.reward(steps[-4:], 0.0).mean())
    # the factory's entropy follows the law exactly: a (e^0.4 - e^0.05) = 0.5
    assert row["law_a"] == pytest.approx(0.5 / (np.exp(0.4) - np.exp(0.05)), rel=1e-4)
    assert row["law_r2"] == pytest.approx(1.0) and row["law_error"] == pytest.approx(0.0, abs=1e-5)
    assert row["law_ceiling"] == pytest.approx(0.8 + row["law_a"] * (np.exp(0.05) - 1), rel=1e-4)
    # the first of four updates moves nothing: three quarters of the stated shares, but all of what is counted after it
    assert row["clip"] == pytest.approx(0.075) and row["mask"] == pytest.approx(0.06)
    assert row["fell"] == pytest.approx(0.7)
    assert row["gradient_decisive"] == pytest.approx(0.45) and row["tokens_decisive"] == pytest.approx(0.05)
    assert row["clip_decisive"] == pytest.approx(0.05)  # clipping falls evenly on tokens here
    assert row["entropy_decisive"] == pytest.approx(0.45)
    assert row["gradient_focus"] == pytest.approx(9.0) and row["clip_focus"] == pytest.approx(1.0)
    assert row["covariance_correlation"] == pytest.approx(1.0)
    # 0.3 + 0.5 (1 - e^(-s/20)) = 0.6 at s = 20 ln 2.5 = 18.3, read off measurements every 5 rollouts
    assert row["rollouts_to_target"] == pytest.approx(20 * np.log(2.5), abs=0.3) and row["reached"] == 1.0
    assert row["ratio_spread"] == pytest.approx(0.05 * np.sqrt(0.75)) and row["length_drift"] == 1.0


def load_runs_of(folder: Path):
    from tepo_core.runs.read import read_run

    return read_run(folder)


def test_headline_and_answer(analysis) -> None:
    row = analysis.headline.set_index("method").loc["tepo_kl"]
    assert row["difference_low"] < row["difference"] < row["difference_high"]
    assert row["accuracy_low"] < row["accuracy"] < row["accuracy_high"]
    pair = analysis.tables["pairs"].set_index(["method", "against", "metric"]).loc[("tepo_kl", "base", "accuracy")]
    assert (row["gain_low"], row["gain_high"]) == (pair["boot_low"], pair["boot_high"])  # levels and gains: bootstrap
    pair = analysis.tables["pairs"].set_index(["method", "against", "metric"]).loc[("tepo_kl", "grpo", "accuracy")]
    assert (row["difference_low"], row["difference_high"]) == (pair["low"], pair["high"])  # differences: t
    assert row["gain"] == pytest.approx(row["accuracy"] - analysis.headline.set_index("method").loc["base", "accuracy"])
    assert row["time_ratio"] < 1  # twice as fast by construction
    (line,) = json.loads((analysis.out / "analysis.json").read_text(encoding="utf-8"))["answer"]
    assert line.startswith("On facts, tepo_kl ") and ", 3 seeds" in line
    assert number(-0.1234) == "−0.123" and number(None) == "–" and between(0.1, None) == ""


def test_accuracy_is_that_of_the_samples(root: Path, analysis) -> None:
    table = analysis.tables["evaluation"]
    row = table[(table["method"] == "grpo") & (table["split"] == "test") & (table["metric"] == "accuracy")].iloc[0]
    means = []
    for seed in range(3):
        samples = pd.read_parquet(root / f"runs/evaluate/facts-grpo-s{seed}/samples.parquet")
        drawn = samples[(samples["split"] == "test") & (samples["sample"] >= 0)]
        means.append((drawn["outcome"] == "correct").mean())
    assert row["estimate"] == pytest.approx(np.mean(means)) and row["problems"] == 60 and row["samples"] == 4
    assert row["bootstrap_low"] < row["estimate"] < row["bootstrap_high"]


def test_metrics_for_dvc_are_nested_numbers(analysis) -> None:
    metrics = json.loads((analysis.out / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["results"]["facts"]["tepo_kl"]["accuracy"] > metrics["results"]["facts"]["base"]["accuracy"]
    assert metrics["runs"] == {"used": 6, "evaluations": 9, "problems": 0}
    assert sum(metrics["verdicts"].values()) == len(analysis.verdicts)
    for name in ("reward", "entropy", "accuracy", "clip", "pass_at_k"):
        frame = pd.read_csv(analysis.out / "plots" / f"{name}.csv")
        assert len(frame) and frame["value"].notna().all() and list(frame.columns)[1:] == ["series", "value"]


def test_every_figure_was_drawn_with_words(analysis) -> None:
    assert {f["name"] for f in analysis.figures} == set(FIGURES) - {"sensitivity"}  # no variants here
    for figure in analysis.figures:
        assert len(figure["alt"]) > 40 and "nothing was measured" not in figure["alt"]
        assert (analysis.out / "figures" / f"{figure['file']}.svg").stat().st_size > 5000


def test_notebook_views(analysis) -> None:
    assert list(analysis.headline_shown().index.names) == ["task", "method"]
    assert analysis.picture("mask").data.startswith(b"\x89PNG")
    assert set(analysis.verdict_table()["verdict"]) <= {"PASS", "FAIL", "INCONCLUSIVE", "NOT TESTED"}
    with pytest.raises(ConfigError, match="'beauty'.*was not drawn; there are: final_accuracy"):
        analysis.picture("beauty")


# -- credit ----------------------------------------------------------------------------------------------------------------


def test_credit_tables(analysis) -> None:
    facts, prediction = analysis.tables["facts"], analysis.tables["credit_prediction"]
    assert (facts["corrected_at"] <= 80).all() and facts["early_gradient"].ge(0).all()
    row = prediction[(prediction["predictor"] == "start_probability") & (prediction["outcome"] == "end_probability")].iloc[0]
    assert row["correlation"] > 0.95  # the factory corrects facts in the order of their planted chance
    row = prediction[(prediction["predictor"] == "start_probability") & (prediction["outcome"] == "corrected_at")].iloc[0]
    assert row["correlation"] < -0.3


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert np.isnan(rank_correlation([1, 2, 3], [1, 2, 3])) and np.isnan(rank_correlation([1, 1, 1, 1], [1, 2, 3, 4]))


def test_early_gradient_by_fact(tmp_path: Path) -> None:
    rows = {"step": [1, 1, 10, 20], "fact": ["1+2", None, "1+2", "1+2"], "gradient": [0.5, 9.0, 0.25, 4.0]}
    pd.DataFrame(rows).to_parquet(tmp_path / "tokens.parquet")
    found = early_gradient(tmp_path / "tokens.parquet", 10)
    assert found.loc["1+2"].tolist() == [0.75, 2]  # the step beyond 10 is late, the token without a fact is none


def test_tasks_without_planted_facts_have_no_fact_table(tmp_path: Path) -> None:
    study = make_study(tasks=["noise"], methods=["grpo"], seeds=[0], train={"rollouts": 10})
    make_run(tmp_path, study, "noise", "grpo", 0, Truth())
    assert fact_table(load_runs(study, tmp_path), "noise").empty


# -- bytes -----------------------------------------------------------------------------------------------------------------


def test_equal_inputs_give_equal_bytes(root: Path, study, analysis, tmp_path: Path) -> None:
    again = analyse(study, root, tmp_path / "again")
    assert contents(again.out) == contents(analysis.out)


def changed(root: Path, study, analysis, tmp_path: Path, edit) -> set[str]:
    """Files of the analysis that differ after ``edit(root)``."""
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("reports"))
    edit(copy)
    before, after = contents(analysis.out), contents(analyse(study, copy).out)
    assert set(before) == set(after)
    return {name for name in before if before[name] != after[name]}


def figure(*names: str) -> set[str]:
    return {f"figures/{name}-facts.{kind}" for name in names for kind in ("svg", "png")}


def test_one_number_of_one_update_changes_what_shows_it_and_nothing_else(root: Path, study, analysis, tmp_path: Path) -> None:
    def edit(copy: Path) -> None:
        folder = copy / "runs/train/facts-tepo_kl-s1"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        record = next(line for line in lines if line["kind"] == "update" and line["step"] == 7 and line["update"] == 3)
        record["sums"]["positive_entropy_fell"][0] = 0.0
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines), encoding="utf-8"
        )
        run_record.finish(folder)

    tables = {f"tables/{name}.csv" for name in ("runs", "methods", "pairs")}
    expected = tables | {"curves.parquet"} | figure("mask")
    assert changed(root, study, analysis, tmp_path, edit) - {"analysis.json"} == expected


def test_one_answer_of_one_problem_changes_accuracy_everywhere_and_no_curve(
    root: Path, study, analysis, tmp_path: Path
) -> None:
    def edit(copy: Path) -> None:
        folder = copy / "runs/evaluate/facts-tepo_kl-s0"
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        counts = summary["splits"]["test"]["per_problem"]["correct"]
        counts[counts.index(max(counts))] -= 2
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        run_record.finish(folder)

    tables = {f"tables/{name}.csv" for name in ("runs", "methods", "pairs", "claims", "evaluation", "gains", "reliability")}
    other = {"headline.csv", "headline.json", "claims.json", "metrics.json", "analysis.json", "plots/pass_at_k.csv"}
    expected = tables | other | figure("final_accuracy", "pass_at_k")
    assert changed(root, study, analysis, tmp_path, edit) == expected


# -- what is missing -------------------------------------------------------------------------------------------------------


def test_a_study_with_holes_is_analysed_and_says_so(root: Path, study, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns("reports"))
    copy = tmp_path / "copy"
    shutil.rmtree(copy / "runs/train/facts-tepo_kl-s0")
    shutil.rmtree(copy / "runs/evaluate/facts-tepo_kl-s0")
    shutil.rmtree(copy / "runs/evaluate/facts-tepo_kl-s1")
    metrics = copy / "runs/train/facts-grpo-s2/metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    run_record.finish(metrics.parent)
    found = analyse(study, copy)
    assert sorted(found.findings()["kind"]) == ["broken", "missing", "missing", "missing"]
    row = found.headline.set_index("method").loc["tepo_kl"]
    assert (
        row["seeds"] == 1 and pd.isna(row["accuracy_low"]) and pd.isna(row["difference_low"])
    )  # one seed: a number, no interval
    assert pd.notna(row["accuracy"]) and pd.notna(row["difference"])
    lines = json.loads((found.out / "analysis.json").read_text(encoding="utf-8"))["answer"]
    assert "cannot be judged against grpo" in lines[0] and "1 seed (one seed, so no interval)." in lines[0]
    verdicts = {v.claim.id: v for v in found.verdicts}
    assert verdicts["tepo-kl-accuracy"].verdict == "NOT TESTED"


def test_a_method_without_any_run_is_left_out_of_tables_but_named(tmp_path: Path) -> None:
    study = make_study(methods=["grpo", "tepo"], seeds=[0, 1], train={"rollouts": 20}, tasks=["noise"])
    make_runs(tmp_path, make_study(methods=["grpo"], seeds=[0, 1], train={"rollouts": 20}, tasks=["noise"]))
    shutil.copy(ROOT / "claims.yaml", tmp_path)
    found = analyse(study, tmp_path, figures=["final_accuracy", "credit", "facts", "rollouts_to_target"])
    assert [f["name"] for f in found.figures] == ["final_accuracy", "credit", "rollouts_to_target"]  # noise plants no facts
    assert set(found.headline["method"]) == {"base", "grpo"}
    assert sum(f.kind == "missing" and "tepo" in f.path for f in found.runs.findings) == 4


def test_nothing_usable_is_an_error_that_names_the_runs(tmp_path: Path) -> None:
    shutil.copy(ROOT / "claims.yaml", tmp_path)
    with pytest.raises(ConfigError, match="runs/warmup/facts-s0: declared in params.yaml"):
        analyse(make_study(), tmp_path)


def test_identical_seeds_give_no_interval(tmp_path: Path) -> None:
    study = make_study(methods=["grpo"], seeds=[0, 1], train={"rollouts": 20}, tasks=["noise"])
    for seed in study.seeds:
        make_run(tmp_path, study, "noise", "grpo", seed, Truth(seed_shift=0.0))
    runs = load_runs(study, tmp_path)
    table = run_table(runs, study)
    found = level(table, runs, "noise", "grpo", "reward_end", 0.95)
    assert found.estimate is not None and not found.known and found.reason == "no variation between seeds"


def test_shared_problem_sets_count_once_and_widen_intervals(tmp_path: Path) -> None:
    """A benchmark has the same problems for every seed; an imported run may bring one."""
    study = make_study(methods=["grpo"], seeds=[0, 1])
    for seed in study.seeds:
        make_evaluation(tmp_path, study, "math", "grpo", seed, Truth(), tmp_path / f"runs/imported/lab/{seed}")
    runs = load_runs(study, tmp_path)
    counts = [0, 1, 2, 3, 4] * 4
    for evaluation in runs.evaluations.values():  # ids without the seed: the same twenty problems, some harder than others
        for entry in evaluation.splits.values():
            entry["per_problem"]["id"] = [f"math-{i}" for i in range(entry["problems"])]
        shifted = counts if evaluation.seed == 0 else [max(c - 1, 0) for c in counts]
        evaluation.splits["test"]["per_problem"]["correct"] = shifted
    table = evaluation_table(runs, study)
    row = table[(table["method"] == "grpo@lab") & (table["split"] == "test") & (table["metric"] == "accuracy")].iloc[0]
    assert row["problems"] == 20  # once, not twice
    values = list(seed_values(run_table(runs, study), "math", "grpo@lab", "accuracy").values())
    extra = shared_problem_variance(np.stack([e.counts("test")[1] / 4 for e in runs.evaluations.values()]))
    assert extra > 0
    expected = seed_interval(values, 0.95, bounds=(0.0, 1.0), problem_variance=extra)
    found = level(run_table(runs, study), runs, "math", "grpo@lab", "accuracy", 0.95)
    assert (found.low, found.high) == (expected.low, expected.high) == (row["low"], row["high"])


def test_imported_runs_appear_in_everything(root: Path, study, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "copy", ignore=shutil.ignore_patterns("reports"))
    copy = tmp_path / "copy"
    for seed in study.seeds:
        make_run(copy, study, "facts", "grpo", seed, Truth(gain=0.4), copy / f"runs/imported/verl/train{seed}")
        make_evaluation(copy, study, "facts", "grpo", seed, Truth(gain=0.4), copy / f"runs/imported/verl/evaluate{seed}")
    found = analyse(study, copy, figures=["final_accuracy"])
    assert "grpo@verl" in set(found.headline["method"]) and "grpo@verl" in set(found.tables["times"]["method"])
    svg = (found.out / "figures/final_accuracy-facts.svg").read_text(encoding="utf-8")
    assert "grpo@verl" in svg  # matplotlib keeps the text beside its glyphs, as a comment


# -- figures again ---------------------------------------------------------------------------------------------------------


def test_a_figure_drawn_again_from_the_tables_is_the_same(study, analysis, tmp_path: Path) -> None:
    book = read_book(study, analysis.out)
    drawn = draw_all(book, tmp_path, ["credit", "final_accuracy"])
    for figure_ in drawn:
        assert (tmp_path / f"{figure_['file']}.svg").read_bytes() == (
            analysis.out / "figures" / f"{figure_['file']}.svg"
        ).read_bytes()
    with pytest.raises(ConfigError, match="figure 'beauty' is unknown; allowed: final_accuracy"):
        draw_all(book, tmp_path, ["beauty"])
    with pytest.raises(ConfigError, match="no analysis here"):
        read_book(study, tmp_path)


def test_the_command_line_explains_a_wrong_name(analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    import tepo_core.analysis.figures.draw as figures

    monkeypatch.setattr(figures, "find_root", lambda: analysis.out.parents[1])
    monkeypatch.setattr(figures, "load_study", lambda path: analysis.study)
    with pytest.raises(SystemExit, match="error: figure 'beauty' is unknown"):
        main(["beauty"])


def test_times_to_use_the_other_methods_end(analysis) -> None:
    a, b, seeds, end = times_to(analysis.runs, "facts", "tepo_kl", "grpo", None)
    assert len(a) == len(b) == 3 and seeds == [0, 1, 2] and end == 40
    assert all(x.step < y.step for x, y in zip(a, b, strict=True))


def test_answer_without_a_pair() -> None:
    class Nothing:
        reference, methods, tasks = "grpo", ["grpo"], ["facts"]
        tables = {"gains": pd.DataFrame(columns=list(gains.COLUMNS))}

    assert answer(Nothing()) == ["No pair of methods shares a seed, so nothing can be compared."]


def one_run(base, run):
    """A run set with one run and its base: per-problem accuracies, one sample each."""

    class Fixed:
        def __init__(self, values):
            self.values, self.splits = values, {"test": {}}

        def counts(self, split):
            return None, np.array(self.values), 1

        def greedy(self, split):
            return None

    found = {"base": {0: Fixed(base)}, "grpo": {0: Fixed(run)}}
    return SimpleNamespace(tasks=["noise"], methods=["base", "grpo"], evaluated=lambda task, method: found[method])


def test_gain_of_a_single_run_has_an_interval_over_problems() -> None:
    """40 of 100 problems go from wrong to right and 10 back: gain 0.3, and its standard error over problems is
    sqrt((0.5 - 0.09) / 100) = 0.064, so the interval is about 0.3 -+ 1.96 x 0.064."""
    base, run = [0] * 40 + [1] * 10 + [1] * 50, [1] * 40 + [0] * 10 + [1] * 50
    (row,) = gains.gains_table(one_run(base, run), make_study(analyse={"bootstrap": 4000})).to_dict("records")
    assert (row["base"], row["run"], row["gain"], row["problems"]) == pytest.approx((0.6, 0.9, 0.3, 100))
    assert row["low"] == pytest.approx(0.3 - 1.96 * 0.064, abs=0.015)
    assert row["high"] == pytest.approx(0.3 + 1.96 * 0.064, abs=0.015)

    class Book:
        reference, methods, tasks = "grpo", ["grpo"], ["noise"]
        tables = {"gains": pd.DataFrame([row])}

    first, second = answer(Book())
    assert (
        first.startswith("No pair")
        and "right, its base policy 0.600: +0.300 [+0.1" in second
        and "100 problems alone" in second
    )


def test_gain_without_an_interval_where_there_is_none() -> None:
    for base, run in (([0], [1]), ([0, 0, 0], [1, 1, 1])):
        (row,) = gains.gains_table(one_run(base, run), make_study()).to_dict("records")
        assert row["gain"] == 1 and row["low"] is None
