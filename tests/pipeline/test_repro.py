"""What DVC makes of dvc.yaml: what a change runs again, what it takes from its cache, and what happens when it is disturbed.

The stages' commands are replaced by one that only writes the declared outputs: the graph is the matter here, not the numbers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pipeline_project import ROOT, environment
from ruamel.yaml import YAML

from tepo_core.commands.profiles import text_of
from tepo_core.pipeline.notebooks import nbformat

FAKE = """
import json, os, pathlib, sys, time
from ruamel.yaml import YAML
stage, rest = sys.argv[1], sys.argv[2:]
study = YAML(typ="safe").load(pathlib.Path("params.yaml").read_text())
with open("executed.log", "a") as log:
    log.write(os.environ["DVC_STAGE"] + "\\n")
time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
def put(path, value):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(value))
if stage == "normalise":
    sys.path.insert(0, os.environ["PROJECT_CODE"])
    from tepo_core.pipeline.dependencies import code_hashes
    from tepo_core.pipeline.notebooks import normalise, read_notebook, to_text
    from tepo_core.pipeline.stages import PARAMETERS
    for path in pathlib.Path("notebooks").glob("*.ipynb"):
        notebook = normalise(read_notebook(path))
        put(f"build/notebooks/{path.name}", to_text(notebook))
        if path.stem in PARAMETERS:
            put(f"build/code/{path.stem}.json", json.dumps(code_hashes(pathlib.Path.cwd(), notebook, path.stem)))
            put(f"build/parameters/{path.stem}.json", json.dumps({g: study[g] for g in PARAMETERS[path.stem]}))
    for method in study["methods"]:
        put(f"build/methods/{method}.json", json.dumps([study["variants"].get(method), study["train"]]))
elif stage == "prepare":
    for task in study["tasks"]:
        for seed in study["seeds"]:
            put(f"data/prepared/{task}-s{seed}/train.jsonl", f"{task} {seed}")
elif stage == "report":
    for part in ("index.html", "notebooks/page.html", "provenance.json"):
        put(f"reports/{part}", study["methods"])
elif stage == "analyse":
    put("reports/analysis/metrics.json", json.dumps({"methods": study["methods"], "lr": study["train"]["lr"]}))
else:
    given = dict(zip(rest[::2], rest[1::2]))
    kind, method = ("evaluate", "base") if stage == "evaluate_base" else (stage, given.get("--method"))
    name = "-".join(x for x in (given["--task"], method, "s" + given["--seed"]) if x)
    put(f"runs/{kind}/{name}/result", study["train"]["lr"] if method and method != "base" else "fixed")
"""
TRAIN, EVALUATE = ["train@facts-grpo-0", "train@facts-tepo_kl-0"], ["evaluate@facts-grpo-0", "evaluate@facts-tepo_kl-0"]
EVERYTHING = ["normalise", "prepare", "warmup@facts-0", "evaluate_base@facts-0", *TRAIN, *EVALUATE, "analyse", "report"]


class Project:
    """A git and DVC repository with the real dvc.yaml, notebooks and smoke parameters, and a command that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "fake.py").write_text(FAKE)
        (folder / "bin" / "stage").write_text(f'#!/bin/sh\nPROJECT_CODE={ROOT} exec {sys.executable} fake.py "$@"\n')
        (folder / "bin" / "stage").chmod(0o755)
        shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        shutil.copytree(ROOT / "tepo_core", folder / "tepo_core", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "params.yaml").write_text(text_of(ROOT, "smoke"))
        for name in ("dvc.yaml", "claims.yaml", ".dvcignore", ".gitignore"):
            shutil.copyfile(ROOT / name, folder / name)
        (folder / ".gitignore").open("a").write("executed.log\n")
        (folder / "data").mkdir()
        shutil.copyfile(ROOT / "data" / "published.yaml", folder / "data" / "published.yaml")
        (folder / ".dvc").mkdir()
        for name in ("config", ".gitignore"):
            shutil.copyfile(ROOT / ".dvc" / name, folder / ".dvc" / name)
        for command in (
            ["init", "-q"],
            ["add", "-A"],
            ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"],
        ):
            subprocess.run(["git", *command], cwd=folder, check=True)

    def dvc(self, *arguments: str) -> list[str]:
        """Run a DVC command in this process; returns the stages that were executed, sorted as the study's are."""
        from dvc.cli import main

        log = self.folder / "executed.log"
        log.unlink(missing_ok=True)
        assert main([*arguments, "-q"]) == 0
        done = log.read_text().splitlines() if log.exists() else []
        assert len(done) == len(set(done))
        return sorted(done, key=lambda name: (EVERYTHING.index(name) if name in EVERYTHING else 4.5, name))

    def edit(self, old: str, new: str) -> None:
        path = self.folder / "params.yaml"
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))

    def metrics(self) -> dict:
        return YAML(typ="safe").load((self.folder / "reports" / "analysis" / "metrics.json").read_text())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    built = Project(tmp_path / "project")
    monkeypatch.chdir(built.folder)
    return built


def test_what_a_change_runs_again(project: Project) -> None:
    assert project.dvc("repro") == EVERYTHING
    assert project.dvc("repro") == []

    # opening, running and saving a notebook in JupyterLab
    path = project.folder / "notebooks" / "train.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.outputs, code.execution_count = [nbformat.v4.new_output("stream", name="stdout", text="hello")], 7
    code.metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    notebook.cells.append(nbformat.v4.new_code_cell(""))
    notebook.metadata["language_info"]["version"] = "3.12.1"
    nbformat.write(notebook, path)
    assert project.dvc("repro") == ["normalise"]

    # a training parameter, and back: the first costs its runs, the second nothing
    project.edit("lr: 1.0e-4", "lr: 2.0e-4")
    assert project.dvc("repro") == ["normalise", *TRAIN, *EVALUATE, "analyse", "report"]
    project.edit("lr: 2.0e-4", "lr: 1.0e-4")
    assert project.dvc("repro") == []
    assert project.metrics()["lr"] == 1e-4

    # a variant: only what is new is trained
    project.edit("variants: {}", "variants: {own: {preset: grpo, clip: [0.2, 0.4]}}")
    assert project.dvc("repro") == ["normalise", "analyse", "report"]
    project.edit("methods: [grpo, tepo_kl]", "methods: [grpo, tepo_kl, own]")
    added = ["evaluate@facts-own-0", "train@facts-own-0"]
    assert project.dvc("repro") == ["normalise", *added, "analyse", "report"]
    assert project.metrics()["methods"] == ["grpo", "tepo_kl", "own"]

    # a smaller matrix: its runs lie there still, and are not read
    project.edit("methods: [grpo, tepo_kl, own]", "methods: [grpo, own]")
    assert project.dvc("repro") == ["normalise", "analyse", "report"]
    assert project.metrics()["methods"] == ["grpo", "own"]
    assert (project.folder / "runs" / "train" / "facts-tepo_kl-s0").is_dir()

    # code of the report; code that only hands values on
    (project.folder / "tepo_core" / "report" / "new.py").write_text("x = 1\n")  # imported by nobody
    (project.folder / "tepo_core" / "report" / "__pycache__").mkdir()
    assert project.dvc("repro") == ["normalise"]
    (project.folder / "tepo_core" / "report" / "sections.py").open("a").write("\n")
    assert project.dvc("repro") == ["normalise", "report"]
    (project.folder / "tepo_core" / "pipeline" / "stages.py").open("a").write("\n")
    assert project.dvc("repro") == ["normalise"]


def test_results_lost_or_changed_behind_dvc_come_back(project: Project) -> None:
    assert project.dvc("repro", "train@facts-grpo-0") == [
        "normalise",
        "prepare",
        "warmup@facts-0",
        "train@facts-grpo-0",
    ]
    data = project.folder / "data" / "prepared" / "facts-s0" / "train.jsonl"
    data.write_text("tampered")
    shutil.rmtree(project.folder / "runs" / "train" / "facts-grpo-s0")
    project.dvc("repro", "train@facts-grpo-0")
    assert data.read_text() == "facts 0"
    assert (project.folder / "runs" / "train" / "facts-grpo-s0" / "result").read_text() == "0.0001"
    data.unlink()
    project.dvc("repro", "train@facts-grpo-0")
    assert data.read_text() == "facts 0"


def test_the_plan_is_sure_of_what_repro_then_runs(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two new seeds: six training runs depend on the data that is made anew, four are due, and the plan keeps the two apart."""
    from tepo_core.commands import plan
    from tepo_core.config import load_study

    def write_build(root: Path, study: object) -> None:  # what this project's own normalise writes
        subprocess.run(
            [sys.executable, "fake.py", "normalise"], check=True, env=environment(DVC_STAGE="plan", PROJECT_CODE=str(ROOT))
        )

    monkeypatch.setattr(plan, "write_build", write_build)
    project.dvc("repro")
    project.edit("seeds: [0] ", "seeds: [0, 1, 2] ")
    sure, stale = plan.due_runs(project.folder, load_study(project.folder / "params.yaml"))
    trains = [{run.name for run in runs if run.stage == "train"} for runs in (sure, stale)]
    assert len(trains[0]) == 4 and len(trains[1]) == 6
    done = project.dvc("repro")
    assert {name for name in done if name.startswith("train")} == {plan.address(run) for run in sure if run.stage == "train"}


def test_an_experiment_changes_a_parameter_for_one_run(project: Project) -> None:
    done = project.dvc("exp", "run", "-S", "train.lr=3e-5", "train@facts-grpo-0")
    assert done == ["normalise", "prepare", "warmup@facts-0", "train@facts-grpo-0"]
    assert (project.folder / "runs" / "train" / "facts-grpo-s0" / "result").read_text() == "3e-05"
    from tepo_core.config import load_study

    assert load_study(project.folder / "params.yaml").train.lr == 3e-5
    assert "# AdamW learning rate" in (project.folder / "params.yaml").read_text(), "comments must survive"


def test_two_repros_at_once(project: Project) -> None:
    command = [sys.executable, "-m", "dvc", "repro", "prepare"]
    slow = subprocess.Popen(
        command, env=environment(FAKE_SECONDS="8"), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    log = project.folder / "executed.log"
    end = time.monotonic() + 30
    while not (log.exists() and "normalise" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    other = subprocess.run(command, env=environment(), text=True, capture_output=True)
    assert other.returncode != 0
    assert re.search(r"busy|[Uu]nable to acquire lock|blocked by", other.stderr), other.stderr
    text, _ = slow.communicate(timeout=60)
    assert slow.returncode == 0, text
    assert (project.folder / "data" / "prepared" / "facts-s0" / "train.jsonl").read_text() == "facts 0"
    assert log.read_text().split() == ["normalise", "prepare"]
