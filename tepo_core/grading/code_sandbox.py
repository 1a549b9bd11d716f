r"""Running a program that nobody has read, in a process of its own with as few rights as the system lets us take away.

What it protects from (:mod:`tepo_core.grading.jail` has the list): time, memory, file size, output, new processes, network,
files outside an own empty folder, the environment, other processes. What it does not protect from: a bug in the kernel;
filling the disk faster than the folder is measured (every quarter of a second); reading the interpreter's own files and
anything under /usr; a program that inspects the interpreter it runs in to forge a pass; side channels. On systems without
Landlock and seccomp (macOS, old kernels) files, sockets and processes are guarded from inside the interpreter alone: use a
container there.

A container runner is a command that starts Python in the container with standard input attached, for example
``("docker", "run", "--rm", "-i", "--network=none", "--memory=1g", "--pids-limit=64", "--read-only", "--tmpfs", "/tmp",
"-w", "/tmp", "python:3.11-slim", "python")``; the sandbox adds its own arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

JAIL = Path(__file__).with_name("jail.py")
STATUSES = ("passed", "failed", "timeout", "memory", "output", "files", "crashed")
KEPT_OUTPUT = 4096  # bytes of output kept for the reader


class SandboxError(RuntimeError):
    """The sandbox itself cannot run: no interpreter, no container runner, or a protection that was asked for is missing."""


@dataclass(frozen=True)
class Limits:
    """``timeout``: CPU seconds; ``wall``: seconds by the clock, 0 for twice the time-out. Sizes in bytes."""

    timeout: float = 20.0
    wall: float = 0.0
    memory: int = 1 << 30
    file_size: int = 16 << 20
    folder_size: int = 64 << 20
    output: int = 1 << 20
    open_files: int = 64
    processes: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "wall"):
                raise ValueError(f"{name} = {value}: a limit must be positive")

    @property
    def wall_seconds(self) -> float:
        """The limit by the clock."""
        return self.wall or 2 * self.timeout


@dataclass(frozen=True)
class Result:
    """``status``: one of :data:`STATUSES`. ``passed`` means that the whole program ran to its end. ``note`` says why not.
    ``by_clock``: a time-out by the clock, which a busy machine can cause; else it is of the program's own CPU time."""

    status: str
    note: str = ""
    output: str = ""
    protections: tuple[str, ...] = ()
    by_clock: bool = False

    @property
    def beyond_limits(self) -> bool:
        """Whether the program was stopped for what it did itself, on any machine: CPU time, memory, output, files."""
        return self.status in ("memory", "output", "files") or (self.status == "timeout" and not self.by_clock)


def run_program(
    program: str,
    limits: Limits = Limits(),
    *,
    isolation: str = "kernel",
    runner: Sequence[str] = (),  # noqa: B008
) -> Result:
    """Run Python source to its end in a fresh process and folder; both are gone when this returns.

    ``isolation``: ``kernel`` takes every protection that the system offers and fills gaps from inside Python; ``python`` is
    the second alone. ``runner``: command of a container that replaces the local interpreter. Raises :class:`SandboxError`
    when the process cannot be started."""
    if isolation not in ("kernel", "python"):
        raise SandboxError(f"isolation = {isolation!r} is unknown; allowed: kernel, python")
    token = secrets.token_hex(16)
    rlimits = {
        "CPU": max(1, round(limits.timeout)),
        "AS": limits.memory,
        "FSIZE": limits.file_size,
        "NOFILE": limits.open_files,
        "NPROC": limits.processes,
        "CORE": 0,
    }
    request = json.dumps({"program": program, "token": token, "limits": rlimits, "isolation": isolation}).encode()
    folder = tempfile.mkdtemp(prefix="tepo-sandbox-")
    command = list(runner) or [sys.executable]
    try:
        child = subprocess.Popen(
            [*command, "-I", "-S", "-B", "-c", JAIL.read_text(encoding="utf-8")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "")} if runner else {"LC_ALL": "C.UTF-8"},
        )
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SandboxError(f"cannot start {command[0]!r}: {error.strerror}; check the runner or the interpreter") from None
    try:
        return _watch(child, request, token, limits, Path(folder))
    finally:
        _kill_group(child)
        for pipe in (child.stdin, child.stdout, child.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _watch(child: subprocess.Popen, request: bytes, token: str, limits: Limits, folder: Path) -> Result:
    """Feed the request, collect verdict and output, and stop the program where it passes a limit."""
    deadline = time.monotonic() + limits.wall_seconds
    measured = time.monotonic()
    verdict, output, printed, stopped = b"", b"", 0, ""
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdin, selectors.EVENT_WRITE)
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while selector.get_map() and not stopped:
            for key, _ in selector.select(timeout=0.1):
                if key.fileobj is child.stdin:
                    try:
                        request = request[os.write(child.stdin.fileno(), request) :]
                    except BrokenPipeError:
                        request = b""
                    if not request:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                    continue
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is child.stdout:
                    verdict += data[: 1 << 16]
                    stopped = "output" if len(verdict) > 1 << 16 else ""
                else:
                    printed += len(data)
                    output = (output + data)[:KEPT_OUTPUT]
                    stopped = "output" if printed > limits.output else ""
            now = time.monotonic()
            if now > deadline:
                stopped = "timeout"
            elif now - measured > 0.25:
                measured = now
                if _size(folder) > limits.folder_size:
                    stopped = "files"
    while not stopped:  # both pipes are closed: the program has ended, or closed them and goes on
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            cpu = usage.ru_utime + usage.ru_stime
            return _judge(child.returncode, cpu, verdict, token, output.decode("utf-8", errors="replace"), limits)
        time.sleep(0.005)
        stopped = "timeout" if time.monotonic() > deadline else ""
    notes = {
        "timeout": f"stopped after {limits.wall_seconds:g} s by the clock",
        "output": f"printed more than {limits.output} bytes",
        "files": f"wrote more than {limits.folder_size} bytes",
    }
    return Result(stopped, notes[stopped], output.decode("utf-8", errors="replace"), by_clock=stopped == "timeout")


def _judge(code: int, cpu: float, verdict: bytes, token: str, output: str, limits: Limits) -> Result:
    for line in verdict.splitlines():
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and message.get("token") == token and message.get("status") in STATUSES:
                return Result(message["status"], message["note"], output, tuple(message["protections"]))
    if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU) or (code == -signal.SIGKILL and cpu >= 0.9 * limits.timeout):
        return Result("timeout", f"used more than {limits.timeout:g} s of CPU time", output)
    if code < 0:
        return Result("crashed", f"ended by signal {-code}", output)
    if code == 0:
        return Result("failed", "left before the tests had ended", output)
    return Result("crashed", f"ended with code {code}", output)


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _kill_group(child: subprocess.Popen) -> None:
    """The child leads a session of its own, so its group holds whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@lru_cache(maxsize=4)
def protections(isolation: str = "kernel") -> tuple[str, ...]:
    """The protections in force on this machine, found by running an empty program. For ``tepo doctor`` and the report."""
    result = run_program("pass", Limits(timeout=10), isolation=isolation)
    if result.status != "passed":
        raise SandboxError(f"the code sandbox does not work here: {result.status}, {result.note} {result.output.strip()}")
    return result.protections
