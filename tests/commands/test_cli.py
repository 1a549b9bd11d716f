"""The command line: quick to start, plain about what it does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pipeline_project import ROOT, make_project
from typer.testing import CliRunner

from tepo_core.commands import doctor, headline, plan, profiles
from tepo_core.commands.cli import app
from tepo_core.config import load_study
from tepo_core.pipeline.inputs import RecordError, record_timing
from tepo_core.pipeline.stages import Run, all_runs


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tepo_core.pipeline.parameters.check", lambda *_: None)
    return folder


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_starting_imports_nothing_heavy() -> None:
    code = (
        "import sys; import tepo_core.commands.cli, tepo_core.commands.headline, tepo_core.pipeline.runner\n"
        "heavy = ('torch', 'transformers', 'pandas', 'numpy', 'papermill', 'nbformat', 'dvc', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_profiles(project: Path) -> None:
    listed = call("profile", "list")
    assert "* smoke" in listed and "  quick" in listed
    shown = call("profile", "show", "quick")
    assert "prompts_per_rollout" in shown and re.search(r"train.rollouts: 4 -> \d+", shown)
    assert "profile: smoke -> quick" in call("profile", "use", "quick")
    assert load_study(project / "params.yaml").profile == "quick"
    assert "the same already" in call("profile", "use", "quick")


def test_run_refuses_what_is_not_there(project: Path) -> None:
    for arguments, words in (
        (["trian"], "unknown stage 'trian'"),
        (["train", "--method", "dapo"], "--method dapo: not in params.yaml's methods; allowed: grpo, tepo_kl"),
        (["prepare", "--seed", "0"], "stage 'prepare' takes no --seed"),
    ):
        result = CliRunner().invoke(app, ["run", *arguments])
        assert result.exit_code == 1 and words in str(result.exception), result.output


def test_run_executes_every_run_that_is_meant(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("tepo_core.pipeline.runner.normalise_stage", lambda root: done.append("normalise"))
    monkeypatch.setattr("tepo_core.pipeline.runner.run_stage", lambda root, run: done.append(run.label))
    call("run", "train")
    assert done == ["normalise", "train facts-grpo-s0", "train facts-tepo_kl-s0"]
    done.clear()
    call("run", "evaluate", "--method", "grpo", "--seed", "0")
    assert done == ["normalise", "evaluate facts-grpo-s0"]


# -- plan -------------------------------------------------------------------------------------------------------------------


def test_plan_from_recorded_times(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load_study(project / "params.yaml")
    stale = {run for run in all_runs(study) if run.stage in ("train", "evaluate")}
    monkeypatch.setattr(plan, "due_runs", lambda root, study: (stale, stale))
    folder = project / "runs" / "train" / "facts-grpo-s0"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"0" * 1000)
    record_timing(project, Run("train", "facts", "grpo", 0), "smoke", 90.0)
    record_timing(project, Run("evaluate", "facts", "grpo", 0), "quick", 500.0)
    lines = {line.stage: line for line in plan.plan(project, study)}
    train, evaluate, warmup = lines["train"], lines["evaluate"], lines["warmup"]
    # grpo's own time, and the stage's median for the method without one
    assert (train.runs, train.stale, train.seconds, train.recorded) == (2, 2, 180.0, 2)
    assert train.bytes == 1000 + plan.RUN_BYTES["train"]
    # another profile's times say nothing: start-up plus 64 problems x (4 samples + greedy) x 2 methods
    assert evaluate.recorded == 0
    assert evaluate.seconds == pytest.approx(2 * (plan.START_SECONDS + plan.UNIT_SECONDS["evaluate"] * 64 * 5))
    assert (warmup.runs, warmup.stale, warmup.seconds) == (1, 0, 0)
    text = call("plan")
    assert "recorded times" in text and "an estimate" in text and "GB free" in text


@pytest.mark.parametrize(("sure", "stale", "words"), [(2, 3, "2 to 3"), (0, 3, "up to 3"), (3, 3, "3"), (0, 0, "0")])
def test_plan_says_what_may_be_spared(sure: int, stale: int, words: str) -> None:
    assert plan.Line("train", 6, stale, sure, 1.0, 0, 1.0).due == words


def test_a_new_seed_leaves_the_old_ones_undecided(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six training runs depend on the changed data, and only the four of the new seeds are certain."""
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(text.replace("seeds: [0]", "seeds: [0, 1, 2]"), encoding="utf-8")
    every = set(all_runs(load_study(project / "params.yaml")))
    new = {run for run in every if run.seed in (1, 2) or run.stage == "prepare"}
    monkeypatch.setattr(plan, "due_runs", lambda root, study: (new, every))
    shown = call("plan")
    assert re.search(r"train\W+6\W+4 to 6", shown) and "at most about" in shown and "up to 1" in shown


def test_plan_on_a_full_disk(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "due_runs", lambda root, study: (set(all_runs(study)),) * 2)
    monkeypatch.setattr(plan, "free_bytes", lambda root: 1e6)
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 1 and "the disk has 1 MB free, about" in str(result.exception)


def test_plan_asks_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the real dvc.yaml: nothing was run yet, so everything is stale; the names are DVC's."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("dvc.yaml", "claims.yaml", ".dvcignore"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "params.yaml").write_text(profiles.text_of(ROOT, "smoke"))
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    shutil.copytree(ROOT / "tepo_core", folder / "tepo_core", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    study = load_study(folder / "params.yaml")
    assert plan.due_runs(folder, study) == (set(all_runs(study)), set(all_runs(study)))
    assert plan.address(Run("evaluate_base", "facts", seed=0)) == "evaluate_base@facts-0"


# -- doctor -----------------------------------------------------------------------------------------------------------------


def test_doctor_names_the_fix_and_fails_for_faults(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernel", "gpu"):
        monkeypatch.setattr(doctor, name, lambda root, name=name: doctor.Finding(name, doctor.OK, "fine"))
    (project / "requirements").symlink_to(ROOT / "requirements")
    (project / "params.yaml").write_text("seeds: 3")
    (project / ".tepo" / "failed").mkdir(parents=True)
    (project / ".tepo" / "failed" / "train-facts-grpo-s0.ipynb").write_text("{}")
    found = {finding.name: finding for finding in doctor.examine(project)}
    assert found["packages"].state == doctor.OK
    assert found["params.yaml"].state == doctor.BAD and "seeds" in found["params.yaml"].text
    assert found["DVC"].state == doctor.BAD and "clone" in found["DVC"].fix
    assert found["leftovers"].state == doctor.NOTE and "train-facts-grpo-s0" in found["leftovers"].text
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "-> correct it, or run 'tepo profile use quick'" in result.output


def test_doctor_sees_old_python_other_packages_and_little_memory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "requirements").mkdir()
    (project / "requirements" / "lock.txt").write_text("numpy==0.1\nnosuchpackage==1.0\n")
    other = doctor.packages(project)
    assert other.state == doctor.BAD and "numpy" in other.text and "nosuchpackage missing (locked: 1.0)" in other.text
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert doctor.python(project).state == doctor.BAD
    memory = psutil.virtual_memory()._replace(available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert doctor.memory(project).state == doctor.BAD


def test_doctor_sees_a_run_in_progress_and_a_busy_dvc(project: Path) -> None:
    from tepo_core.pipeline.processes import run_lock

    (project / ".dvc" / "tmp").mkdir(parents=True)
    (project / ".git").mkdir()
    assert doctor.runs_in_progress(project).state == doctor.OK
    with run_lock(project, Run("prepare")):
        assert "prepare (process" in doctor.runs_in_progress(project).text
    assert doctor.dvc_lock(project).state == doctor.OK
    code = "import sys, zc.lockfile; lock = zc.lockfile.LockFile('.dvc/tmp/lock'); print('held', flush=True); sys.stdin.read()"
    held = subprocess.Popen([sys.executable, "-c", code], cwd=project, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert held.stdout.readline() == "held\n"
        assert doctor.dvc_lock(project).state == doctor.NOTE
    finally:
        held.communicate("")
    assert doctor.dvc_lock(project).state == doctor.OK


def test_doctor_wants_vllm_only_when_asked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    assert doctor.vllm(project).state == doctor.OK
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("engine: transformers ", "engine: vllm "))
    assert doctor.vllm(project).state == doctor.BAD and "vllm==0.32.0" in doctor.vllm(project).fix
    monkeypatch.setattr(doctor, "version", lambda name: "0.31.0")
    assert "pip install vllm==0.32.0" in doctor.vllm(project).fix


def test_a_check_that_breaks_is_a_fault_and_not_a_crash(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(root: Path) -> doctor.Finding:
        raise RuntimeError("oops")

    for name in ("kernel", "packages"):
        monkeypatch.setattr(doctor, name, broken)
    assert any("oops" in finding.text and finding.state == doctor.BAD for finding in doctor.examine(project))


# -- headline ---------------------------------------------------------------------------------------------------------------


def test_headline(project: Path) -> None:
    with pytest.raises(RecordError, match="reports/analysis/headline.json: no finished study yet; run 'make repro'"):
        headline.show(project)
    folder = project / "reports" / "analysis"
    folder.mkdir(parents=True)
    rows = [
        {"task": "facts", "method": "grpo", "seeds": 3, "accuracy": 0.9123, "accuracy_low": 0.89, "accuracy_high": 0.93,
         "gain": 0.6, "pass_max": 0.99, "entropy_end": 0.012, "rollouts_to_target": 62.3, "reached": 2},
        {"task": "facts", "method": "base", "seeds": 3, "accuracy": 0.3, "rollouts_to_target": 100.0, "reached": 0},
    ]  # fmt: skip
    (folder / "headline.json").write_text(json.dumps(rows))
    (folder / "analysis.json").write_text(json.dumps({"profile": "smoke", "seeds": [0], "answer": ["Yes [and no]."]}))
    with pytest.raises(RecordError, match="no report yet"):
        headline.show(project)
    (project / "reports" / "index.html").write_text("<html>")
    text = call("headline")
    assert "profile smoke" in text and "Yes [and no]." in text and "Report: reports/index.html" in text
    assert headline.cell(rows[0], "accuracy") == "0.912 [0.890, 0.930]"
    assert headline.cell(rows[0], "rollouts_to_target") == "62, 2 of 3"
    assert headline.cell(rows[1], "rollouts_to_target") == "not reached"
    assert headline.cell(rows[1], "gain") == "-"
    (folder / "headline.json").write_text("[{")
    with pytest.raises(RecordError, match="headline.json: truncated or not JSON; run 'dvc repro -f analyse'"):
        headline.show(project)
