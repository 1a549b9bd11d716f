"""A process that has imported everything once and forks a runner, with its kernel, for each stage.

Importing torch and transformers takes longer than many a stage works. ``tepo repro`` names a folder in the environment
(:data:`HOST`); the first stage that needs a kernel starts this process there (:mod:`tepo_core.pipeline.stage`), and it ends with
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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST = "TEPO_HOST"  # environment variable: the folder of the socket
SOCKET = "socket"
LONGEST_PLACE = 60  # characters; a socket's whole path may have 107
LIMIT = 2**22  # bytes of a request; an environment is far smaller
POLL_SECONDS = 0.3
# Beside what the stages' notebooks import (runner.MODULES). One that fails is left to the notebook, which shows its traceback.
MODULES = (
    "transformers.models.qwen3.modeling_qwen3", "papermill", "matplotlib.pyplot", "matplotlib_inline.backend_inline",
    "ipykernel.kernelapp", "tepo_core.pipeline.execute",
)  # fmt: skip

spare: Spare | None = None  # in a forked runner: the process that will be its kernel


def socket_place() -> str:
    """Where the folder of the socket goes: the folder for temporary files, or /tmp where its path is too long for a socket's."""
    place = tempfile.gettempdir()
    return "/tmp" if len(place) > LONGEST_PLACE and os.access("/tmp", os.W_OK) else place


def can_host(device: str, folder: str = "") -> bool:
    """Whether stages may be forked here. A process that has looked at CUDA cannot be, and looking is part of importing torch."""
    short = len(folder) <= LONGEST_PLACE + 30
    return sys.platform == "linux" and short and (device == "cpu" or not Path("/dev/nvidiactl").exists())


class Spare:
    """A process forked while its parent had no threads yet, that waits to be told what to run.

    Has as much of :class:`subprocess.Popen` as jupyter_client and :mod:`tepo_core.pipeline.execute` use. It leads a session of its
    own, and ends when its parent ends before having told it anything."""

    stdin = stdout = stderr = None

    def __init__(self, main: Callable[[], Any]) -> None:
        reading, self._writing = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            os.close(reading)
            return
        os.close(self._writing)
        os.setsid()
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        code = 0
        if text:
            _become(json.loads(text))
            code = _exit_code(main)
        os._exit(code)

    def start(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Let it run ``main`` with these arguments, environment and folder."""
        with os.fdopen(self._writing, "w") as pipe:
            json.dump({"argv": argv, "env": env, "cwd": cwd}, pipe)

    def poll(self) -> int | None:
        """Exit code as Popen counts it (negative: the signal), or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("kernel", timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(request: dict[str, Any]) -> None:
    """Take over arguments, environment and folder of a request."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]


def _exit_code(main: Callable[[], Any]) -> int:
    """Call ``main`` and say what the interpreter would have ended with."""
    try:
        code = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0


def _run(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    """In the forked runner: one stage, from its arguments to its exit code."""
    global spare
    from tepo_core.pipeline import kernel, runner

    os.setsid()  # a Ctrl-C reaches the client, which passes it on
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _become(request)
    spare = Spare(kernel.main)
    try:
        connection.sendall(f"{os.getpid()}\n".encode())
    except OSError:
        return 1  # the client did not wait

    def watch() -> None:
        connection.recv(1)  # the client never sends again: this returns when it is gone
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    return _exit_code(lambda: runner.main(request["argv"][1:], hosted=True))


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
