"""What the analysis costs as a study grows: synthetic runs of known content, 8 updates a rollout, sizes of a real run.

    python bench/analysis_scale.py                       # 10, 30 and 100 runs of 2,000 updates; about three minutes
    python bench/analysis_scale.py --runs 100 --updates 2000

Runs are made by the tests' factory in a temporary folder. Each size is analysed in a process of its own, so that the peak of
memory is its own. Wanted: 100 runs of 2,000 updates within 60 s and 2 GB.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, machine, table, versions

sys.path.insert(0, str(ROOT / "tests" / "support"))
SEEDS, UPDATES_A_ROLLOUT = 5, 8


def study_of(runs: int, updates: int):
    """A study of ``runs`` runs: methods x 5 seeds, each of ``updates`` updates."""
    from run_factory import make_study

    methods = [f"m{i:02d}" for i in range(max(1, runs // SEEDS))]
    train = {
        "rollouts": updates // UPDATES_A_ROLLOUT,
        "validate_every": 10,
        "minibatches": 4,
        "epochs": 2,
        "prompts_per_rollout": 32,
    }
    return make_study(
        methods=methods,
        variants={m: {"preset": "tepo"} for m in methods},
        seeds=list(range(SEEDS)),
        train=train,
        data={"test_size": 256, "long_size": 256},
        analyse={"bootstrap": 2000},
    )


def make(root: Path, runs: int, updates: int) -> None:
    """Write the runs."""
    from run_factory import Truth, make_runs

    study = study_of(runs, updates)
    make_runs(root, study, {method: Truth(noise=0.02) for method in study.methods})
    shutil.copy(ROOT / "claims.yaml", root)


def measure(root: Path, runs: int, updates: int) -> None:
    """Analyse once and print seconds and the peak of memory, MiB."""
    from tepo_core.analysis.stage import analyse

    start = time.perf_counter()
    analyse(study_of(runs, updates), root)
    print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 30, 100], help="numbers of runs, multiples of 5")
    parser.add_argument("--updates", type=int, default=2000, help="updates a run, a multiple of 8")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.runs[0], options.updates)
        return
    rows = []
    for runs in options.runs:
        with tempfile.TemporaryDirectory(prefix="tepo-bench-") as folder:
            root = Path(folder)
            make(root, runs, options.updates)
            size = sum(p.stat().st_size for p in root.rglob("metrics.jsonl")) / 2**20
            command = [sys.executable, __file__, "--measure", str(root), "--runs", str(runs), "--updates", str(options.updates)]
            seconds, peak = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.split()[-2:]
            rows.append(
                [str(runs), str(options.updates), f"{size:.0f} MiB", f"{float(seconds):.1f} s", f"{float(peak):.0f} MiB"]
            )
    print(table(["runs", "updates each", "metrics", "analysis", "peak memory"], rows))
    print(machine(), versions("numpy", "pandas", "matplotlib"))


if __name__ == "__main__":
    main()
