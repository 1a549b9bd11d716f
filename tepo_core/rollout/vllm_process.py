"""The process that runs vLLM (:mod:`tepo_core.rollout.vllm_worker`): started, asked, ended, and explained when it dies."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tepo_core.rollout.vllm_worker import MISSING_VLLM

WORKER = Path(__file__).with_name("vllm_worker.py")
START_SECONDS = 600
ALTERNATIVE = "set rollout.engine: transformers to sample without vLLM"


class EngineError(RuntimeError):
    """vLLM could not be started, died, or does not hold the trainer's weights. The message says what to do."""


class WorkerProcess:
    """vLLM in a process of its own, talked to over a socket pair. It ends with the process that started it.

    ``folder`` holds the model it loads and its log; ``python`` is an interpreter that has vLLM."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._owner = os.getpid()

    def start(self, llm: dict[str, Any], repack: bool) -> dict[str, Any]:
        """Start it with these arguments of ``vllm.LLM`` and return what it says of itself (vocabulary, context, versions).

        Raises :class:`EngineError` when vLLM is missing or does not start; its last lines are in the message."""
        ours, theirs = socket.socketpair()
        settings = {
            "socket": theirs.fileno(),
            "parent": os.getpid(),
            "folder": str(self.folder),
            "repack": repack,
            "llm": llm,
        }
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in the worker: one process to end
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (self.folder / "worker.log").open("wb") as stream:
            self.process = subprocess.Popen(
                [self.python, "-P", str(WORKER), json.dumps(settings)],  # -P: this folder must not shadow 'types'
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the trainer, which closes the worker
            )
        theirs.close()
        self._connection = Connection(ours.detach())
        return self._receive("start", limit=START_SECONDS)

    def call(self, name: str, **arguments: Any) -> Any:
        """Have it do ``name`` and return the answer. Raises :class:`EngineError` when it fails or has ended."""
        if self._connection is None:
            raise EngineError("the vLLM engine is closed; make a new one")
        try:
            self._connection.send((name, arguments))
        except OSError:
            raise EngineError(self._obituary(f"vLLM ended before '{name}'")) from None
        return self._receive(name)

    def end(self) -> None:
        """Ask it to end, and kill it when it does not within ten seconds. May be called twice."""
        if os.getpid() != self._owner:  # a forked child has a copy of this object, but not the worker
            return
        connection, process = self._connection, self.process
        self._connection = self.process = None
        if connection is not None:
            with contextlib.suppress(OSError, ValueError):
                connection.send(("close", {}))
            connection.close()
        if process is not None:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _receive(self, name: str, limit: float = math.inf) -> Any:
        connection, process = self._connection, self.process
        deadline = time.monotonic() + limit
        while True:
            ended = process.poll() is not None  # asked before the socket: an answer sent before the end still counts
            try:
                if connection.poll(0.2):
                    state, value = connection.recv()
                    break
            except (EOFError, OSError):
                process.wait()
                ended = True
            if ended:
                if process.returncode == MISSING_VLLM:
                    raise EngineError(
                        f"vLLM is not installed for {Path(self.python).name}; pip install '.[vllm]' on a machine with a GPU, "
                        f"or point TEPO_VLLM_PYTHON at an interpreter that has it, or {ALTERNATIVE}"
                    )
                raise EngineError(self._obituary(f"vLLM ended with code {process.returncode} during '{name}'"))
            if time.monotonic() > deadline:
                raise EngineError(self._obituary(f"vLLM did not answer '{name}' within {limit:.0f} s"))
        if state == "error":
            raise EngineError(self._obituary(f"vLLM failed in '{name}'", value))
        return value

    def _obituary(self, what: str, text: str = "") -> str:
        log = self.folder / "worker.log"
        lines = (text or (log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "")).strip().splitlines()
        hint = ""
        if any("out of memory" in line.lower() or "free memory" in line.lower() for line in lines):
            hint = "lower rollout.gpu_memory_share, rollout.batch_size or train.max_new_tokens; "
        return "\n  ".join([f"{what}; {hint}{ALTERNATIVE}. Its last lines:", *lines[-12:]])
