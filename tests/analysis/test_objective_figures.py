"""The notebook of the objectives: thin, without outputs, and every cell runs; its picture shows what the equations say."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest
import torch

from tepo_core.analysis.figures.objectives import gradient_weight, invariance_errors, method_table
from tepo_core.objectives.methods import PRESETS, resolve

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "notebooks/objectives.ipynb").read_text())
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_thin_and_stores_no_output():
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    functions = [node for cell in CELLS for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.FunctionDef)]
    assert all(node.end_lineno - node.lineno < 10 for node in functions)


def test_every_cell_runs(monkeypatch):
    shown = []
    monkeypatch.setattr("tepo_core.analysis.figures.canvas.show", lambda figure, alt: shown.append(figure))
    monkeypatch.chdir(ROOT / "notebooks")  # where JupyterLab starts it
    names: dict = {}
    for cell in CELLS:
        exec(compile(cell, "objectives.ipynb", "exec"), names)
    assert len(shown) == 2 and len(shown[0].axes) >= len(PRESETS) and len(shown[1].axes) == 4


def test_the_table_shows_ours_exact_and_verls_geometric_mean_growing(monkeypatch):
    from tepo_core.analysis.figures.objectives import invariance_table

    monkeypatch.chdir(ROOT)
    table = invariance_table(["gmpo", "tepo"])
    assert table.loc["gmpo", ("ours", 1)] == "0" and float(table.loc["gmpo", ("verl 0.9.1", 1)]) == pytest.approx(31, rel=0.01)
    assert table.loc["tepo", ("verl 0.9.1", 1)] == ""
    assert max(invariance_errors("sapo", sizes=(1,)).values()) <= 1e-5


def test_gradient_weights():
    """On-policy every method pushes with weight 1; GRPO drops the token beyond its clip, TEPO does not when it moves alone."""
    d = torch.tensor([0.0, 0.5], dtype=torch.float64)

    def at(name, whole, variants=None, advantage=1.0):
        return gradient_weight(resolve(name, variants), d, advantage, whole=whole).tolist()

    for name in PRESETS:
        if name != "kl_cov" and PRESETS[name].status != "own":
            assert at(name, True)[0] == pytest.approx(1.0), name
    assert at("grpo", False) == pytest.approx([1.0, 0.0])
    assert at("grpo", True, advantage=-1.0) == pytest.approx([1.0, math.exp(0.5)])
    assert at("tepo", False) == pytest.approx([1.0, math.exp(0.5 / 21)])
    assert at("tepo", True) == pytest.approx([1.0, 0.0])
    # five windows hold the moved token, each with exp(d / 5)
    assert at("mpo", False) == pytest.approx([1.0, math.exp(0.1)])
    heads = {"m": {"preset": "mpo", "block": {"logprobs": "mtp"}}}
    assert at("m", False, heads)[0] == pytest.approx(1 / 5)  # the token's own log-prob; the heads carry the other four
    # TEPO's penalty, r k3 = 1 - r + r d: beta r d
    assert at("tepo_kl", False)[1] == pytest.approx(math.exp(0.5 / 21) - 0.1 * math.exp(0.5) * 0.5)


def test_method_table_names_every_preset_and_its_standing():
    table = method_table()
    assert list(table.index) == list(PRESETS)
    assert set(table["status"]) <= {"known", "reconstructed", "own"}
    assert table.loc["tepo_kl", "penalty"] == "0.1 x k3 to old, tepo" and table.loc["clip_cov", "clip"] == "none / 1"
