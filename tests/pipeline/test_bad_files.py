"""Damaged files between stages, full disks, missing rights: what it is and what to do is said; nothing half-made remains."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from pipeline_project import make_project, runner, write_notebook
from stages import validated

from tepo_core.pipeline.inputs import RecordError, check_folder, check_space, explain_os_error, put_in_place, sha256
from tepo_core.pipeline.runner import guarded
from tepo_core.pipeline.stages import Run

# -- files between stages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root with prepared data, a base policy and a trained one, each complete by its own record."""
    data = tmp_path / "data" / "prepared" / "facts-s0"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    (data / "manifest.json").write_text(json.dumps({"sha256": {"train.jsonl": sha256(data / "train.jsonl")}}))
    for folder in (tmp_path / "runs" / "warmup" / "facts-s0", tmp_path / "runs" / "train" / "facts-grpo-s0"):
        (folder / "policy").mkdir(parents=True)
        for name in ("config.json", "metrics.jsonl", "policy/model.safetensors"):
            (folder / name).write_text(name)
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        (folder / "done.json").write_text(json.dumps({"files": {n: sha256(folder / n) for n in names}, "ok": True}))
    return tmp_path


DATA, BASE = Path("data/prepared/facts-s0"), Path("runs/warmup/facts-s0")


def test_complete_inputs_pass(runs: Path) -> None:
    check_folder(runs, DATA)
    check_folder(runs, BASE)


@pytest.mark.parametrize(
    ("damage", "folder", "words"),
    [
        (
            lambda r: shutil.rmtree(r / DATA),
            DATA,
            ["data/prepared/facts-s0: missing", "stage 'prepare' first", "tepo run prepare"],
        ),
        (lambda r: (r / DATA / "train.jsonl").unlink(), DATA, ["facts-s0/train.jsonl: missing", "dvc repro"]),
        (
            lambda r: (r / DATA / "train.jsonl").write_text('{"a": 1}\n{"b'),
            DATA,
            ["train.jsonl: changed or truncated since 'prepare'"],
        ),
        (lambda r: (r / DATA / "manifest.json").write_text('{"sha'), DATA, ["manifest.json: truncated or not JSON"]),
        (
            lambda r: (r / BASE / "done.json").unlink(),
            BASE,
            ["done.json is missing, so it was never finished", "tepo run warmup"],
        ),
        (
            lambda r: (r / BASE / "policy/model.safetensors").unlink(),
            BASE,
            ["model.safetensors: the policy has no weights"],
        ),
        (
            lambda r: (r / BASE / "done.json").write_text(
                json.dumps({"files": {"config.json": sha256(r / BASE / "config.json")}})
            ),
            BASE,
            ["runs/warmup/facts-s0/policy: no weights"],
        ),
        (
            lambda r: (r / BASE / "policy/model.safetensors").write_text("other"),
            BASE,
            ["changed or truncated since 'warmup' wrote it"],
        ),
    ],
    ids=["no data", "gone", "truncated", "no manifest", "unfinished", "no weights", "never weights", "other weights"],
)
def test_damaged_inputs(runs: Path, damage, folder: Path, words: list[str]) -> None:
    damage(runs)
    with pytest.raises(RecordError) as caught:
        check_folder(runs, folder)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


def test_a_stage_with_damaged_inputs_does_not_start(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    write_notebook(project / "build" / "notebooks" / "warmup.ipynb", "open('started', 'w')")
    validated(project)
    process = runner(project, "warmup", "--task", "facts", "--seed", "0")
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert text == (
        "error: data/prepared/facts-s0: missing; run the stage 'prepare' first ('dvc repro', or 'tepo run prepare')\n"
    )
    assert not (project / "started").exists() and not (project / "runs").exists()


# -- the machine ------------------------------------------------------------------------------------------------------------


def test_no_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5 * 2**20))
    with pytest.raises(RecordError, match=r"only 5 MB free on this disk; at least 200 MB"):
        check_space(tmp_path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EACCES, "no permission to write"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "Not a dir"),
    ],
)
def test_operating_system_errors_say_what_to_do(number: int, words: str, capsys: pytest.CaptureFixture) -> None:
    def action() -> None:
        raise OSError(number, os.strerror(number), "runs/train/x")

    assert guarded(action) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: runs/train/x: ") and words in shown
    assert explain_os_error(OSError(number, os.strerror(number))).find(words) >= 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_write_permission_for_real(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert guarded((tmp_path / "runs").mkdir) == 1
    finally:
        tmp_path.chmod(0o700)


def test_what_was_there_stays_when_the_new_cannot_be_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "runs" / "warmup" / "facts-s0", tmp_path / "work" / "out"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir(parents=True)
        (folder / "x").write_text(text)
    real = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(source) == new:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        put_in_place(tmp_path, Run("warmup", "facts", seed=0), new)
    assert (old / "x").read_text() == "old"
    monkeypatch.setattr(os, "replace", real)
    put_in_place(tmp_path, Run("warmup", "facts", seed=0), new)
    assert (old / "x").read_text() == "new" and not new.exists()


def test_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runs/ may be a link to a scratch disk, which a rename cannot cross."""
    new, real = tmp_path / "work" / "out", os.replace
    new.mkdir(parents=True)
    (new / "x").write_text("new")

    def across(source: Path, target: Path) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", across)
    put_in_place(tmp_path, Run("warmup", "facts", seed=0), new)
    folder = tmp_path / "runs" / "warmup"
    assert [p.name for p in folder.iterdir()] == ["facts-s0"] and (folder / "facts-s0" / "x").read_text() == "new"
