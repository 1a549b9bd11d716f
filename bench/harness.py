"""What the benchmarks share: contenders in processes of their own, alternating repetitions, peak memory, a table of ratios.

Each contender runs in the environment that has it and does one repetition when told to. Repetitions alternate, so that
whatever else the machine does falls on all of them; numbers are medians with quartiles."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the code beside this file is measured, whatever else is installed


def python_of(environment: str) -> str:
    """Interpreter of ``.venv-NAME`` ('' is this one). Exits with the command that builds it when it is missing."""
    if not environment:
        return sys.executable
    path = ROOT / f".venv-{environment}" / "bin" / "python"
    if not path.exists():
        script = "tests/vllm/run.sh" if environment == "vllm" else f"tests/peers/run.sh {environment}"
        sys.exit(f"{path.relative_to(ROOT)} is missing: run {script} once")
    return str(path)


class Contender:
    """A worker process of the same script, started with ``--worker NAME``."""

    def __init__(self, script: str, name: str, environment: str, arguments: list[str], threads: int) -> None:
        self.name, self.results = name, []
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            "WANDB_MODE": "disabled",
        }
        self.process = subprocess.Popen(
            [python_of(environment), script, "--worker", name, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=env,
            cwd=ROOT,
        )
        self.about = self._read()

    def _read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"{self.name}: its process ended; see the messages above")

    def run(self, **request: Any) -> dict:
        """One repetition."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        result = self._read()
        self.results.append(result)
        return result

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve(about: dict, repetition: Callable[..., dict]) -> None:
    """The worker's side: announce, then one repetition for each request."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(repetition(**json.loads(line))), flush=True)


def alternate(contenders: list[Contender], repetitions: int, warm: int = 1, **request: Any) -> None:
    """``warm`` + ``repetitions`` rounds; the warm ones are dropped. The order turns round each time."""
    for turn in range(warm + repetitions):
        for contender in contenders if turn % 2 == 0 else contenders[::-1]:
            contender.run(**request)
    for contender in contenders:
        del contender.results[:warm]


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds, and peak memory above what was held before, in MiB (resident on the CPU)."""
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # resets the high-water mark
    before = memory("VmRSS")
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "extra_mib": memory("VmHWM") - before, "peak_mib": memory("VmHWM")}


def memory(name: str) -> float:
    """VmRSS or VmHWM of this process, MiB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """Median [quartiles]."""
    if len(values) < 3:
        return f"{median(values):.3g}"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{median(values):.3g} [{low:.3g}, {high:.3g}]"


def machine() -> str:
    """Processor, cores of this process, memory."""
    model = platform.processor()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {total:.0f} GiB; load average at the end {load:.1f}"


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(str(c).ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)
