"""The process behind the grading pool: imports math-verify once, then forks a worker whenever the parent asks for one.

Run as a script by :mod:`tepo_core.grading.pool`, never imported by it. Forking from here costs milliseconds, so a worker that
hangs is simply killed and replaced; forking from the parent would copy its threads' locks, and a fresh interpreter would
import sympy again each time. When the control socket closes, for whatever reason, everything here is killed.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import types

MEMORY_LIMIT = 2 << 30  # bytes a worker may add to its address space


def serve(control: socket.socket) -> None:
    """Answer ``F`` + a socket (fork a worker on it, reply with its pid) and ``K`` + pid (kill it) until the socket closes."""
    children: set[int] = set()
    try:
        while True:
            message, fds, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                return
            if message[:1] == b"F":
                pid = os.fork()
                if pid == 0:
                    control.close()
                    work(socket.socket(fileno=fds[0]))
                    os._exit(0)
                os.close(fds[0])
                children.add(pid)
                control.sendall(pid.to_bytes(8, "little"))
            else:
                pid = int.from_bytes(message[1:9], "little")
                if pid in children:
                    _kill(pid)
                    children.remove(pid)
                control.sendall(message[1:9])
    finally:
        for pid in children:
            _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def work(connection: socket.socket) -> None:
    """Grade batches of (gold, gold is bare, answer, answer is bare); after each item report its verdict and the CPU time."""
    from tepo_core.grading.compare import Unreadable, slow_reason
    from tepo_core.grading.extract import Answer

    with contextlib.suppress(OSError, AttributeError):  # Linux: a worker never outlives this process
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # a worker that talks must not fill the pipe and block
    soft = _address_space() + MEMORY_LIMIT
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stream = connection.makefile("rwb")
    for line in stream:
        for gold, gold_bare, answer, answer_bare in json.loads(line):
            note = ""
            try:
                same, note = slow_reason(Answer(gold, gold_bare), Answer(answer, answer_bare))
                outcome = "correct" if same else "wrong"
            except Unreadable as error:
                outcome, note = "error", str(error)
            except BaseException as error:  # sympy raises anything; a failed comparison is no verdict
                outcome, note = "error", f"{type(error).__name__} while comparing: {str(error)[:200]}".rstrip(": ")
            stream.write(json.dumps([outcome, note, time.process_time()]).encode() + b"\n")
            stream.flush()


def _address_space() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30


def speed_up_parsing() -> None:
    """Two changes to how latex2sympy spends its time, none to what it returns.

    ANTLR's SLL prediction returns the tree of the full LL prediction or a syntax error, so LL is needed only after an
    error. And sympy's ``parse_expr`` executes ``from sympy import *`` for every number; the namespace is built once here.
    """
    import latex2sympy2_extended.latex2sympy2 as latex
    from antlr4.atn.PredictionMode import PredictionMode
    from sympy.parsing import sympy_parser

    create, parse = latex._Latex2Sympy.create_parser, latex._Latex2Sympy.parse

    def create_parser(self, text):
        parser = create(self, text)
        if not getattr(self, "full_prediction", False):
            parser._interp.predictionMode = PredictionMode.SLL
        return parser

    def parse_in_two_stages(self, text):
        try:
            return parse(self, text)
        except (RecursionError, MemoryError):
            raise
        except Exception:
            self.full_prediction = True
            self.variances.clear()
            self.var.clear()
            return parse(self, text)

    latex._Latex2Sympy.create_parser = create_parser
    latex._Latex2Sympy.parse = parse_in_two_stages

    original = sympy_parser.parse_expr
    namespace: dict = {}
    exec("from sympy import *", namespace)
    for name, value in vars(builtins).items():  # as parse_expr itself does
        if isinstance(value, types.BuiltinFunctionType):
            namespace[name] = value
    namespace["max"], namespace["min"] = namespace["Max"], namespace["Min"]

    @functools.wraps(original)
    def parse_expr(*args, **options):
        if len(args) < 4 and options.get("global_dict") is None:
            options["global_dict"] = dict(namespace)
        return original(*args, **options)

    sympy_parser.parse_expr = parse_expr


# One expression of each common kind, so that workers inherit ANTLR's prediction tables instead of each building its own.
WARM_UP = (r"\frac{1}{2}", r"2\sqrt{3}", r"x^2+2x-1", r"(1,2)", r"\{1,2\}", r"[0,1)\cup(2,\infty)", r"x=5", r"\frac{\pi}{4}")


def main() -> None:
    """Import, warm up, serve the socket given as file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the parent, which closes the socket
    control = socket.socket(fileno=int(sys.argv[1]))
    import logging

    logging.disable(logging.CRITICAL)  # math-verify warns about the time-outs that the pool itself provides
    import math_verify  # noqa: F401

    from tepo_core.grading.compare import parse

    speed_up_parsing()
    for text in WARM_UP:
        parse(text)
    gc.freeze()
    serve(control)


if __name__ == "__main__":
    main()
