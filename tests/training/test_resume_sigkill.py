"""A training run killed with SIGKILL ten times, at random moments and inside the writing of a checkpoint, ends with the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import run_bytes, tiny_study

from tepo_core.runs.folder import run_folder
from tepo_core.tasks.prepare import prepare
from tepo_core.training.warmup import warmup

# Imports once and forks for every attempt. Two attempts kill themselves inside Workspace.save: with half of the file written, and
# with all of it written but not yet in place.
SCRIPT = """
import os, random, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tiny import tiny_study
from tepo_core.training import checkpoint
from tepo_core.training.trainer import train

root, rollouts = Path(sys.argv[2]), int(sys.argv[3])
study = tiny_study(train={"rollouts": rollouts, "checkpoint_every": 1, "validate_every": 20, "record_every": 10})

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def half(state, file, save=checkpoint.torch.save):  # the workspace hands over an open file
    save(state, file)
    file.flush()
    os.truncate(file.fileno(), file.tell() // 2)
    die()

def attempt(out, before=None):
    pid = os.fork()
    if pid == 0:
        if before:
            before()
        train(study, "facts", "grpo", 0, root, root / out)
        os._exit(0)
    return pid

os.waitpid(attempt("whole"), 0)
rng, kills = random.Random(0), 0
while kills < 10:
    if kills == 3:
        pid = attempt("killed", lambda: setattr(checkpoint.torch, "save", half))
    elif kills == 6:
        pid = attempt("killed", lambda: setattr(checkpoint.os, "replace", die))
    else:
        pid = attempt("killed")
        time.sleep(rng.uniform(0.1, 1.2))
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the run ended before kill {kills + 1}"
    assert not (root / "killed").exists()
    kills += 1
    print("killed", kills, flush=True)
_, status = os.waitpid(attempt("killed"), 0)
assert status == 0
"""


@pytest.mark.slow
def test_ten_sigkills_end_with_the_same_bytes(tmp_path: Path) -> None:
    study = tiny_study()
    prepare(study, tmp_path)
    warmup(study, "facts", 0, tmp_path)
    assert run_folder(tmp_path, "warmup", "facts", 0).is_dir()
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1] / "support"), str(tmp_path), "120"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=500, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed ") == 10
    whole, killed = run_bytes(tmp_path / "whole"), run_bytes(tmp_path / "killed")
    assert "metrics.jsonl" in whole and any(name.endswith(".safetensors") for name in whole)
    assert killed == whole
