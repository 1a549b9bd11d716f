"""The stages of the pipeline: which runs a study has, where each writes, and what it reads.

Light on purpose (nothing but the standard library and modules that are): the command line and the runner start fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo_core.runs.folder import BASE, run_name

if TYPE_CHECKING:
    from tepo_core.config import Study

AXES: dict[str, tuple[str, ...]] = {
    "prepare": (),
    "warmup": ("task", "seed"),
    "train": ("task", "method", "seed"),
    "evaluate": ("task", "method", "seed"),
    "evaluate_base": ("task", "seed"),
    "analyse": (),
    "report": (),
}
FROZEN = "build/params.json"  # the parameters that normalise has seen
PARAMS = "TEPO_PARAMS"  # environment variable of a kernel: the file its parameters come from
# Groups of params.yaml that decide a stage's results. The axes come with the run, data and policies as files.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "prepare": ("profile", "tasks", "seeds", "data", "warmup"),
    "warmup": ("profile", "policy", "warmup", "compute"),
    "train": ("profile", "policy", "rollout", "compute"),  # and what build/methods holds: the method's own 'train'
    "evaluate": ("profile", "policy", "rollout", "evaluate", "compute"),
    "evaluate_base": ("profile", "policy", "rollout", "evaluate", "compute"),
    "analyse": ("profile", "tasks", "methods", "seeds", "variants", "train", "evaluate", "analyse", "report"),
    "report": ("profile", "tasks", "methods", "seeds", "variants", "data", "policy", "warmup", "train", "rollout", "evaluate",
               "analyse", "report", "compute"),
}  # fmt: skip
REPORT_PARTS = ("index.html", "notebooks", "provenance.json")
OUT = "TEPO_OUT"  # environment variable: where the notebook of a stage writes; set by the runner, read by its notebook


class StageError(ValueError):
    """A stage is unknown, or was asked for with the wrong axes or values."""


@dataclass(frozen=True)
class Run:
    """One execution of a stage, for example ``Run("train", "facts", "grpo", 0)``. Axes that the stage lacks are None."""

    stage: str
    task: str | None = None
    method: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.stage not in AXES:
            raise StageError(f"unknown stage {self.stage!r}; allowed: {', '.join(AXES)}")
        for axis in ("task", "method", "seed"):
            given, wanted = getattr(self, axis) is not None, axis in AXES[self.stage]
            if wanted and not given:
                raise StageError(f"stage '{self.stage}' needs --{axis}")
            if given and not wanted:
                axes = ", ".join(f"--{name}" for name in AXES[self.stage]) or "none"
                raise StageError(f"stage '{self.stage}' takes no --{axis} (got {getattr(self, axis)!r}); its options: {axes}")

    @property
    def parameters(self) -> dict[str, Any]:
        """The axes and their values, for the notebook's parameters cell."""
        return {axis: getattr(self, axis) for axis in AXES[self.stage]}

    @property
    def name(self) -> str:
        """Folder name: ``facts-grpo-s0``; the base policy's evaluation is ``facts-base-s0``; empty without axes."""
        if self.task is None or self.seed is None:
            return ""
        return run_name(self.task, self.seed, BASE if self.stage == "evaluate_base" else self.method)

    @property
    def label(self) -> str:
        return f"{self.stage} {self.name}".strip()

    @property
    def slug(self) -> str:
        """The label as a file name."""
        return self.label.replace(" ", "-")

    @property
    def folder(self) -> Path:
        """Where the run writes, relative to the project's root."""
        fixed = {"prepare": "data/prepared", "analyse": "reports/analysis", "report": "reports"}
        if self.stage in fixed:
            return Path(fixed[self.stage])
        return Path("runs", "evaluate" if self.stage == "evaluate_base" else self.stage, self.name)

    def inputs(self) -> list[Path]:
        """Folders that must be complete before the run starts, relative to the root.

        The analysis is not stopped by a bad run: it names it and goes on with the others."""
        if self.stage in ("prepare", "analyse"):
            return []
        if self.stage == "report":
            return [Run("analyse").folder]
        data = Run("prepare").folder / run_name(self.task, self.seed)
        before = {
            "warmup": [],
            "train": [Run("warmup", self.task, seed=self.seed).folder],
            "evaluate_base": [Run("warmup", self.task, seed=self.seed).folder],
            "evaluate": [Path("runs", "train", self.name)],
        }[self.stage]
        return [data, *before]


def all_runs(study: Study) -> Iterator[Run]:
    """Every run of the study, in the order of the pipeline."""
    for stage, axes in AXES.items():
        values = [{"task": study.tasks, "method": study.methods, "seed": study.seeds}[axis] for axis in axes]
        for combination in product(*values):
            yield Run(stage, **dict(zip(axes, combination, strict=True)))


def check_run(study: Study, run: Run) -> None:
    """Raise :class:`StageError` when the run is not one of the study's."""
    for axis, allowed in (("task", study.tasks), ("method", study.methods), ("seed", study.seeds)):
        value = getattr(run, axis)
        if value is not None and value not in allowed:
            listed = ", ".join(map(str, allowed))
            raise StageError(f"--{axis} {value}: not in params.yaml's {axis}s; allowed: {listed}; add it there first")
