"""What DVC starts for a stage (through ``bin/stage``): hands it to the host where there is one, else becomes the runner.

Imports the standard library alone, so that it costs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HOST, SOCKET = "TEPO_HOST", "socket"  # as in host.py
REPRO = "TEPO_REPRO_PID"  # as in processes.py
CONNECT_SECONDS = 20.0


def connect(folder: Path) -> socket.socket | None:
    """The host in ``folder``, started if there is none. None when it cannot be had."""
    end, process = time.monotonic() + CONNECT_SECONDS, None
    while time.monotonic() < end:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(folder / SOCKET))
            return connection
        except OSError:
            connection.close()
        if process is None:
            (folder / SOCKET).unlink(missing_ok=True)  # of a host that died
            command = [sys.executable, "-m", "tepo_core.pipeline.host", str(folder), os.environ[REPRO]]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        elif process.poll() is not None:
            return None
        time.sleep(0.02)
    return None


def ask(connection: socket.socket, arguments: list[str]) -> int:
    """Run a stage in the host. Returns its exit code; passes on Ctrl-C and SIGTERM."""
    request = {"argv": ["bin/stage", *arguments], "env": dict(os.environ), "cwd": os.getcwd()}
    pid: int | None = None

    def forward(signum: int, frame: object) -> None:
        if pid is None:  # the host is still importing: nothing has begun, and it finds the connection closed
            os.write(2, b"stopped before this stage began; the same command goes on where this one ended\n")
            os._exit(128 + signum)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, forward)
    data, code = json.dumps(request).encode() + b"\n", ""
    with (
        contextlib.suppress(OSError),
        connection.makefile("r", encoding="utf-8") as answers,
    ):  # a host that dies resets the connection
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        if line := answers.readline():
            pid = int(line)
            code = answers.readline()
    if not code:
        print("error: the runner of this stage was killed; run the same command again", file=sys.stderr)
    return int(code or 1)


def main() -> int:
    """Entry point."""
    arguments = sys.argv[1:]
    for number in range(3):  # the next file to be opened would take the place of a closed one
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    folder = os.environ.get(HOST)
    if folder and os.environ.get(REPRO) and arguments[:1] != ["normalise"]:
        connection = None
        with contextlib.suppress(OSError):  # no host: the stage runs without one. Once it was asked, it must not run twice
            connection = connect(Path(folder))
        if connection is not None:
            from tepo_core.pipeline.processes import end_with_dvc

            end_with_dvc()
            with connection:
                return ask(connection, arguments)
    from tepo_core.pipeline.runner import main as run

    return run(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an interrupted event loop must not hold up the end, nor print about its pending tasks
