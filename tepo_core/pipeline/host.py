"""A process that has imported everything once and forks a runner, with its kernel, for each stage.

Importing torch and transformers takes longer than many a stage works. ``tepo repro`` names a folder in the environment
(:data:`HOST`); the first stage that needs a kernel starts this process there (:mod:`tepo_core.pipeline.launch`), and it ends with
``tepo repro``. Without it, in a plain ``dvc repro``, each stage starts its own interpreters; the results are the same.

A connection carries one stage: file descriptors 0 to 2 and a JSON line with arguments, environment and folder come in, the PID of
the runner goes out, then its exit code. A runner whose client is gone ends itself."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tepo_core.pipeline.spare import become, exit_code, fork_spare

HOST = "TEPO_HOST"  # environment variable: the folder of the socket
SOCKET = "socket"
LONGEST_PLACE = 60  # characters; a socket's whole path may have 107
LIMIT = 2**22  # bytes of a request; an environment is far smaller
POLL_SECONDS = 0.3
# Beside what the stages' notebooks import (runner.MODULES). One that fails is left to the notebook, which shows its traceback.
# Not pyplot and the inline backend: they look for a shell when they are imported, and a kernel forked later would have no pictures.
MODULES = (
    "transformers.models.qwen3.modeling_qwen3", "papermill", "tepo_core.analysis.figures.single", "ipykernel.kernelapp",
    "tepo_core.pipeline.execute",
)  # fmt: skip


def socket_place() -> str:
    """Where the folder of the socket goes: the folder for temporary files, or /tmp where its path is too long for a socket's."""
    place = tempfile.gettempdir()
    return "/tmp" if len(place) > LONGEST_PLACE and os.access("/tmp", os.W_OK) else place


def can_host(device: str, folder: str = "") -> bool:
    """Whether stages may be forked here. A process that has looked at CUDA cannot be, and looking is part of importing torch."""
    short = len(folder) <= LONGEST_PLACE + 30
    return sys.platform == "linux" and short and (device == "cpu" or not Path("/dev/nvidiactl").exists())


def _run(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    """In the forked runner: one stage, from its arguments to its exit code."""
    from tepo_core.pipeline import kernel, runner

    os.setsid()  # a Ctrl-C reaches the client, which passes it on
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    become(request)
    fork_spare(kernel.main)
    try:
        connection.sendall(f"{os.getpid()}\n".encode())
    except OSError:
        return 1  # the client did not wait

    def watch() -> None:
        connection.recv(1)  # the client never sends again: this returns when it is gone
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    return exit_code(lambda: runner.main(request["argv"][1:], hosted=True))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A request and its three file descriptors. Raises OSError or ValueError when the client sent something else."""
    data, descriptors, _, _ = socket.recv_fds(connection, LIMIT, 3)
    while data and not data.endswith(b"\n"):
        more = connection.recv(LIMIT)
        if not more or len(data) > LIMIT:
            raise ValueError("the request is cut off")
        data += more
    if len(descriptors) != 3:
        raise ValueError(f"{len(descriptors)} file descriptors instead of 3")
    return json.loads(data), descriptors


def serve(listener: socket.socket, alive: Callable[[], bool]) -> None:
    """Fork a runner for every connection until ``alive`` says no."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the runners: the kernel reaps them
    listener.settimeout(POLL_SECONDS)
    while alive():
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        connection.setblocking(True)
        with connection:
            try:
                request, descriptors = receive(connection)
            except (OSError, ValueError):
                continue
            if os.fork() == 0:
                listener.close()
                code = _run(connection, request, descriptors)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the client goes when it has the code, and the watch sees that
                with contextlib.suppress(OSError):
                    connection.sendall(f"{code}\n".encode())
                os._exit(code)
            for descriptor in descriptors:
                os.close(descriptor)


def main() -> None:
    """``python -m tepo_core.pipeline.host FOLDER PID [MODULE ...]``: import, and serve in FOLDER while process PID lives."""
    folder, pid, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / SOCKET))
        listener.listen()
        sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  three seconds for nothing: see normalise.py
        from tepo_core.pipeline import runner

        for name in names or (*runner.MODULES.values(), *MODULES):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        serve(listener, lambda: Path(f"/proc/{pid}").exists() and folder.is_dir())


if __name__ == "__main__":
    from tepo_core.pipeline import host  # the module that the others import, not this copy named __main__

    host.main()
