"""Worker processes for comparisons that may hang: killed on time-out, replaced at once, gone when the pool is closed.

Only the item that a worker was at is marked when it hangs or dies; the rest of its batch goes to another worker. The time-out
counts the worker's own CPU time where the system tells it, so that a busy machine or many workers do not turn slow items into
time-outs.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

ZYGOTE = Path(__file__).with_name("zygote.py")
WALL_FACTOR = 6.0  # an item that makes no progress ends after this many time-outs even if it used no CPU time
BATCH = 32
Item = tuple[str, bool, str, bool]  # gold, gold is bare, answer, answer is bare


class PoolError(RuntimeError):
    """The pool's processes cannot be started or died for a reason outside the items."""


class _Worker:
    """One worker, its socket, and the items it still owes (indices, in order)."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        self.queue: deque[int] = deque()
        self.buffer = b""
        self.since = time.monotonic()
        self.cpu = _cpu_time(pid) or 0.0

    def spent(self) -> tuple[float, float | None]:
        """Wall and CPU seconds since the last report; CPU ``None`` where the system does not tell."""
        now = _cpu_time(self.pid)
        return time.monotonic() - self.since, None if now is None else now - self.cpu


def _cpu_time(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


class Pool:
    """``workers`` killable processes. ``timeout`` is in seconds an item. Started on first use; :meth:`close` ends all."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.timeout = workers, timeout
        self._lock = threading.Lock()
        self._zygote: subprocess.Popen | None = None
        self._control: socket.socket | None = None
        self._idle: list[_Worker] = []
        self._owner = 0
        self._finalizer: weakref.finalize | None = None

    def run(self, items: Sequence[Item]) -> list[tuple[str, str]]:
        """(outcome, note) of every item, in order; outcome is correct, wrong, error or timeout."""
        results: list[tuple[str, str] | None] = [None] * len(items)
        if not items:
            return []
        with self._lock:
            self._start()
            # Equal golds side by side: a worker parses each gold once. The results do not depend on it.
            order = sorted(range(len(items)), key=lambda i: (items[i][0], i))
            size = max(1, min(BATCH, -(-len(items) // (self.workers * 4))))
            waiting = deque(deque(order[start : start + size]) for start in range(0, len(order), size))
            try:
                self._loop(items, waiting, results)
            except BaseException:
                self._shut_down()
                raise
        return [result for result in results if result is not None]

    def _loop(self, items: Sequence[Item], waiting: deque, results: list) -> None:
        while len(self._idle) < min(self.workers, len(waiting)):
            self._idle.append(self._fork())
        busy: dict[int, _Worker] = {}
        selector = selectors.DefaultSelector()
        try:
            while waiting or busy:
                while waiting and self._idle:
                    worker = self._idle.pop()
                    worker.queue = waiting.popleft()
                    busy[worker.pid] = worker
                    selector.register(worker.connection, selectors.EVENT_READ, worker)
                    self._send(worker, [items[i] for i in worker.queue])
                for key, _ in selector.select(timeout=0.05):
                    worker = key.data
                    alive = self._read(worker, results)
                    if not alive and worker.queue:  # died at its current item
                        results[worker.queue.popleft()] = ("error", "the grading process died")
                    if not alive or not worker.queue:
                        selector.unregister(worker.connection)
                        del busy[worker.pid]
                        self._release(worker, alive, waiting)
                for worker in list(busy.values()):
                    wall, cpu = worker.spent()
                    if wall > self.timeout and (cpu is None or cpu >= self.timeout or wall > WALL_FACTOR * self.timeout):
                        before = len(worker.queue)
                        alive = self._read(worker, results, wait=False)  # a verdict may have come in just now
                        if alive and len(worker.queue) < before:
                            continue
                        results[worker.queue.popleft()] = ("timeout", f"no verdict within {self.timeout:g} s")
                        selector.unregister(worker.connection)
                        del busy[worker.pid]
                        self._release(worker, False, waiting)
        finally:
            selector.close()

    def _release(self, worker: _Worker, alive: bool, waiting: deque) -> None:
        if not alive:
            worker.connection.close()
            self._kill(worker.pid)
            if worker.queue:
                waiting.appendleft(worker.queue)
            worker = self._fork()
        worker.queue = deque()
        self._idle.append(worker)

    @staticmethod
    def _send(worker: _Worker, batch: list[Item]) -> None:
        worker.since = time.monotonic()
        worker.cpu = _cpu_time(worker.pid) or worker.cpu
        with contextlib.suppress(OSError):  # a dead worker is found when its socket is read
            worker.connection.sendall(json.dumps(batch).encode() + b"\n")

    @staticmethod
    def _read(worker: _Worker, results: list, wait: bool = True) -> bool:
        """Take in what the worker has reported. False when it is gone."""
        try:
            data = worker.connection.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        *lines, worker.buffer = (worker.buffer + data).split(b"\n")
        for line in lines:
            outcome, note, worker.cpu = json.loads(line)
            results[worker.queue.popleft()] = (outcome, note)
            worker.since = time.monotonic()
        return bool(data)

    def _start(self) -> None:
        if self._zygote is not None and self._owner == os.getpid() and self._zygote.poll() is None:
            return
        if self._owner == os.getpid():
            self._shut_down()
        self._idle = []  # in a forked copy of the owner the old processes are not ours
        ours, theirs = socket.socketpair()
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._zygote = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(ZYGOTE), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self._control, self._owner = ours, os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._zygote, ours, self._owner)

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"F"], [theirs.fileno()])
            reply = self._control.recv(8)
        except OSError:
            reply = b""
        theirs.close()
        if len(reply) != 8:
            ours.close()
            said = self._zygote.stderr.read().decode(errors="replace").strip().splitlines()
            raise PoolError(f"the grading process did not start: {said[-1] if said else 'no message'}; see 'tepo doctor'")
        return _Worker(int.from_bytes(reply, "little"), ours)

    def _kill(self, pid: int) -> None:
        try:
            self._control.sendall(b"K" + pid.to_bytes(8, "little"))
            if len(self._control.recv(8)) == 8:
                return
        except OSError:
            pass
        raise PoolError("the process that starts grading workers died; run the command again")

    def _shut_down(self) -> None:
        for worker in self._idle:
            worker.connection.close()
        self._idle = []
        if self._finalizer is not None:
            self._finalizer()
        self._zygote = self._control = self._finalizer = None

    def close(self) -> None:
        """Kill and reap every process of the pool. The pool starts anew when it is used again."""
        with self._lock:
            if self._owner == os.getpid():
                self._shut_down()


def _end(zygote: subprocess.Popen, control: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return
    control.close()  # the zygote kills its workers and ends
    try:
        zygote.wait(timeout=5)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(zygote.pid, 9)
        zygote.wait()
    if zygote.stderr is not None:
        zygote.stderr.close()
