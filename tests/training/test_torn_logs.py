"""A state whose growing files are not all there is not that state: an older one is taken, or the run starts anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny import run_bytes, tiny_study

from tepo_core.tasks.prepare import prepare
from tepo_core.training import checkpoint
from tepo_core.training.checkpoint import Workspace
from tepo_core.training.trainer import Trainer, train
from tepo_core.training.warmup import warmup

LOG, TOKENS = "metrics.jsonl", "tokens.jsonl"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, study = tmp_path_factory.mktemp("study"), tiny_study()
    prepare(study, root)
    warmup(study, "facts", 0, root)
    return root


@pytest.fixture
def work(tmp_path: Path):
    """A workspace with two states: of step 1 (two growing files) and of step 2."""
    work = Workspace(tmp_path, "run", {"a": 1})
    for step in (1, 2):
        work.append(LOG, f'{{"step": {step}}}\n' * 50)
        work.append(TOKENS, f'{{"token": {step}}}\n' * 50)
        work.save({"step": step})
    yield work
    work.release(remove=True)


def cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def zeros(path: Path, count: int) -> None:
    """What a file system may leave after a power cut: the length, without the bytes."""
    size = path.stat().st_size
    os.truncate(path, size - count)
    os.truncate(path, size)


@pytest.mark.parametrize("name", [LOG, TOKENS])
@pytest.mark.parametrize("harm", [cut, zeros])
def test_a_torn_file_means_the_state_before(work: Workspace, name: str, harm, capsys) -> None:
    whole = (work.folder / name).read_bytes()
    harm(work.folder / name, 30)
    state = work.load()
    assert state is not None and state["step"] == 1
    assert (work.folder / name).read_bytes() == whole[: len(whole) // 2], "cut back to what the older state knew"
    assert name in capsys.readouterr().err
    assert work.load()["step"] == 1, "the state that was refused is gone"


def test_a_file_torn_into_the_older_state_starts_anew(work: Workspace) -> None:
    cut(work.folder / LOG, (work.folder / LOG).stat().st_size // 2 + 30)
    assert work.load() is None
    assert not [p for p in work.folder.iterdir()], "nothing torn may be appended to"


def test_a_missing_file_is_a_short_one(work: Workspace) -> None:
    (work.folder / TOKENS).unlink()
    assert work.load() is None


def test_a_torn_state_means_the_state_before(work: Workspace) -> None:
    cut(work.folder / checkpoint.STATE, 200)
    assert work.load()["step"] == 1


def test_what_grew_after_the_state_is_cut_back(work: Workspace) -> None:
    whole = (work.folder / LOG).read_bytes()
    work.append(LOG, "half a li")
    assert work.load()["step"] == 2
    assert (work.folder / LOG).read_bytes() == whole


def test_growing_files_are_on_the_disk_before_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    real = os.fsync
    monkeypatch.setattr(
        checkpoint.os, "fsync", lambda fd: (order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), real(fd))
    )
    work = Workspace(tmp_path, "run", {"a": 1})
    work.append(LOG, "{}\n")
    work.save({"step": 1})
    assert order[:2] == [LOG, checkpoint.STATE + ".partial"]
    work.release(remove=True)


def test_a_checkpoint_belongs_to_the_code_of_every_room_that_decides_numbers(tmp_path, monkeypatch) -> None:
    read = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: (read.append(self.as_posix()), real(self))[1])
    checkpoint.code_hash()
    rooms = {path.split("/tepo_core/", 1)[1].split("/")[0] for path in read}
    assert {"objectives", "training", "model", "rollout", "grading", "tasks", "config.py"} <= rooms
    assert not rooms & {"report", "analysis", "pipeline", "commands"}


@pytest.mark.parametrize(("name", "step"), [(LOG, 3), (TOKENS, 3)])
def test_a_run_resumed_beside_a_torn_log_ends_with_the_same_bytes(base, tmp_path, monkeypatch, name, step) -> None:
    study = tiny_study(train={"checkpoint_every": 1, "rollouts": 4, "record_every": 1, "validate_every": 0})
    whole = train(study, "facts", "grpo", 0, base, tmp_path / "whole")
    original = Trainer._rollout_step

    class Killed(BaseException):
        pass

    def killed(self):
        if self.step == step:
            raise Killed
        return original(self)

    with pytest.raises(Killed), monkeypatch.context() as patch:
        patch.setattr(Trainer, "_rollout_step", killed)
        train(study, "facts", "grpo", 0, base, tmp_path / "torn")
    (folder,) = (base / ".tepo" / "checkpoints").glob("train-facts-grpo-s0-*/")
    cut(folder / name, 700)
    resumed = train(study, "facts", "grpo", 0, base, tmp_path / "torn")
    assert run_bytes(resumed.folder) == run_bytes(whole.folder)
    assert b"\0" not in (resumed.folder / LOG).read_bytes()
