"""A process that was forked early and waits to be told what to run: the kernel of a hosted stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


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
        with os.fdopen(reading, encoding="utf-8") as pipe:
            text = pipe.read()
        code = 0
        if text:
            become(json.loads(text))
            code = exit_code(main)
        os._exit(code)

    def start(self, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Let it run ``main`` with these arguments, environment and folder."""
        with os.fdopen(self._writing, "w", encoding="utf-8") as pipe:
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


def become(request: dict[str, Any]) -> None:
    """Take over arguments, environment and folder of a request."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]


def exit_code(main: Callable[[], Any]) -> int:
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


_waiting: list[Spare] = []


def fork_spare(main: Callable[[], Any]) -> None:
    """In a forked runner, before it has threads: fork the process that will be its kernel, and keep it for :func:`take_spare`."""
    _waiting.append(Spare(main))


def has_spare() -> bool:
    """Whether a process waits to become a kernel."""
    return bool(_waiting)


def take_spare() -> Spare:
    """The waiting process, once. Raises IndexError when there is none."""
    return _waiting.pop()
