"""The kernel process that the runner starts: ipykernel, which ends together with its runner.

Started as ``python -m tepo_core.pipeline.kernel -f CONNECTION_FILE``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.3
PRELOAD = "TEPO_PRELOAD"  # environment variable: modules that the notebook will import


def end_with(parent: int) -> None:
    """Kill this process group (the kernel and its workers) as soon as ``parent`` is no longer the parent. Never returns."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    # Only a group that the kernel leads: when started by hand from a shell, the group holds other processes too.
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def preload(names: str) -> None:
    """Import modules while the runner still imports papermill on another core: two seconds a stage.

    A module that fails to import is left to the notebook, which shows its traceback."""
    for name in names.split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def take_over_backend() -> None:
    """Read MPLBACKEND again where matplotlib was imported by the process that this kernel was forked from."""
    matplotlib, backend = sys.modules.get("matplotlib"), os.environ.get("MPLBACKEND")
    if matplotlib is not None and backend:
        matplotlib.rcParams["backend"] = backend


def main() -> None:
    """Start the watch, then the kernel."""
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  three seconds for nothing: see normalise.py
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    preload(os.environ.get(PRELOAD, ""))
    take_over_backend()
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()


if __name__ == "__main__":
    main()
