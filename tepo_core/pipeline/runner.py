"""Runs one stage: checks its inputs, executes its notebook in a fresh kernel, and puts the results in place at the end.

``bin/stage train --task facts --method grpo --seed 0`` is what DVC starts; it comes here through :mod:`tepo_core.pipeline.launch`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import Timeout

from tepo_core.config import ConfigError, Study, find_root
from tepo_core.machine import forgiving_output
from tepo_core.pipeline.inputs import (
    RecordError,
    check_inputs,
    check_space,
    complete,
    explain_os_error,
    put_in_place,
    record_timing,
)
from tepo_core.pipeline.kernel import PRELOAD
from tepo_core.pipeline.parameters import load_normalised, load_validated
from tepo_core.pipeline.processes import LockError, end_with_dvc, run_lock
from tepo_core.pipeline.stages import AXES, FROZEN, OUT, PARAMS, Run, StageError, check_run
from tepo_core.progress import CHANNEL, duration

# What each stage's notebook imports: the kernel starts on it before the notebook does.
MODULES = {
    "prepare": "tepo_core.tasks.prepare",
    "warmup": "tepo_core.training.warmup",
    "train": "tepo_core.training.trainer",
    "evaluate": "tepo_core.evaluation.stage",
    "evaluate_base": "tepo_core.evaluation.stage",
    "analyse": "tepo_core.analysis.stage",
    "report": "tepo_core.report.stage",
}


class RunFailed(RuntimeError):
    """The notebook of a stage failed; the message says where it is kept."""


class Stopped(KeyboardInterrupt):
    """SIGTERM. A KeyboardInterrupt, so that it gets through an event loop as Ctrl-C does."""


def run_stage(root: Path, run: Run, notebooks: str = "build/notebooks") -> None:
    """Execute a run's notebook and put what it wrote in place. Nothing half-made remains when it fails.

    Raises ConfigError, StageError, LockError, RecordError, NotebookError before the work; RunFailed for the notebook."""
    parameters = root / FROZEN
    if parameters.is_file():  # validated by normalise, and what DVC will remember this stage by
        study = load_normalised(parameters)
    else:
        parameters, study = None, load_validated(root / "params.yaml")
    check_run(study, run)
    source = root / notebooks / f"{run.stage}.ipynb"
    with run_lock(root, run):
        check_inputs(root, run)
        check_space(root)
        started = time.monotonic()
        work = root / ".tepo" / "work" / run.slug
        shutil.rmtree(work, ignore_errors=True)
        try:
            _execute(root, run, study, source, work, parameters)
            put_in_place(root, run, work / "out")
        finally:
            shutil.rmtree(work, ignore_errors=True)
        seconds = time.monotonic() - started
        with contextlib.suppress(OSError, Timeout):  # the results are in place; a time that is not remembered costs nothing
            record_timing(root, run, study.profile, seconds)
    print(f"{run.label}: done in {duration(seconds)}", flush=True)


def _execute(root: Path, run: Run, study: Study, source: Path, work: Path, parameters: Path | None) -> None:
    from tepo_core.pipeline.execute import NotebookFailed, execute, to_text

    out = work / "out"
    out.mkdir(parents=True)
    environment = {
        **kernel_environment(study),
        OUT: str(out),
        PARAMS: str(parameters or ""),
        PRELOAD: f"{MODULES[run.stage]} tepo_core.analysis.figures.single",
        CHANNEL: str(work / "progress"),
    }
    kept = root / ".tepo" / "failed" / f"{run.slug}.ipynb"
    with contextlib.suppress(OSError):
        kept.unlink(missing_ok=True)
    hidden = {str(out): run.folder.as_posix(), str(root) + os.sep: "", str(root): "."}
    try:
        with follow(work / "progress"):
            executed = execute(
                source,
                run.parameters,
                cwd=root,
                environment=environment,
                partial=work / "partial.ipynb",
                replacements=hidden,
                stdout=sys.stdout,
                stderr=sys.stderr,
            )
    except NotebookFailed as failure:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(to_text(failure.notebook), encoding="utf-8")
            where = f"the notebook as far as it came: {kept.relative_to(root)}"
        except OSError as error:  # the first cause is what must be said
            with contextlib.suppress(OSError):
                kept.unlink(missing_ok=True)
            where = f"the notebook could not be kept ({explain_os_error(error)})"
        raise RunFailed(f"{run.label}: {failure}\n  {where}") from failure
    complete(out, run)
    place = out / "notebooks" / "report.ipynb" if run.stage == "report" else out / "notebook.ipynb"
    place.write_text(to_text(executed), encoding="utf-8")


def kernel_environment(study: Study) -> dict[str, str]:
    """Environment variables of every kernel that are read when Python or a library starts."""
    environment = {
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that waits by spinning takes the core from who has work
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm misses a widget that no saved notebook could show
    }
    if study.policy.source == "tiny":  # nothing of this study is on a hub, so nothing may ask one
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return environment


@contextmanager
def follow(path: Path) -> Iterator[None]:
    """Print the lines that appear in a file, as they appear (see :mod:`tepo_core.progress`)."""
    path.touch()
    ended = threading.Event()

    def forward() -> None:
        with open(path, encoding="utf-8") as file:
            while True:
                last = ended.is_set()
                if text := file.read():
                    print(text, end="", flush=True)
                if last:
                    return
                ended.wait(0.2)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def normalise_stage(root: Path) -> None:
    """Validate ``params.yaml`` and write ``build/``, which the other stages depend on."""
    from tepo_core.pipeline.normalise import write_build

    write_build(root, load_validated(root / "params.yaml"))


def guarded(action: object, *arguments: object) -> int:
    """Call ``action`` and turn what can go wrong into a message and an exit code."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    try:
        action(*arguments)  # type: ignore[operator]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the work is done and in place
        return 0
    except OSError as error:
        return _say(f"error: {explain_os_error(error)}", 1)
    except KeyboardInterrupt as error:
        code = 143 if isinstance(error, Stopped) else 130
        return _say("stopped: nothing half-made was kept; the same command goes on where this one ended", code)
    except Exception as error:
        from tepo_core.pipeline.notebooks import NotebookError

        if isinstance(error, (ConfigError, StageError, LockError, RecordError, RunFailed, NotebookError)):
            return _say(f"error: {error}", 1)
        raise


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def main(arguments: list[str] | None = None, hosted: bool = False) -> int:
    """Run the stage that the arguments name. ``hosted``: in a runner that watches its client, and so DVC, already."""
    parser = argparse.ArgumentParser(prog="bin/stage", description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["normalise", *AXES])
    parser.add_argument("--task")
    parser.add_argument("--method")
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)
    forgiving_output()
    if not hosted:
        end_with_dvc()

    def action() -> None:
        root = find_root()
        if given.stage == "normalise":
            normalise_stage(root)
        else:
            run_stage(root, Run(given.stage, given.task, given.method, given.seed))

    return guarded(action)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an interrupted event loop must not hold up the end, nor print about its pending tasks
