"""Machines as they are: quotas, odd paths, clones of Windows users, terminals and files that are not UTF-8, ZIP downloads, full disks."""

from __future__ import annotations

import ast
import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pipeline_project import ROOT, environment, make_project
from tiny import tiny_study

from tepo_core import machine
from tepo_core.commands import profiles
from tepo_core.machine import cpu_quota, usable_cores
from tepo_core.model.policy import set_threads
from tepo_core.pipeline import inputs
from tepo_core.pipeline.inputs import RecordError, explain_os_error
from tepo_core.pipeline.runner import kernel_environment

# -- cores ----------------------------------------------------------------------------------------------------------------------


def system(folder: Path, groups: str, **files: str) -> Path:
    """A /proc and /sys of our own; ``__`` in a name stands for a slash."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cfs_", "cpu.cfs_")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu_max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a__b__cpu_max": "max 100000", "a__cpu_max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a__b__cpu_max": "50000 100000", "a__cpu_max": "200000 100000"}, 0.5),
        ("0::/the/name/outside\n", {"cpu_max": "300000 100000"}, 3.0),
        ("0::/\n", {"cpu_max": "max 100000"}, None),
        (
            "3:cpuset:/\n1:cpu,cpuacct:/x\n",
            {"cpu,cpuacct__x__cfs_quota_us": "250000", "cpu,cpuacct__x__cfs_period_us": "100000"},
            2.5,
        ),
        ("1:cpu:/gone\n", {"cpu__cfs_quota_us": "100000", "cpu__cfs_period_us": "100000"}, 1.0),
        ("1:cpu:/\n", {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)
def test_quotas_of_both_kinds_of_control_groups(tmp_path: Path, groups: str, files: dict, quota: float | None) -> None:
    there = system(tmp_path, groups, **files)
    assert cpu_quota(there) == quota
    affinity = len(os.sched_getaffinity(0))
    assert usable_cores(there) == (affinity if quota is None else max(1, min(affinity, int(quota))))


def test_one_thread_for_the_tiny_model_and_the_cores_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("tepo_core.model.policy.usable_cores", lambda: 3)
    try:
        assert set_threads(tiny_study(compute={"threads": 0})) == 1
        assert set_threads(tiny_study(compute={"threads": 2})) == 2
        assert set_threads(tiny_study(compute={"threads": 0}, policy={"source": "models/mine"})) == 3
    finally:
        torch.set_num_threads(before)


def test_kernels_wait_without_spinning() -> None:
    assert kernel_environment(tiny_study())["OMP_WAIT_POLICY"] == "PASSIVE"


# -- make and git -----------------------------------------------------------------------------------------------------------------


def made(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, str]:
    """Run make in a folder whose python only writes down what it is asked."""
    folder.mkdir(parents=True)
    (folder / "requirements").mkdir()
    for name in ("Makefile", "requirements/lock.txt"):
        shutil.copyfile(ROOT / name, folder / name)
    python = folder / "python"
    log = folder.parent / "asked.log"
    text = '#!/bin/sh\necho "$@" >> "$ASKED"\ncase "$*" in *venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python";; esac\n'
    python.write_text(text)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", *arguments, "PYTHON=./python"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "ASKED": str(log)},
    )
    return done, log.read_text() if log.exists() else ""


@pytest.mark.parametrize("name", ["plain", "with space", "two  spaces (and 'quotes')"])
def test_make_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    done, asked = made(tmp_path / name, "repro", "PROFILE=smoke")
    assert done.returncode == 0, done.stderr
    assert (
        "-m venv .venv" in asked
        and "pip install" in asked
        and asked.endswith("-m tepo_core.commands.cli repro --profile smoke\n")
    )
    assert list((tmp_path / name / ".venv").glob(".installed-*"))


def test_make_with_an_environment_whose_name_has_a_space(tmp_path: Path) -> None:
    done, asked = made(tmp_path / "study", "repro", "VENV=my env")
    assert done.returncode == 0, done.stderr
    assert "-m venv my env" in asked and list((tmp_path / "study" / "my env").glob(".installed-*"))


def test_make_in_a_folder_with_a_colon_says_where_to_put_the_environment(tmp_path: Path) -> None:
    done, asked = made(tmp_path / "a:b", "repro")
    assert done.returncode != 0 and "colon" in done.stderr and "VENV=" in done.stderr and "-m venv" not in asked
    done, asked = made(tmp_path / "c:d", "repro", f"VENV={tmp_path}/elsewhere")
    assert done.returncode == 0, done.stderr
    assert f"-m venv {tmp_path}/elsewhere" in asked


def test_a_clone_with_autocrlf_has_the_same_bytes(tmp_path: Path) -> None:
    """core.autocrlf=true is git's default on Windows: a script with CRLF does not start, and hashes of records do not hold."""
    source, clone = tmp_path / "source", tmp_path / "clone"
    source.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false"]
    for name in (".gitattributes", "bin/stage", "Makefile", "claims.yaml", ".ci/run"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    (source / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    subprocess.run(["git", "clone", "-q", "-c", "core.autocrlf=true", source, clone], check=True)
    for path in source.rglob("*"):
        if path.is_file() and ".git/" not in path.as_posix():
            assert (clone / path.relative_to(source)).read_bytes() == path.read_bytes(), path.name


def test_without_git_the_first_command_says_so(tmp_path: Path) -> None:
    """A ZIP download has no .git, and a repository above it does not help DVC."""
    project = make_project(tmp_path / "project")
    (tmp_path / ".git").mkdir()
    (project / ".dvc").mkdir()
    for command in (["repro"], ["plan"]):
        done = subprocess.run(
            [sys.executable, "-m", "tepo_core.commands.cli", *command],
            cwd=project,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "git init" in done.stderr and "Traceback" not in done.stderr, done.stderr
    from tepo_core.commands.doctor import dvc_lock

    assert "git init" in dvc_lock(project).fix
    (project / ".git").write_text("gitdir: elsewhere\n")  # a worktree
    inputs.check_git(project)


# -- text -------------------------------------------------------------------------------------------------------------------------


def without_encoding(path: Path) -> list[str]:
    """Calls that read or write text in whatever encoding the machine has."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        given = {keyword.arg for keyword in node.keywords}
        words = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        text = name in ("read_text", "write_text") or (
            (name in ("open", "fdopen", "makefile") and owner not in ("os", "Image", "tarfile", "zipfile") or name == "fdopen")
            and not any(isinstance(word, str) and "b" in word and len(word) <= 3 for word in words)
        )
        text = text or ("text" in given or "universal_newlines" in given)
        if text and "encoding" not in given:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}")
    return found


@pytest.mark.parametrize("folder", ["tepo_core", "bench"])
def test_text_is_read_and_written_in_a_stated_encoding(folder: str) -> None:
    assert [line for path in sorted((ROOT / folder).rglob("*.py")) for line in without_encoding(path)] == []


def test_missing_encodings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "tests" / "project" / "test_machine.py"  # a folder below ROOT is wanted; the text is our own
    monkeypatch.setattr(
        Path, "read_text", lambda *_, **__: "open('x')\nopen('x', 'rb')\np.write_text(t)\nrun(c, text=True)\nos.fdopen(3)"
    )
    assert [line.split(":")[1] for line in without_encoding(path)] == ["1", "3", "4", "5"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_is_not_utf8_ends_no_run(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from tepo_core.commands import cli\nimport typer\n"
        "@cli.app.command()\ndef speak() -> None:\n    print('Δ −0.021 ✓ π')\n    from rich.console import Console\n"
        "    Console().print('−0.5 ≥ x')\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "speak"],
        cwd=ROOT,
        capture_output=True,
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0"),
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert b"0.021" in done.stdout and b"0.5" in done.stdout
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    machine.forgiving_output()
    print("−")
    stream.flush()


# -- errors that hide errors --------------------------------------------------------------------------------------------------------


def test_a_profile_that_does_not_fit_on_the_disk_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path / "project")
    before = (project / "params.yaml").read_bytes()
    real = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        real(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        profiles.use(project, "quick")
    assert (project / "params.yaml").read_bytes() == before and not list(project.glob(".*partial*"))


def test_a_move_across_disks_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, target = tmp_path / "work" / "new", tmp_path / "runs" / "run"
    for folder, text in ((new, "new"), (target, "old")):
        folder.mkdir(parents=True)
        (folder / "x").write_text(text)
    real = os.replace

    def other_disk(source: Path, to: Path) -> None:
        if Path(source) == new and ".partial" not in str(to):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, to)

    def full(source: Path, to: Path) -> None:
        Path(to).mkdir()
        (Path(to) / "x").write_text("n")
        raise shutil.Error([(str(source), str(to), "[Errno 28] No space left on device")])

    monkeypatch.setattr(inputs.os, "replace", other_disk)
    monkeypatch.setattr(inputs.shutil, "copytree", full)
    with pytest.raises(OSError) as caught:
        inputs._replace(new, target)
    assert "no space left on the disk" in explain_os_error(caught.value)
    assert (target / "x").read_text() == "old" and [p.name for p in target.parent.iterdir()] == ["run"]


def test_a_failed_notebook_that_cannot_be_kept_is_still_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import prepare_notebook, validated

    from tepo_core.pipeline.runner import RunFailed, run_stage
    from tepo_core.pipeline.stages import Run

    project = make_project(tmp_path / "project")
    validated(project)
    prepare_notebook(project, "raise ValueError('the first cause')")
    (project / ".tepo" / "failed").write_text("a file where a folder is wanted")
    monkeypatch.chdir(project)
    with pytest.raises(RunFailed, match="the first cause") as caught:
        run_stage(project, Run("prepare"))
    assert "could not be kept" in str(caught.value)


def test_a_time_that_cannot_be_remembered_fails_no_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import WRITE, prepare_notebook, validated

    from tepo_core.pipeline.runner import run_stage
    from tepo_core.pipeline.stages import Run

    project = make_project(tmp_path / "project")
    validated(project)
    prepare_notebook(project, WRITE)
    (project / ".tepo" / "timings").write_text("a file where a folder is wanted")
    monkeypatch.chdir(project)
    run_stage(project, Run("prepare"))
    assert (project / "data" / "prepared" / "x.txt").read_text() == "new"


def test_git_is_wanted_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="git init"):
        inputs.check_git(tmp_path)
