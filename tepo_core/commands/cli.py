"""The command line ``tepo``. Imports little at the start: a ``make repro`` with nothing to do must be quick."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import typer.core

from tepo_core.config import ConfigError, Study, find_root

GRADING = "tepo_core.commands.grade"


class LazyGroup(typer.core.TyperGroup):
    """Commands of the grading module are imported when they are called, not before."""

    lazy = ("grade", "score")

    def list_commands(self, ctx: Any) -> list[str]:
        there = importlib.util.find_spec(GRADING) is not None
        return [*super().list_commands(ctx), *(self.lazy if there else ())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.lazy and importlib.util.find_spec(GRADING) is not None:
            group = typer.main.get_command(importlib.import_module(GRADING).app)
            return group.commands.get(cmd_name) if hasattr(group, "commands") else group
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The TEPO study: parameters, pipeline, and what is going on.",
)
profile_app = typer.Typer(no_args_is_help=True, help="Parameters for a purpose: list, show, use.")
app.add_typer(profile_app, name="profile")

Axis = Optional[str]  # noqa: UP045  typer reads annotations at run time


@profile_app.command("list")
def profile_list() -> None:
    """All profiles, with what each is for. A star marks the one in params.yaml."""
    from tepo_core.commands import profiles

    root = find_root()
    for name in profiles.names(root):
        path = profiles.path_of(root, name)
        mark = "*" if not profiles.differences(root / "params.yaml", path) else " "
        print(f"{mark} {name:10} {profiles.purpose(path)}")


@profile_app.command("show")
def profile_show(
    name: Annotated[str, typer.Argument(help="Name of a profile; 'tepo profile list' shows them.")],
) -> None:
    """Print a profile, and how it differs from params.yaml."""
    from tepo_core.commands import profiles

    root = find_root()
    path = profiles.path_of(root, name)
    print(profiles.text_of(root, name), end="")
    _say_changes(profiles.differences(root / "params.yaml", path), "params.yaml differs in")


@profile_app.command("use")
def profile_use(name: Annotated[str, typer.Argument(help="Name of a profile.")]) -> None:
    """Write params.yaml from a profile, and say what changed. The old file is kept in .tepo/params.previous.yaml."""
    from tepo_core.commands import profiles

    _say_changes(profiles.use(find_root(), name), f"params.yaml is now the profile '{name}'. Changed:")


def _say_changes(changes: list, title: str) -> None:
    if not changes:
        print("params.yaml is the same already.")
        return
    print(title)
    for change in changes:
        print(f"  {change}")


@app.command()
def plan(
    why: Annotated[Axis, typer.Option(help="A stage (train) or one run of it (train@facts-grpo-0): what changed.")] = None,
) -> None:
    """What 'dvc repro' would run now, in how many minutes, and how much disk it needs."""
    from rich.console import Console
    from rich.table import Table

    from tepo_core.commands.plan import free_bytes
    from tepo_core.commands.plan import plan as plan_stages
    from tepo_core.pipeline.parameters import load_validated

    root = find_root()
    study = load_validated(root / "params.yaml")
    if why:
        return _why(root, study, why)
    lines = plan_stages(root, study)
    table = Table(title=f"profile {study.profile}")
    for column in ("stage", "runs", "to run", "minutes", "from"):
        table.add_column(column, justify="left" if column in ("stage", "from") else "right")
    for line in lines:
        source = "" if not line.stale else "recorded times" if line.recorded == line.stale else "an estimate"
        table.add_row(line.stage, str(line.runs), line.due, f"{line.seconds / 60:.1f}" if line.stale else "", source)
    Console().print(table)
    total, size = sum(line.seconds for line in lines), 2 * sum(line.bytes for line in lines)
    if not any(line.stale for line in lines):
        print("Nothing to do: everything is up to date.")
        return
    most = "at most " if any(line.sure < line.stale for line in lines) else ""
    print(f"In all {most}about {total / 60:.0f} minutes. What DVC's cache holds already is taken from there.")
    if most:
        print("'up to', 'to': runs that only depend on what changed; they are spared where what they read turns out the same.")
    free = free_bytes(root)
    print(f"Disk: about {size / 1e6:.0f} MB with DVC's copy; {free / 1e9:.1f} GB free.")
    if size > free:
        raise ConfigError(f"the disk has {free / 1e6:.0f} MB free, about {size / 1e6:.0f} MB are needed; free some first")


def _why(root: Path, study: Study, asked: str) -> None:
    from tepo_core.commands.why import why

    names, reasons = why(root, study, asked)
    for name in names:
        mine = [reason for reason in reasons if reason.stage == name]
        print(f"{name}: {'nothing changed since it last ran' if not mine else ''}".rstrip())
        for reason in mine:
            print(f"  {reason.what}: {reason.how}")
    if not reasons:
        print("A stage whose inputs come from a stale stage runs again, too, if these come out different: ask of that one.")


@app.command()
def doctor() -> None:
    """Check Python, packages, kernel, cores, memory, GPU, vLLM, locks and orphans; say the fix for each fault."""
    from tepo_core.commands.doctor import BAD, OK, examine

    findings = examine(find_root())
    for finding in findings:
        print(f"{finding.state:4}  {finding.name:12} {finding.text}")
        if finding.state != OK and finding.fix:
            print(f"{'':19}-> {finding.fix}")
    if any(finding.state == BAD for finding in findings):
        raise typer.Exit(1)


@app.command()
def run(
    stage: Annotated[str, typer.Argument(help="prepare, warmup, train, evaluate, evaluate_base, analyse or report")],
    task: Annotated[Axis, typer.Option(help="One task; all when left out.")] = None,
    method: Annotated[Axis, typer.Option(help="One method; all when left out.")] = None,
    seed: Annotated[Optional[int], typer.Option(help="One seed; all when left out.")] = None,  # noqa: UP045
) -> None:
    """Run a stage now, whether it is stale or not, without DVC: 'dvc repro' will not know of it and run it again."""
    from tepo_core.pipeline.parameters import load_validated
    from tepo_core.pipeline.runner import normalise_stage, run_stage
    from tepo_core.pipeline.stages import AXES, Run, all_runs, check_run

    root = find_root()
    study = load_validated(root / "params.yaml")
    given = {"task": task, "method": method, "seed": seed}
    first = {"task": study.tasks[0], "method": study.methods[0], "seed": study.seeds[0]}
    filled = {axis: first[axis] if given[axis] is None else given[axis] for axis in AXES.get(stage, ())}
    check_run(study, Run(stage, **{**filled, **{axis: value for axis, value in given.items() if value is not None}}))
    normalise_stage(root)
    for one in all_runs(study):
        if one.stage == stage and all(value is None or getattr(one, axis) == value for axis, value in given.items()):
            run_stage(root, one)


@app.command()
def repro(profile: Annotated[Axis, typer.Option(help="Use this profile first.")] = None) -> None:
    """What 'make repro' does: use a profile if one is named, check params.yaml, 'dvc repro', and show the headline."""
    from tepo_core.pipeline.host import HOST, can_host, socket_place
    from tepo_core.pipeline.inputs import check_git
    from tepo_core.pipeline.parameters import load_validated
    from tepo_core.pipeline.processes import REPRO, end_with_parent
    from tepo_core.pipeline.runner import Stopped, kernel_environment

    root = find_root()
    if profile:
        profile_use(profile)
    study = load_validated(root / "params.yaml")
    check_git(root)
    if "MAKELEVEL" in os.environ:  # a 'make' that is killed does not end what it started
        end_with_parent()
    with tempfile.TemporaryDirectory(prefix="tepo-host-", dir=socket_place()) as folder:
        environment = {**os.environ, REPRO: str(os.getpid())}
        if can_host(study.compute.device, folder):
            environment |= {HOST: folder, **kernel_environment(study)}
        process = subprocess.Popen([sys.executable, "-m", "dvc", "repro"], cwd=root, env=environment)
        while True:
            try:
                code = process.wait()
                break
            except Stopped:
                process.terminate()  # the running stage sees it and ends, too
            except KeyboardInterrupt:  # the whole group got Ctrl-C; DVC ends its stage, which says what it kept
                continue
    if code:
        raise typer.Exit(code if code > 0 else 130)
    headline()


@app.command()
def headline() -> None:
    """The report's path and the main numbers of the last finished study."""
    from tepo_core.commands.headline import show

    show(find_root())


@app.command()
def keep(name: Annotated[str, typer.Argument(help="Folder below records/, for example the profile's name.")]) -> None:
    """Copy the record of the finished study (metrics, summaries, analysis, report; no weights) to records/NAME."""
    from tepo_core.commands import keep as record

    root = find_root()
    out = record.keep(root, name)
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    print(f"Kept in {out.relative_to(root)} ({size / 2**20:.1f} MiB); 'tepo readme' renews the README's results from it.")


@app.command()
def readme() -> None:
    """Renew the results in README.md from the records it names."""
    from tepo_core.commands.keep import write_readme

    print("README.md: results renewed." if write_readme(find_root()) else "README.md: results are up to date.")


def main() -> None:
    """Entry point: faults end as one line and exit code 1, never as a traceback."""
    from tepo_core.machine import forgiving_output
    from tepo_core.pipeline.runner import guarded

    forgiving_output()
    sys.exit(guarded(app))


if __name__ == "__main__":
    main()
