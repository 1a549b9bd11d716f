"""What this process may use of the machine: cores by affinity and by a container's quota, and a terminal that never ends a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def usable_cores(system: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, or less where a control group (v1 or v2) gives less CPU time. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(system)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(system: Path = Path("/")) -> float | None:
    """CPU time a second that the control groups of this process allow, the least of all levels; None where nothing limits it.

    A container sees its own group as the root of the file system, whatever name /proc gives it; so both are looked at."""
    found: list[float] = []
    mount = system / "sys/fs/cgroup"
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, controllers, name = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            for folder in _upward(mount, name):
                found += _ratio(*(_text(folder / "cpu.max").split() or [""])[:2])
        elif "cpu" in controllers.split(","):
            for hierarchy in (mount / controllers, mount / "cpu"):
                for folder in _upward(hierarchy, name):
                    found += _ratio(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))
    return min(found, default=None)


def _upward(mount: Path, name: str) -> list[Path]:
    """The folder of a control group and all above it, the mount itself last."""
    parts = [part for part in name.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _ratio(quota: str = "", period: str = "100000") -> list[float]:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # 'max': no limit
        return []
    return [value] if value > 0 else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def forgiving_output() -> None:
    """Let a terminal that cannot show a character show a question mark: no work may end with a traceback over its last line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
