"""What ``dvc repro`` would run now, how long it would take, and how much disk it needs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tepo_core.config import ConfigError, Study
from tepo_core.pipeline.inputs import check_git, read_timings
from tepo_core.pipeline.normalise import write_build
from tepo_core.pipeline.stages import AXES, Run, all_runs

NORMALISE = "normalise"
# Without a recorded time: seconds a run has to start, and seconds a unit of work. Measured with the quick profile (tiny policy)
# on two CPU cores of a small cloud machine; another machine is soon known by its own times.
START_SECONDS = 3.0
UNIT_SECONDS = {
    "prepare": 5.5e-5,  # a problem or worked solution
    "warmup": 1.6e-3,  # a worked solution in an update
    "train": 2.1e-3,  # a response in one of a rollout's passes
    "evaluate": 0.7e-3,  # a response
    "evaluate_base": 0.7e-3,
    "analyse": 0.6,  # a run
    "report": 0.2,  # a run
}
RUN_BYTES = {
    "prepare": 24e6,
    "warmup": 1.7e6,
    "train": 2.6e6,
    "evaluate": 1.5e6,
    "evaluate_base": 1.5e6,
    "analyse": 5e6,
    "report": 10e6,
}


@dataclass(frozen=True)
class Line:
    """The part of one stage. ``stale``: runs that may be due; ``sure``: those of them that changed themselves, or are new. The others
    depend on these, and are spared where what these write stays the same (a new seed leaves the data of the old ones as it is).
    ``recorded``: how many of the estimates come from recorded times."""

    stage: str
    runs: int
    stale: int
    sure: int
    seconds: float
    recorded: int
    bytes: float

    @property
    def due(self) -> str:
        """``6``, ``4 to 6`` or ``up to 6``."""
        if self.sure == self.stale:
            return str(self.stale)
        return f"{self.sure} to {self.stale}" if self.sure else f"up to {self.stale}"


def plan(root: Path, study: Study) -> list[Line]:
    """One line a stage: runs in the study, runs that ``dvc repro`` would execute, estimates for these."""
    sure, stale = due_runs(root, study)
    lines = []
    for stage in AXES:
        runs = [run for run in all_runs(study) if run.stage == stage]
        mine = [run for run in runs if run in stale]
        timings = read_timings(root, stage)
        times = [_seconds(run, study, timings) for run in mine]
        size = sum(timings.get(run.name or stage, {}).get("bytes", RUN_BYTES[stage]) for run in mine)
        seconds, recorded = sum(s for s, _ in times), sum(known for _, known in times)
        lines.append(
            Line(
                stage=stage,
                runs=len(runs),
                stale=len(mine),
                sure=len(sure & set(mine)),
                seconds=seconds,
                recorded=recorded,
                bytes=size,
            )
        )
    return lines


def due_runs(root: Path, study: Study) -> tuple[set[Run], set[Run]]:
    """Runs that DVC holds for changed, and these with all that depend on them. DVC's run-cache may still spare some.

    Does the work of normalise first, as ``dvc repro`` would: what it writes tells which of the others changed.
    Raises :class:`ConfigError` while DVC is running."""
    import networkx
    from dvc.lock import LockError
    from dvc.repo import Repo, lock_repo

    check_git(root)
    repo = Repo(str(root))
    try:
        with lock_repo(repo):
            write_build(root, study)
            status = repo.status()
        graph = repo.index.graph
        # DVC's addresses depend on the folder it is called from; the names of stages do not.
        stages = {stage.addressing: stage for stage in graph if stage.name != NORMALISE}
        changed = [stages[address] for address in status if address in stages]
        wanted = set(changed).union(*(networkx.ancestors(graph, stage) for stage in changed))
        names, own = {stage.name for stage in wanted}, {stage.name for stage in changed}
    except LockError:
        raise ConfigError("DVC is running in this folder; wait for it to end, then ask again what is left to do") from None
    finally:
        repo.close()
    runs = list(all_runs(study))
    return {run for run in runs if address(run) in own}, {run for run in runs if address(run) in names}


def address(run: Run) -> str:
    """DVC's name of a run: ``train@facts-grpo-0``."""
    values = "-".join(str(value) for value in run.parameters.values())
    return f"{run.stage}@{values}" if values else run.stage


def _seconds(run: Run, study: Study, timings: dict) -> tuple[float, bool]:
    """Estimate, and whether it comes from a recorded time: of this run, or else of this stage in the same profile."""
    same = {name: entry for name, entry in timings.items() if entry["profile"] == study.profile}
    if (run.name or run.stage) in same:
        return same[run.name or run.stage]["seconds"], True
    if same:
        return median(entry["seconds"] for entry in same.values()), True
    return START_SECONDS + UNIT_SECONDS[run.stage] * units(run, study), False


def units(run: Run, study: Study) -> float:
    """Work of a run in the units of :data:`UNIT_SECONDS`."""
    data = study.data
    if run.stage == "prepare":
        problems = data.train_size + data.validation_size + data.test_size + data.long_size + data.warmup_size
        return len(study.tasks) * len(study.seeds) * problems
    if run.stage == "warmup":
        return study.warmup.steps * study.warmup.batch_size
    if run.stage == "train":
        train = study.train_for(run.method or "")
        return train.rollouts * train.prompts_per_rollout * train.group_size * train.epochs
    if run.stage.startswith("evaluate"):
        sizes = {
            "test": data.test_size,
            "long": data.long_size,
            "train": data.train_size,
            "validation": data.validation_size,
        }
        problems = sum(sizes.get(split, data.test_size) for split in study.evaluate.splits)
        return problems * (study.evaluate.samples + study.evaluate.greedy)
    return len(study.tasks) * len(study.methods) * len(study.seeds)


def free_bytes(root: Path) -> int:
    return shutil.disk_usage(root).free
