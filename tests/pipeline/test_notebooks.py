"""Notebooks are thin, clean, and run by hand as they do in the pipeline."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_project import ROOT, environment, make_project, make_tiny

from tepo_core.pipeline.notebooks import declared_parameters, nbformat, normalise, read_notebook, to_text
from tepo_core.pipeline.stages import AXES

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [path.stem for path in PATHS]


def code_of(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def long_functions(source: str, limit: int = 10) -> list[str]:
    plain = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
    nodes = [n for n in ast.walk(ast.parse(plain)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return [n.name for n in nodes if n.end_lineno - n.lineno + 1 > limit]


def test_a_notebook_for_every_stage() -> None:
    assert {*AXES, "00_overview", "explore", "one_step"} <= set(NAMES)


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_thin_clean_and_with_the_right_parameters(path: Path) -> None:
    notebook = read_notebook(path)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"{path.name} holds outputs; clear them before you commit"
    for source in code_of(notebook):
        assert long_functions(source) == [], f"{path.name}: functions belong into tepo_core"
        assert len(source.splitlines()) <= 25, f"{path.name}: long cells belong into tepo_core"
    assert path.read_text(encoding="utf-8") == to_text(normalise(notebook)), f"{path.name} is not normalised"
    if path.stem in AXES:
        assert list(declared_parameters(notebook, path.name)) == [*AXES[path.stem], "out"]


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_pictures_are_shown_and_not_left_to_a_shell(path: Path) -> None:
    """A figure that waits for the inline backend's hook appears or not by how the kernel was started."""
    for source in code_of(read_notebook(path)):
        assert "pyplot" not in source and not re.search(r";\s*$", source, re.MULTILINE), (
            f"{path.name}: end the cell with show(figure)"
        )
        drawn = len(re.findall(r"\w+_figure\(", source))
        assert source.count("show(") == drawn, f"{path.name}: {drawn} figures are made in a cell"


def test_the_overview_links_every_stage_and_the_places_to_look() -> None:
    text = (ROOT / "notebooks" / "00_overview.ipynb").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+)\.ipynb\)", text)) == {*AXES, "explore", "one_step"}


def test_long_functions_are_found() -> None:
    body = "\n".join("    x = 1" for _ in range(10))
    assert long_functions(f"def f():\n{body}") == ["f"]
    assert long_functions(f"%matplotlib inline\ndef f():\n{body[:-10]}") == []
    assert long_functions(f"class C:\n{body}") == ["C"]


def test_normalising_undoes_jupyterlab_and_is_idempotent() -> None:
    notebook = read_notebook(ROOT / "notebooks" / "train.ipynb")
    clean = to_text(normalise(notebook))
    used = nbformat.reads(clean, as_version=4)
    for number, cell in enumerate(used.cells):
        cell.id = f"random{number}"
        cell.metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
        cell.source += "\n"
        if cell.cell_type == "code":
            cell.execution_count, cell.outputs = number, [nbformat.v4.new_output("stream", text="x")]
    used.cells.append(nbformat.v4.new_code_cell(""))
    used.metadata.kernelspec.display_name = "Python 3 (ipykernel)"
    used.metadata.language_info["version"] = "3.13.0"
    assert to_text(normalise(used)) == clean
    assert to_text(normalise(nbformat.reads(clean, as_version=4))) == clean
    used.cells[2].source += "x = 1"
    assert to_text(normalise(used)) != clean


DRIVER = """
import sys
sys.path.insert(0, "..")
from pathlib import Path
from tepo_core.pipeline.notebooks import read_notebook
for name in sys.argv[1:]:
    scope = {"__name__": "__main__"}
    for number, cell in enumerate(read_notebook(Path(f"{name}.ipynb")).cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{name} cell {number + 1}", "exec"), scope)
    print("ran", name, flush=True)
"""


def test_by_hand_from_their_own_folder_without_dvc(tmp_path: Path) -> None:
    """Every notebook from top to bottom as JupyterLab would run it: cwd is notebooks/, no parameter is given."""
    project = make_project(tmp_path / "project")
    make_tiny(project)
    (project / "claims.yaml").symlink_to(ROOT / "claims.yaml")
    (project / "notebooks").symlink_to(ROOT / "notebooks")
    names = ["prepare", "warmup", "train", "evaluate", "evaluate_base", "analyse", "report", "explore", "00_overview"]
    here = project / "here"  # a real folder, since notebooks/ is a link whose parent is elsewhere
    here.mkdir()
    for name in names:
        (here / f"{name}.ipynb").write_bytes((ROOT / "notebooks" / f"{name}.ipynb").read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, *names],
        cwd=here,
        env=environment(MPLBACKEND="Agg", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ran ")] == names
    assert (project / "runs" / "train" / "facts-grpo-s0" / "done.json").is_file()
    assert (project / "reports" / "index.html").is_file()
