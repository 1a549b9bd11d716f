"""What the pipeline costs beyond the work: a stage against its bare function, and a ``dvc repro`` that has nothing to do.

    python bench/pipeline_overhead.py            # in a clone of its own, with the smoke profile; about two minutes

A stage's time is that of its whole process, from the command to the exit: imports, a kernel, the notebook, hashes. Its work
is the same function called in a process that has imported everything. Wanted is a few seconds a stage, and a few for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, machine, median, spread, table, versions

STAGES = {  # arguments of the stage, and its work as a call
    "prepare": ([], "from tepo_core.tasks.prepare import prepare as f; call = lambda: f(study, root)"),
    "warmup": (
        ["--task", "facts", "--seed", "0"],
        "from tepo_core.training.warmup import warmup as f; call = lambda: f(study, 'facts', 0, root)",
    ),
    "evaluate_base": (
        ["--task", "facts", "--seed", "0"],
        "from tepo_core.evaluation.stage import evaluate_run as f; call = lambda: f(study, 'facts', 'base', 0, root)",
    ),
}
WORK = """
import sys, time, pathlib
from tepo_core.config import load_study
study, root = load_study("params.yaml"), pathlib.Path(".")
{imports}
start = time.perf_counter()
call()
print("seconds", time.perf_counter() - start)
"""


def run(folder: Path, *command: str) -> tuple[float, str]:
    """Seconds and output of a command. Exits with its output when it fails."""
    binaries = Path(sys.executable).parent
    environment = os.environ | {"TEPO_PYTHON": sys.executable, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return seconds, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as temporary:
        folder = Path(temporary) / "study"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        python = sys.executable
        run(folder, python, "-m", "tepo_core.commands.cli", "profile", "use", "smoke")
        first, _ = run(folder, python, "-m", "tepo_core.commands.cli", "repro")
        rows = []
        for stage, (arguments, imports) in STAGES.items():
            whole, work = [], []
            for _ in range(options.repetitions):
                whole.append(run(folder, python, "-m", "tepo_core.pipeline.runner", stage, *arguments)[0])
                work.append(float(run(folder, python, "-c", WORK.format(imports=imports))[1].split()[-1]))
            rows.append([stage, spread(whole), spread(work), f"{median(whole) - median(work):.3g}"])
        nothing = {"dvc repro": ("-m", "dvc", "repro"), "tepo repro": ("-m", "tepo_core.commands.cli", "repro")}
        for name, command in nothing.items():
            seconds = []
            for _ in range(options.repetitions):
                elapsed, output = run(folder, python, *command)
                if "Running stage" in output:
                    sys.exit(f"{name} ran a stage where there was nothing to do:\n{output}")
                seconds.append(elapsed)
            rows.append([f"{name}, nothing to do", spread(seconds), "0", f"{median(seconds):.3g}"])
    print(f"smoke profile, {options.repetitions} repetitions; the whole study took {first:.0f} s the first time")
    print(table(["stage", "seconds", "of which work", "beyond the work"], rows))
    print(json.dumps(versions("dvc", "papermill", "ipykernel", "torch")))
    print(machine())


if __name__ == "__main__":
    main()
