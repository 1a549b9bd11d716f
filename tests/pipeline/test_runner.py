"""The strict notebook runner: what it accepts, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from pipeline_project import ROOT, environment, make_project, runner, start, write_notebook
from stages import SLEEP, WRITE, alive, left_over, prepare_notebook, sleeping, validated, wait_for

from tepo_core.config import load_study
from tepo_core.files import write_json
from tepo_core.pipeline import execute as execute_module
from tepo_core.pipeline.execute import NotebookFailed, clean, execute, explain_exit
from tepo_core.pipeline.notebooks import NotebookError, nbformat, read_notebook, to_text
from tepo_core.pipeline.processes import LockError, orphans, run_lock
from tepo_core.pipeline.runner import RunFailed, run_stage
from tepo_core.pipeline.stages import Run, StageError

PREPARE = Run("prepare")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_project(tmp_path / "project")
    # that these parameters are right is not the matter here, and the check imports torch
    monkeypatch.setattr("tepo_core.pipeline.parameters.check", lambda *_: None)
    return folder


def test_results_in_place_live_progress_and_equal_bytes(project: Path, capsys: pytest.CaptureFixture) -> None:
    prepare_notebook(
        project,
        "import os\nprint('at', os.getcwd(), os.environ['TEPO_OUT'])",
        "from tepo_core.progress import Progress\nimport time\np = Progress(3, 'busy', every=0)\n"
        "for s in (1, 2, 3):\n    p.update(s, loss=0.5, tokens=10)\n    time.sleep(0.01)",
        WRITE,
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    )
    run_stage(project, PREPARE)
    shown = capsys.readouterr().out
    out = project / "data" / "prepared"
    first = (out / "notebook.ipynb").read_bytes()
    assert (out / "x.txt").read_text() == "new"
    assert "busy: 1/3  loss 0.5" in shown and "busy: 3/3" in shown and "done in" in shown
    assert b"tokens/s" not in first, "progress holds times and must not be saved"
    assert "at " in shown and str(project).encode() not in first and b"at . data/prepared" in first
    assert b"image/png" in first
    assert json.loads((out / "done.json").read_text())["ok"] is True
    timing = json.loads((project / ".tepo" / "timings" / "prepare.json").read_text())
    assert timing["runs"]["prepare"]["seconds"] > 0 and timing["runs"]["prepare"]["profile"] == "smoke"
    assert left_over(project) == []

    # A kernelspec 'python3' of the user's that cannot start, and start-up files of his: neither may matter.
    spec = project / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "x", "language": "python"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(project / "jupyter"))
        run_stage(project, PREPARE)
    assert (out / "notebook.ipynb").read_bytes() == first


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["x = 1", "raise ValueError('too big')", WRITE], ["cell 3", "raise ValueError", "ValueError: too big"]),
        (["import sys; sys.exit(0)", WRITE], ["cell 2", "did not run"]),
        (
            ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
            ["cell 2", "SIGKILL", "out of memory", "micro_batch_tokens"],
        ),
        (["import os; os._exit(3)"], ["exit code 3"]),
    ],
    ids=["exception", "sys.exit", "killed", "os._exit"],
)
def test_failed_notebook_is_kept_and_nothing_else(project: Path, cells: list[str], words: list[str]) -> None:
    out = project / "data" / "prepared"
    out.mkdir(parents=True)
    (out / "x.txt").write_text("old")
    prepare_notebook(project, *cells)
    with pytest.raises(RunFailed) as caught:
        run_stage(project, PREPARE)
    for word in words:
        assert word in str(caught.value), word
    assert "prepare.ipynb" in str(caught.value) and ".tepo/failed/prepare.ipynb" in str(caught.value)
    kept = read_notebook(project / ".tepo" / "failed" / "prepare.ipynb")
    assert [c.source for c in kept.cells if c.cell_type == "code"][1] == cells[0]
    assert [p.name for p in out.iterdir()] == ["x.txt"] and (out / "x.txt").read_text() == "old"
    assert left_over(project) == []


def test_a_notebook_that_writes_nothing_or_no_done_marker_is_not_done(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo_core.pipeline.inputs import RecordError, complete

    out = project / "out"
    out.mkdir()
    with pytest.raises(RecordError, match="wrote nothing"):
        complete(out, Run("train", "facts", "grpo", 0))
    (out / "metrics.jsonl").write_text("{}")
    with pytest.raises(RecordError, match="left no done.json"):
        complete(out, Run("train", "facts", "grpo", 0))
    (out / "done.json").write_text('{"files": {}, "ok": false}')
    with pytest.raises(RecordError, match="does not say ok"):
        complete(out, Run("train", "facts", "grpo", 0))
    with pytest.raises(RecordError, match=r"missing: \['index.html', 'notebooks', 'provenance.json'\], unknown: \['done.json'"):
        complete(out, Run("report"))


@pytest.mark.parametrize(
    ("cell", "given", "words"),
    [
        ("seed: int = 0", {"sede": 1}, ["unknown parameter 'sede' = 1", "it declares: seed"]),
        ("seed: int = 0", {"seed": "1"}, ["'seed' = '1' is str", "allowed: int"]),
        ("seed: int = 0", {"seed": True}, ["is bool", "allowed: int"]),
        ("seed = 0", {}, ["'seed = 0'", "seed: int | None = None"]),
        ("seed: int = compute()", {}, ["is not of the form"]),
        ("seed: list = 0", {}, ["allowed types: str, int, float, bool"]),
        ("seed: int =", {}, ["not valid Python"]),
    ],
)
def test_parameters_are_typed_and_known(tmp_path: Path, cell: str, given: dict, words: list[str]) -> None:
    path = tmp_path / "n.ipynb"
    write_notebook(path, "1", parameters=cell)
    with pytest.raises(NotebookError) as caught:
        execute(path, given, cwd=tmp_path, environment={}, partial=tmp_path / "out.ipynb")
    for word in ["n.ipynb", *words]:
        assert word in str(caught.value)
    assert not (tmp_path / "out.ipynb").exists()


def test_a_notebook_needs_exactly_one_parameters_cell_and_must_be_readable(tmp_path: Path) -> None:
    nothing = {"cwd": tmp_path, "environment": {}, "partial": tmp_path / "out.ipynb"}
    bare = tmp_path / "bare.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), bare)
    with pytest.raises(NotebookError, match="0 code cells are tagged 'parameters'"):
        execute(bare, {}, **nothing)
    bare.write_text(bare.read_text()[:40])
    with pytest.raises(NotebookError, match=r"bare.ipynb: not a readable notebook"):
        execute(bare, {}, **nothing)
    with pytest.raises(NotebookError, match="no such notebook"):
        execute(tmp_path / "none.ipynb", {}, **nothing)


def test_clean_removes_what_differs_between_runs() -> None:
    cell = nbformat.v4.new_code_cell("1", execution_count=1, metadata={"papermill": {"duration": 3.2}, "tags": ["b", "a"]})
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="/home/me/project/x\n")]
    mark = nbformat.v4.new_markdown_cell("error", metadata={"tags": ["papermill-error-cell-tag"]})
    notebook = nbformat.v4.new_notebook(cells=[mark, cell], metadata={"papermill": {"start_time": "now"}})
    cleaned = clean(notebook, {"/home/me/project/": ""})
    text = to_text(cleaned)
    assert "duration" not in text and "start_time" not in text and "/home/me" not in text
    assert [c.id for c in cleaned.cells] == ["cell-00"] and cleaned.cells[0].metadata == {"tags": ["a", "b"]}
    assert cleaned.cells[0].outputs[0].text == "x\n" and cleaned.cells[0].execution_count == 1


def test_exit_codes_in_words() -> None:
    assert "out of memory" in explain_exit(-signal.SIGKILL)
    assert "SIGSEGV" in explain_exit(-signal.SIGSEGV) and "tepo doctor" in explain_exit(-signal.SIGSEGV)
    assert "SIGTERM" in explain_exit(-signal.SIGTERM)
    assert "exit code 3" in explain_exit(3)


def test_a_full_disk_while_saving_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import papermill

    path = tmp_path / "n.ipynb"
    write_notebook(path, "1")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "out.ipynb")

    monkeypatch.setattr(papermill, "execute_notebook", full)
    with pytest.raises(NotebookFailed, match=r"No space left on device \(out.ipynb\)"):
        execute(path, {}, cwd=tmp_path, environment={}, partial=tmp_path / "out.ipynb")


def test_one_process_a_run(project: Path) -> None:
    first = start(project, sys.executable, "-c", (
        "import time, pathlib\nfrom tepo_core.pipeline.processes import run_lock\nfrom tepo_core.pipeline.stages import Run\n"
        "with run_lock(pathlib.Path.cwd(), Run('prepare')):\n    print('have it', flush=True)\n    time.sleep(60)"
    ))  # fmt: skip
    try:
        assert first.stdout.readline() == "have it\n"
        with (
            pytest.raises(LockError, match=rf"prepare: process {first.pid} is running it already.*kill {first.pid}"),
            run_lock(project, PREPARE, wait=0.2),
        ):
            raise AssertionError("two processes hold one lock")
        with run_lock(project, Run("warmup", "facts", seed=0), wait=0):
            pass  # another run is free
    finally:
        first.kill()
        first.wait()
    with run_lock(project, PREPARE, wait=5):
        pass  # freed by the death of its holder


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_term_leave_nothing(project: Path, sent: int, code: int) -> None:
    prepare_notebook(project, SLEEP, WRITE)
    validated(project)
    process = runner(project, "prepare")
    pids = sleeping(project)
    os.kill(process.pid, sent)
    text, _ = process.communicate(timeout=20)
    assert process.returncode == code, text
    assert "stopped: nothing half-made was kept" in text
    wait_for(lambda: not alive(pids))
    assert not (project / "data").exists() and left_over(project) == []


def test_a_killed_runner_takes_its_kernel_along(project: Path) -> None:
    prepare_notebook(project, SLEEP)
    validated(project)
    process = runner(project, "prepare")
    pids = sleeping(project)
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(pids))
    assert orphans(project) == []


def test_a_killed_dvc_takes_its_stage_along(project: Path) -> None:
    prepare_notebook(project, SLEEP)
    validated(project)
    fake = project / "tools" / "dvc"  # what matters is the chain: a process called dvc, a shell, the runner
    fake.parent.mkdir()
    fake.write_text("import subprocess\nsubprocess.run(['sh', '-c', 'bin/stage prepare; true'])\n")
    process = start(project, sys.executable, str(fake), DVC_STAGE="prepare")
    pids = sleeping(project)
    assert len(alive(pids)) == 3 and orphans(project) == []
    process.kill()
    process.communicate()
    wait_for(lambda: not alive(pids))
    assert not (project / "data").exists()


def test_a_killed_tepo_repro_takes_its_stage_along(project: Path) -> None:
    prepare_notebook(project, SLEEP)
    validated(project)
    above = start(project, sys.executable, "-c", "import time; time.sleep(120)")
    process = runner(project, "prepare", TEPO_REPRO_PID=str(above.pid))
    pids = sleeping(project)
    above.kill()
    above.communicate()
    process.communicate(timeout=20)
    assert process.returncode == 143
    wait_for(lambda: not alive(pids))
    # DVC may start one more stage before it learns of it
    late = runner(project, "prepare", TEPO_REPRO_PID=str(above.pid))
    late.communicate(timeout=20)
    assert late.returncode != 0 and not (project / "data").exists()


def test_stage_launcher_finds_the_python(tmp_path: Path) -> None:
    """Without an activated environment, as DVC starts it; and its words when there is no Python with the packages."""
    project = tmp_path / "clone"
    (project / "bin").mkdir(parents=True)
    (project / "bin" / "stage").write_bytes((ROOT / "bin" / "stage").read_bytes())
    (project / "bin" / "stage").chmod(0o755)
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def call(**extra: str) -> tuple[int, str]:
        import subprocess

        done = subprocess.run(
            ["sh", "-c", "bin/stage prepare"], cwd=project, env={**bare, **extra}, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    code, text = call()
    assert code == 1 and "no Python with the project's packages" in text and "make venv" in text

    def python_at(folder: Path, packages: bool = True) -> Path:
        folder.mkdir(parents=True)
        for name, body in (("python", f"echo {folder} $@"), *((("papermill", "true"),) if packages else ())):
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        return folder

    conda = python_at(tmp_path / "conda" / "bin")
    assert call(CONDA_PREFIX=str(conda.parent)) == (0, f"{conda} -m tepo_core.pipeline.launch prepare\n")
    own = python_at(project / ".venv" / "bin")
    assert call(CONDA_PREFIX=str(conda.parent))[1].startswith(f"{own} ")
    empty = python_at(tmp_path / "other" / "bin", packages=False)
    assert call(VIRTUAL_ENV=str(empty.parent))[1].startswith(f"{own} ")
    active = python_at(tmp_path / "active" / "bin")
    assert call(VIRTUAL_ENV=str(active.parent))[1].startswith(f"{active} ")
    named = python_at(tmp_path / "named" / "bin")
    assert call(VIRTUAL_ENV=str(active.parent), TEPO_PYTHON=str(named / "python"))[1].startswith(f"{named} ")


def test_parameters_are_those_that_normalise_saw(project: Path) -> None:
    """An edit of params.yaml while the pipeline runs waits for the next run: DVC remembers a stage by what normalise wrote."""
    cell = "from tepo_core.pipeline.begin import begin\nprint('lr', begin('prepare').study.train.lr)"
    prepare_notebook(project, cell, WRITE)
    write_json(project / "build" / "params.json", load_study(project / "params.yaml").model_dump(mode="json"))
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("  lr: 1.0e-4 ", "  lr: 7.0e-4 "))
    assert (project / "params.yaml").read_text() != text
    run_stage(project, PREPARE)
    assert "lr 0.0001" in (project / "data" / "prepared" / "notebook.ipynb").read_text()


def test_runs_and_their_options() -> None:
    with pytest.raises(StageError, match="unknown stage 'trian'; allowed: prepare, warmup, train"):
        Run("trian")
    with pytest.raises(StageError, match="stage 'train' needs --method"):
        Run("train", "facts", seed=0)
    with pytest.raises(StageError, match="stage 'prepare' takes no --seed .got 0."):
        Run("prepare", seed=0)


def test_kernel_sees_the_progress_channel_and_fixed_hashes(tmp_path: Path) -> None:
    """The environment given is the kernel's, on top of this process's; hidden state of the user's IPython is not."""
    path = tmp_path / "n.ipynb"
    write_notebook(path, "import os\nprint(os.environ['TEPO_PROGRESS'], os.environ['IPYTHONDIR'] != os.environ.get('HOME'))")
    done = execute(path, {}, cwd=ROOT, environment={"TEPO_PROGRESS": "here"}, partial=tmp_path / "out.ipynb")
    assert done.cells[-1].outputs[0].text == "here True\n"
    assert execute_module.KERNEL_ARGUMENTS[0] == "--HistoryManager.enabled=False"
    assert environment()["TEPO_PYTHON"] == sys.executable
