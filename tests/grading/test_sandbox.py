"""The code sandbox: every attack ends as its status, nothing outside changes, no process stays."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tepo_core.grading.code_grader import CodeGrader, assemble, extract_code, make_gold, read_gold
from tepo_core.grading.code_sandbox import Limits, SandboxError, protections, run_program
from tepo_core.grading.graders import make_grader
from tepo_core.grading.types import GradingError, Outcome

LIMITS = Limits(timeout=1, wall=2, memory=512 << 20)

# name: (program, status, whether only the kernel guarantees it). {outside} is a folder that holds one file.
ATTACKS = {
    "fork bomb": ("import os\nwhile True: os.fork()", "failed"),
    "subprocess": ("import subprocess\nsubprocess.run(['true'])", "failed"),
    "endless loop": ("while True: pass", "timeout"),
    "sleep": ("import time\ntime.sleep(1000)", "timeout"),
    "10 GB allocation": ("x = bytearray(10 * 2**30)", "memory"),
    "growing list": ("x = []\nwhile True: x.append(bytearray(2**24))", "memory"),
    "delete a file outside": ("import os\nos.remove('{outside}/file')", "failed"),
    "delete a folder outside": ("import shutil\nshutil.rmtree('{outside}')", "failed"),
    "write outside": ("open('{outside}/new', 'w').write('x')", "failed"),
    "write through a link": ("import os\nos.symlink('{outside}/file', 'l')\nopen('l', 'w').write('x')", "failed"),
    "change modes outside": ("import os\nos.chmod('{outside}/file', 0)", "failed"),
    "read outside": ("open('{outside}/file').read()", "failed"),
    "environment of the parent": ("import os\nopen(f'/proc/{{os.getppid()}}/environ').read()", "failed"),
    "own environment": ("import os\nassert not os.environ", "passed"),
    "socket": ("import socket\nsocket.socket().connect(('127.0.0.1', 9))", "failed"),
    "10 GB file": ("f = open('x', 'wb')\nfor _ in range(10240): f.write(bytes(2**20))", "failed"),
    "many files": ("for i in range(1000): open(f'f{{i}}', 'wb').write(bytes(10 * 2**20))", "files"),
    "catch KeyboardInterrupt": ("while True:\n try:\n  while True: pass\n except BaseException: pass", "timeout"),
    "print 1 GB": ("for _ in range(2**20): print('x' * 1023)", "output"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "failed"),
    "leave the session": ("import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(600)", "failed"),
    "10,000 threads": ("import threading, time\nfor _ in range(10000):\n"
                       " threading.Thread(target=time.sleep, args=(9,)).start()", "failed"),
    "raise the limits": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**50, 2**50))", "failed"),
    "leave with 0": ("import os\nos._exit(0)", "failed"),
    "sys.exit": ("import sys\nsys.exit(0)", "failed"),
    "forge the verdict": ("import os\nfor i in range(3, 32):\n try:\n"
                          "  os.write(i, b'{{\"token\": \"\", \"status\": \"passed\"}}\\n')\n"
                          " except OSError: pass\nos._exit(0)", "failed"),
    "close every pipe and stay": ("import os, time\nos.closerange(0, 64)\ntime.sleep(1000)", "timeout"),
}  # fmt: skip


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("alive")
    return folder


def sandboxes():
    """Processes that run the jail, of this process or left without a parent; not those of other tests on the machine."""
    found = set()
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "status"]):
        line = process.info["cmdline"] or []
        if process.info["ppid"] not in (os.getpid(), 1):
            continue
        if "-c" in line and any("AuditHook" in part for part in line) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(process.info["pid"])
    return found


@pytest.mark.parametrize("isolation", ["kernel", "python"])
@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name, isolation, outside):
    program, status = ATTACKS[name]
    before = sandboxes()
    started = time.monotonic()
    # filling half a gigabyte may take longer than a second of a busy machine's
    limits = replace(LIMITS, timeout=10, wall=20) if status == "memory" else LIMITS
    result = run_program(program.format(outside=outside), limits, isolation=isolation)
    assert result.status == status, result
    assert time.monotonic() - started < 60
    assert sorted(p.name for p in outside.iterdir()) == ["file"] and (outside / "file").read_text() == "alive"
    assert (outside / "file").stat().st_mode & 0o777 in (0o644, 0o664)
    assert not sandboxes() - before


def test_kernel_protections_are_in_force_where_the_kernel_has_them():
    active = protections()
    assert "limits" in active
    if sys.platform.startswith("linux") and os.uname().machine in ("x86_64", "aarch64"):
        assert "seccomp" in active
    assert protections("python") == ("limits", "audit")


def test_ordinary_programs_pass_and_failures_say_why():
    library = "import collections, itertools, math, re, heapq, functools, typing, random, string, datetime, decimal, tempfile\n"
    library += "with tempfile.TemporaryFile() as f: f.write(b'x')\nopen('own', 'w').write('x')\nimport os\nos.remove('own')"
    assert run_program(library, LIMITS).status == "passed"
    failed = run_program("print('seen')\nassert 1 == 2, 'one is not two'", LIMITS)
    assert (failed.status, failed.note, failed.output) == ("failed", "AssertionError: one is not two", "seen\n")
    assert run_program("def f(:", LIMITS).note.startswith("SyntaxError")
    assert run_program("raise KeyboardInterrupt", LIMITS).status == "failed"
    assert run_program("input()", LIMITS).note.startswith("EOFError")


def test_crash_is_a_crash():
    result = run_program("import ctypes\nctypes.string_at(0)", LIMITS)
    assert result.status == "crashed" and "signal 11" in result.note


def test_no_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_program("open('x', 'w').write('y')", LIMITS)
    with pytest.raises(SandboxError, match="cannot start 'no-such-runner'"):
        run_program("pass", LIMITS, runner=("no-such-runner",))
    assert list(tmp_path.iterdir()) == []


def test_another_runner_behind_the_same_interface():
    """What a container runner has to do: start Python with the sandbox's arguments and its standard streams."""
    assert run_program("assert True", LIMITS, runner=("env", "-i", sys.executable)).status == "passed"
    assert run_program("assert False", LIMITS, runner=("env", "-i", sys.executable)).status == "failed"


@pytest.mark.parametrize("values", [{"timeout": 0}, {"memory": -1}])
def test_bad_limits_are_refused(values):
    with pytest.raises(ValueError, match="must be positive"):
        Limits(**values)
    with pytest.raises(SandboxError, match="allowed: kernel, python"):
        run_program("pass", isolation="docker")


PROMPT = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ Sum of xs. """\n'
GOLD = make_gold(prompt=PROMPT, entry_point="total", tests="assert total([1, 2]) == 3\nassert total([]) == 0")


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("    return sum(xs)\n", Outcome.CORRECT),
        ("    return sum(xs)\n\nprint(total([1]))\nassert False\n", Outcome.CORRECT),  # what follows the function is cut
        ("Here it is:\n```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```\nDone.", Outcome.CORRECT),
        ("```python\ndef total(xs):\n  return 0\n```\nOr:\n```python\ndef total(xs):\n  return sum(xs)\n```", Outcome.CORRECT),
        ("```python\ndef total(xs):\n    return sum(xs)\n```\nUse it:\n```python\nprint(total([1]))\n```", Outcome.CORRECT),
        ("def total(xs: List[int]) -> int:\n    return sum(xs)", Outcome.CORRECT),
        ("    return 3\n", Outcome.WRONG),
        ("    pass\n", Outcome.WRONG),
        ("    while True: pass\n", Outcome.TIMEOUT),
        ("    return bytearray(10 * 2**30)\n", Outcome.ERROR),
        ("", Outcome.NO_ANSWER),
        ("```python\ndef total(xs):\n    return su", Outcome.NO_ANSWER),
        ("<think>```python\ndef total(xs): return sum(xs)\n```</think>", Outcome.NO_ANSWER),
    ],
)
def test_code_grades(response, outcome):
    grader = make_grader("code", limits=LIMITS, workers=1)
    [grade] = grader.grade(golds=[GOLD], responses=[response], truncated=[False])
    assert grade.outcome is outcome


def test_code_grader_keeps_order_and_truncation():
    responses = ["    return sum(xs)\n", "    return 1\n", "    return sum(xs)\n"]
    grades = CodeGrader(limits=LIMITS, workers=2).grade(golds=[GOLD] * 3, responses=responses, truncated=[False, False, True])
    assert [g.outcome for g in grades] == [Outcome.CORRECT, Outcome.WRONG, Outcome.TRUNCATED]
    assert grades[0].extracted == "    return sum(xs)\n"


def test_assembly_keeps_the_prompts_imports():
    specification = read_gold(GOLD)
    assert assemble(specification, "def total(xs): return 0").startswith("from typing import List\n\n\n\ndef total(xs)")
    assert assemble(specification, "    return 0").startswith(PROMPT + "    return 0")
    assert extract_code("total = sum", specification) == "total = sum"


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("not json", "not JSON"),
        ("[]", "'prompt' is missing"),
        (json.dumps({"prompt": "", "entry_point": "f"}), "'tests' is missing"),
        (json.dumps({"prompt": "", "entry_point": "f", "tests": " "}), "every program would pass"),
    ],
)
def test_bad_golds_are_refused(gold, message):
    with pytest.raises(GradingError, match=message):
        CodeGrader().grade(golds=[gold], responses=["x"], truncated=[False])
    with pytest.raises(GradingError, match="workers = -1"):
        CodeGrader(workers=-1)


def benchmark(name):
    folder = os.environ.get("TEPO_BENCHMARKS")
    path = (Path(folder) if folder else Path(__file__).parents[3] / "shared" / "benchmarks") / name
    if not path.is_file():
        pytest.skip(f"no {name} here (set TEPO_BENCHMARKS to a folder of the benchmark files)")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "total", "slow"), [("humaneval", 164, set()), ("mbpp", 974, {"MBPP/123"})])
def test_canonical_solutions(name, total, slow):
    """MBPP/123 sums divisors by trial up to 9,999: 5 s of CPU time on one machine, beyond the limit of 20 s on a slower one."""
    from tepo_core.tasks.math_benchmarks import load_benchmark

    problems = load_benchmark(name, benchmark(f"{name}.jsonl").parent)
    assert len(problems) == total
    grader = CodeGrader(limits=Limits(timeout=20))
    golds = [p.answer for p in problems]
    solved = grader.grade(golds=golds, responses=[p.meta["canonical_solution"] for p in problems], truncated=[False] * total)
    apart = {p.id: g.outcome for p, g in zip(problems, solved, strict=True) if g.outcome is not Outcome.CORRECT}
    assert set(apart) <= slow and set(apart.values()) <= {Outcome.TIMEOUT}, apart
    body = "    pass\n" if name == "humaneval" else "pass\n"
    empty = grader.grade(golds=golds, responses=[body] * total, truncated=[False] * total)
    assert not [p.id for p, g in zip(problems, empty, strict=True) if g.outcome is Outcome.CORRECT]
    nothing = grader.grade(golds=golds, responses=[""] * total, truncated=[False] * total)
    assert {g.outcome for g in nothing} == {Outcome.NO_ANSWER}
