"""Pictures in a stage's notebook: shown as bytes that are always the same, without pyplot and without a shell's hooks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from IPython.display import Image

from tepo_core.analysis.figures.canvas import show
from tepo_core.analysis.figures.objectives import gradient_figure
from tepo_core.analysis.figures.single import pass_at_k_figure, training_figure, warmup_figure
from tepo_core.runs.metrics import metric_line, read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def metrics(tmp_path: Path):
    lines = [metric_line("warmup", step, {"loss": (1.0 / step, 1)}, {}) for step in (1, 2, 3)]
    for step in (1, 2):
        lines.append(metric_line("rollout", step, {"correct": (step, 4), "entropy": (1, step)}, {}))
        lines.append(metric_line("validation", step, {"greedy": (step, 4)}, {}))
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return read_metrics(tmp_path)


SUMMARY = {"splits": {"test": {"pass@k": {"1": 0.2, "4": 0.5}}, "long": {"pass@k": {"1": 0.1, "4": 0.3}}}}


@pytest.mark.parametrize("name", ["warmup", "training", "pass_at_k", "gradient"])
def test_equal_bytes_whatever_the_users_settings(name: str, metrics) -> None:
    draw = {
        "warmup": lambda: warmup_figure(metrics),
        "training": lambda: training_figure(metrics),
        "pass_at_k": lambda: pass_at_k_figure(SUMMARY),
        "gradient": lambda: gradient_figure(["grpo", "tepo"]),
    }[name]
    shown = show(draw(), "words")
    assert (
        isinstance(shown, Image)
        and shown.data.startswith(b"\x89PNG")
        and b"Software" not in shown.data
        and shown.alt == "words"
    )
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 20, "savefig.dpi": 30, "axes.facecolor": "red"}):
        assert show(draw()).data == shown.data


def test_figures_leave_pyplot_and_its_backends_alone() -> None:
    """pyplot in a process that becomes a kernel later decides there, before a shell exists, how pictures appear."""
    code = (
        "import sys, json; from tepo_core.analysis.figures import draw, objectives, single; from tepo_core.pipeline import runner, host\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(('matplotlib.pyplot', 'matplotlib_inline'))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
