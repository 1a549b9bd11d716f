"""Reading runs: what is missing, broken, left over or imported is named; sums are summed before they are divided."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_factory import Truth, make_evaluation, make_run, make_runs, make_study

from tepo_core.runs.folder import RunError, finish
from tepo_core.runs.metrics import metric_line, read_metrics
from tepo_core.runs.read import load_runs, read_run


@pytest.fixture(scope="module")
def study():
    return make_study(methods=["grpo", "tepo"], train={"rollouts": 12, "validate_every": 4})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, study) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_runs(root, study)
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    return tmp_path


def found(root: Path, study) -> list[tuple[str, str]]:
    return [(f.kind, f.path) for f in load_runs(study, root).findings]


def rewrite(folder: Path, name: str, change) -> None:
    """Change a file of a run and its hash with it, as if the run had written it so."""
    path = folder / name
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    finish(folder)


def test_a_complete_study_has_nothing_to_say(root: Path, study) -> None:
    runs = load_runs(study, root)
    assert not runs.findings
    assert len(runs.runs) == 6 and len(runs.evaluations) == 9 and len(runs.warmups) == 3
    assert list(runs.of("facts", "tepo")) == [0, 1, 2]


def test_a_missing_seed_is_named_with_the_command_that_makes_it(root: Path, study) -> None:
    shutil.rmtree(root / "runs/train/facts-tepo-s1")
    runs = load_runs(study, root)
    (finding,) = runs.findings
    assert (finding.kind, finding.path, finding.fix) == ("missing", "runs/train/facts-tepo-s1", "dvc repro train")
    assert list(runs.of("facts", "tepo")) == [0, 2]


def test_an_unfinished_run_is_broken(root: Path, study) -> None:
    (root / "runs/train/facts-grpo-s0/done.json").unlink()
    assert found(root, study) == [("broken", "runs/train/facts-grpo-s0")]


def test_a_run_cut_in_the_middle_of_a_line(root: Path, study) -> None:
    folder = root / "runs/train/facts-grpo-s2"
    rewrite(folder, "metrics.jsonl", lambda text: text[:-40])
    (finding,) = load_runs(study, root).findings
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").count("\n") + 1
    assert finding.kind == "broken" and f"line {lines}: cut" in finding.reason


def test_a_file_changed_after_the_run_is_noticed(root: Path, study) -> None:
    path = root / "runs/train/facts-grpo-s0/metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"step": 3,', '"step":  3,', 1), encoding="utf-8")
    (finding,) = load_runs(study, root).findings
    assert finding.kind == "broken" and "metrics.jsonl" in finding.reason and "hash" in finding.reason


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind":"rollout"', "not a metrics record"),
        ('{"kind":"dream","step":1}', "not a metrics record"),
        ('{"kind":"rollout","step":1,"sums":{"reward":"high"},"values":{}}', "lacks a field or has a wrong type"),
    ],
)
def test_malformed_metrics_say_where(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(RunError, match=message):
        _ = read_metrics(path).rollout


def test_a_summary_whose_counts_do_not_fit_is_broken(root: Path, study) -> None:
    folder = root / "runs/evaluate/facts-tepo-s0"
    rewrite(folder, "summary.json", lambda text: text.replace('"problems": 20', '"problems": 21'))
    (finding,) = load_runs(study, root).findings
    assert finding.kind == "broken" and "'test'" in finding.reason


def test_nan_is_noted_and_left_out_of_means(root: Path, study) -> None:
    folder = root / "runs/train/facts-grpo-s0"

    def poison(text: str) -> str:
        lines = [json.loads(line) for line in text.splitlines()]
        first = next(line for line in lines if line["kind"] == "update")
        first["sums"]["kl_old"] = [None, 320]  # how the trainer writes what is not finite
        return "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)

    rewrite(folder, "metrics.jsonl", poison)
    runs = load_runs(study, root)
    (finding,) = runs.findings
    assert finding.kind == "note" and "kl_old" in finding.reason
    update = runs.runs["facts", "grpo", 0].update
    # 12 rollouts x 4 updates, of which the first of each is 0; one of the zeros is gone
    assert update.total("kl_old") == pytest.approx(0.002 * 36 / 47)


def test_a_run_made_with_other_parameters_is_noted(root: Path, study) -> None:
    rewrite(root / "runs/train/facts-tepo-s0", "config.json", lambda text: text.replace('"lr": 0.0001', '"lr": 0.0003'))
    (finding,) = load_runs(study, root).findings
    assert finding.kind == "note" and "train.lr = 0.0003 (declared 0.0001)" in finding.reason


def test_an_early_stop_is_noted(root: Path, study) -> None:
    stop = json.dumps({"kind": "stop", "step": 12, "reason": "KL above stop_kl"}) + "\n"
    rewrite(root / "runs/train/facts-tepo-s0", "metrics.jsonl", lambda text: text + stop)
    (finding,) = load_runs(study, root).findings
    assert finding.kind == "note" and "KL above stop_kl" in finding.reason


def test_orphans_of_an_earlier_matrix_are_named_and_not_used(root: Path, study) -> None:
    smaller = make_study(methods=["grpo"], train={"rollouts": 12, "validate_every": 4}, seeds=[0, 1])
    runs = load_runs(smaller, root)
    orphans = [f.path for f in runs.findings if f.kind == "orphan"]
    assert "runs/train/facts-tepo-s0" in orphans and "runs/warmup/facts-s2" in orphans and len(orphans) == 1 + 4 + 5
    assert {key[1] for key in runs.runs} == {"grpo"} and {key[2] for key in runs.runs} == {0, 1}


def test_a_folder_whose_config_says_something_else(root: Path, study) -> None:
    shutil.rmtree(root / "runs/train/facts-tepo-s0")
    shutil.copytree(root / "runs/train/facts-grpo-s0", root / "runs/train/facts-tepo-s0")
    (finding,) = load_runs(study, root).findings
    assert finding.kind == "broken" and "facts-grpo-0" in finding.reason and "facts-tepo-0" in finding.reason


def test_imported_runs_appear_under_their_own_name(root: Path, study) -> None:
    for seed in study.seeds:
        make_run(root, study, "facts", "grpo", seed, Truth(gain=0.3), root / f"runs/imported/verl/train/{seed}")
        make_evaluation(root, study, "facts", "grpo", seed, Truth(gain=0.3), root / f"runs/imported/verl/evaluate/{seed}")
    runs = load_runs(study, root)
    assert runs.methods == ["grpo", "tepo", "grpo@verl"] and runs.imported == ["verl"] and not runs.findings
    assert list(runs.of("facts", "grpo@verl")) == [0, 1, 2] and list(runs.evaluated("facts", "grpo@verl")) == [0, 1, 2]


def test_a_broken_import_is_named(root: Path, study) -> None:
    folder = make_run(root, study, "facts", "grpo", 0, Truth(), root / "runs/imported/trl")
    (folder / "done.json").unlink()
    assert found(root, study) == [("broken", "runs/imported/trl")]


def test_steps_are_merged_by_summing_before_dividing(tmp_path: Path) -> None:
    lines = [
        metric_line("rollout", 1, {"reward": (1.0, 4.0)}, {}),
        metric_line("update", 1, {"clip": (1.0, 10.0)}, {"grad_norm": 2.0, "ratio_max": 1.5}, update=1),
        metric_line("update", 1, {"clip": (9.0, 30.0)}, {"grad_norm": 4.0, "ratio_max": 1.2}, update=2),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    update = read_metrics(tmp_path / "metrics.jsonl").update
    step = update.per_step()
    assert step.mean("clip").tolist() == [0.25]  # 10 / 40, where the mean of means would be 0.2
    assert step.mean("grad_norm").tolist() == [3.0] and step.mean("ratio_max").tolist() == [1.5]
    assert np.isnan(update.mean("never")).all() and np.isnan(update.total("never"))


def test_shares_of_tokens_count_the_responses_that_an_update_left_out(tmp_path: Path) -> None:
    """Responses without advantage need no forward pass for some methods; they are tokens all the same."""
    sums = {"clip": (10.0, 100.0), "kl_old": (1.0, 100.0), "computed": (100.0, 400.0)}
    lines = [
        metric_line("rollout", 1, {"reward": (1, 4)}, {}),
        metric_line("update", 1, sums, {}, update=1),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    update = read_metrics(tmp_path / "metrics.jsonl").update
    assert update.mean("clip").tolist() == [10 / 400]
    assert update.mean("kl_old").tolist() == [1 / 100]  # measured on what was computed


def test_no_runs_at_all(tmp_path: Path, study) -> None:
    runs = load_runs(study, tmp_path)
    assert not runs.runs and {f.kind for f in runs.findings} == {"missing"} and len(runs.findings) == 3 + 6 + 9


def test_formats_of_the_future_are_refused(root: Path, study) -> None:
    folder = root / "runs/train/facts-grpo-s0"
    rewrite(folder, "config.json", lambda text: text.replace('"format": 1', '"format": 2'))
    with pytest.raises(RunError, match="format = 2; this version reads format 1"):
        read_run(folder)


def test_records_with_other_names_keep_the_rows_apart(tmp_path: Path) -> None:
    """Some metrics are measured every few rollouts: where they are absent they count nothing."""
    lines = [
        metric_line("rollout", 1, {"reward": (1, 4), "kl_base": (3.0, 10.0)}, {"tokens": 5}),
        metric_line("rollout", 2, {"reward": (2, 4)}, {}),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    rollout = read_metrics(tmp_path / "metrics.jsonl").rollout
    assert rollout.mean("reward").tolist() == [0.25, 0.5]
    assert rollout.mean("kl_base")[0] == 0.3 and np.isnan(rollout.mean("kl_base")[1]) and rollout.total("kl_base") == 0.3
    assert rollout.values["tokens"][0] == 5 and np.isnan(rollout.values["tokens"][1])


def test_python_nan_in_an_imported_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "rollout", "step": 1, "sums": {"reward": [NaN, 4]}, "values": {}}\n', encoding="utf-8")
    rollout = read_metrics(path).rollout
    assert np.isnan(rollout.mean("reward")[0])


def without(text: str, *steps: int) -> str:
    """metrics.jsonl without the events of some steps."""
    return "".join(line + "\n" for line in text.splitlines() if json.loads(line)["step"] not in steps)


@pytest.mark.parametrize(
    ("gone", "found"), [((11, 12), "rollouts 1 to 10 of 12"), ((5,), "rollout 5 of 12"), ((1, 2), "rollout 1 of 12")]
)
def test_a_run_whose_rollouts_are_not_all_there_is_broken(root: Path, study, gone, found) -> None:
    rewrite(root / "runs/train/facts-tepo-s0", "metrics.jsonl", lambda text: without(text, *gone))
    runs = load_runs(study, root)
    (finding,) = runs.findings
    assert finding.kind == "broken" and found in finding.reason and "train.rollouts" in finding.reason
    assert list(runs.of("facts", "tepo")) == [1, 2]


def test_a_run_that_stopped_early_is_whole_up_to_its_stop(root: Path, study) -> None:
    stop = json.dumps({"kind": "stop", "step": 8, "reason": "KL above stop_kl"}) + "\n"
    rewrite(root / "runs/train/facts-tepo-s0", "metrics.jsonl", lambda text: without(text, 9, 10, 11, 12) + stop)
    assert [f.kind for f in load_runs(study, root).findings] == ["note"]


def imported(root: Path, study, change, **config) -> Path:
    """A run of another engine, whose config and metrics are changed."""
    folder = make_run(root, study, "facts", "grpo", 0, Truth(), root / "runs/imported/verl")
    rewrite(folder, "config.json", lambda text: json.dumps({**json.loads(text), "engine": "verl", **config}))
    rewrite(folder, "metrics.jsonl", change)
    return folder


def test_an_imported_run_may_log_fewer_rollouts_but_must_reach_its_end(root: Path, study) -> None:
    """docs/run_format.md: another engine need not log each step; the last one decides, where it says how many there are."""
    folder = imported(root, study, lambda text: without(text, 1, 3, 5, 7))
    assert read_run(folder).rollout.steps[-1] == 12
    rewrite(folder, "metrics.jsonl", lambda text: without(text, 12))
    with pytest.raises(RunError, match="ends at rollout 11 of 12"):
        read_run(folder)


def test_an_imported_run_that_does_not_say_its_length_is_taken_as_it_is(root: Path, study) -> None:
    assert len(read_run(imported(root, study, lambda text: without(text, 12), train={})).rollout) == 11


@pytest.mark.parametrize("harm", ["done", "weights", "config"])
def test_no_advice_deletes_or_remakes_an_imported_run(root: Path, study, harm: str) -> None:
    """It cannot be made again here, and there is no stage 'import'."""
    folder = make_run(root, study, "facts", "grpo", 0, Truth(), root / "runs/imported/trl/one")
    if harm == "done":
        (folder / "done.json").unlink()
    elif harm == "weights":
        (folder / "metrics.jsonl").write_text("{}", encoding="utf-8")
    else:
        (folder / "config.json").write_text('{"kind": "train"', encoding="utf-8")
    (finding,) = load_runs(study, root).findings
    assert finding.kind == "broken" and finding.path == "runs/imported/trl/one"
    assert "remove" not in finding.fix and "import," not in finding.fix and "repro import" not in finding.fix
    assert "copy the whole run there again" in finding.fix and "docs/run_format.md" in finding.fix


def test_a_second_import_of_the_same_run_says_what_to_do(root: Path, study) -> None:
    for name in ("a", "b"):
        make_run(root, study, "facts", "grpo", 0, Truth(), root / f"runs/imported/trl/{name}")
    (finding,) = load_runs(study, root).findings
    assert "a second run of" in finding.reason and "folder of its own name" in finding.fix and "remove" not in finding.fix


def test_every_stage_that_a_finding_names_exists(tmp_path: Path, study) -> None:
    from tepo_core.pipeline.stages import AXES

    for finding in load_runs(study, tmp_path).findings:
        assert finding.fix.removeprefix("dvc repro ") in AXES
