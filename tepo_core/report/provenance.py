"""Where a report comes from: git revision, parameters, data, versions, hardware, wall times. In one file and one part of
the page.

Everything else in a report is the same bytes for the same runs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tepo_core.config import Study, digest
from tepo_core.files import sha256
from tepo_core.machine import usable_cores
from tepo_core.tasks.data import data_folder

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "matplotlib",
    "papermill",
    "dvc",
    "vllm",
    "tepo-study",
)
GENERATED = ("reports", "dvc.lock")
"""Tracked paths that a run of the pipeline itself rewrites; they do not make a revision dirty."""


def collect(study: Study, root: Path) -> dict[str, Any]:
    """All of it as plain data. Whatever cannot be found out is ``None`` and shown as unknown."""
    return {
        "git": git_state(root),
        "parameters": {"profile": study.profile, "digest": digest(study)},
        "data": data_hashes(root, study),
        "claims": sha256(root / "claims.yaml")[:16] if (root / "claims.yaml").is_file() else None,
        "versions": {"python": platform.python_version(), **package_versions()},
        "hardware": hardware(),
        "wall_times": wall_times(root),
    }


def git_state(root: Path) -> dict[str, Any]:
    """Revision, and whether tracked files differ from it (those that the pipeline itself writes apart)."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", *arguments]
            done = subprocess.run(
                command, cwd=root, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in GENERATED))
    changed = None if status is None else [line[2:].strip() for line in status.splitlines()]
    return {
        "revision": git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "changed": (changed or [])[:20],
    }


def data_hashes(root: Path, study: Study) -> dict[str, str]:
    """Hash of the manifest of every data set of the study; the manifest in turn holds the hash of every file."""
    found = {}
    for task in study.tasks:
        for seed in study.seeds:
            path = data_folder(root, task, seed) / "manifest.json"
            if path.is_file():
                found[path.parent.name] = sha256(path)[:16]
    return found


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that matter to results."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, usable cores, memory (GiB), GPU, operating system."""
    cores = usable_cores()
    return {
        "processor": _processor(),
        "cores": cores,
        "memory_gib": _memory(),
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _gpu() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().replace("\n", "; ") or None


def wall_times(root: Path) -> dict[str, float]:
    """Seconds of the last execution of each stage, from .tepo/timings; empty where nothing was timed."""
    found = {}
    folder = root / ".tepo" / "timings"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            seconds = json.loads(path.read_text(encoding="utf-8")).get("seconds")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(seconds, (int, float)):
            found[path.stem] = round(float(seconds), 1)
    return found
