"""The plan of the house: every module in a room, imports that only go down, no circle, one place for pictures."""

from __future__ import annotations

import ast
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tepo_core"
GROUND = ("config", "seeding", "files", "progress", "machine")
# From the ground up: a room may import the ground, itself, and rooms that stand before it. docs/architecture.md draws this.
PLAN = (
    "exact", "runs", "grading", "tasks", "environments", "model", "rollout", "objectives", "credit", "training", "evaluation",
    "integrations", "analysis", "report", "pipeline", "commands",
)  # fmt: skip
MOST_LINES, LONGEST_FUNCTION = 400, 60


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, known: set[str]) -> set[str]:
    """Modules of the package that a file imports anywhere, inside functions too, but not for type checking alone."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they lead"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name for name in found if name in known} - {module_name(path)}


def room(module: str) -> str:
    """The room of a module; the ground for modules at the top of the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (PACKAGE / parts[-1]).is_dir() else "ground"


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_name(path): path for path in FILES}
ARROWS = {(a, b) for a, path in MODULES.items() for b in imports(path, set(MODULES))}


def upward(arrows: set[tuple[str, str]]) -> list[str]:
    floor = {name: height for height, name in enumerate(("ground", *PLAN))}
    return sorted(f"{a} imports {b}" for a, b in arrows if floor[room(b)] > floor[room(a)])


def circles(arrows: set[tuple[str, str]]) -> list[list[str]]:
    return [sorted(part) for part in networkx.strongly_connected_components(networkx.DiGraph(arrows)) if len(part) > 1]


def test_only_the_ground_lies_at_the_top():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", *GROUND}
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"} <= set(PLAN)


def test_imports_go_down_and_never_in_a_circle():
    assert upward(ARROWS) == []
    assert circles(ARROWS) == []


def test_the_test_sees_an_upward_import_and_a_circle():
    wrong = ("tepo_core.runs.folder", "tepo_core.analysis.book")
    assert upward({*ARROWS, wrong}) == ["tepo_core.runs.folder imports tepo_core.analysis.book"]
    assert any({"tepo_core.runs.folder", "tepo_core.analysis.book"} <= set(part) for part in circles({*ARROWS, wrong}))


def test_pictures_are_drawn_in_one_place():
    users = {
        path.relative_to(PACKAGE).parts[:2]
        for path in FILES
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.lstrip().startswith(("import matplotlib", "from matplotlib", "import seaborn"))
    }
    assert users == {("analysis", "figures")}


@pytest.mark.parametrize("folder", ["tepo_core", "tests", "bench"])
def test_files_are_short(folder):
    long = {p.name: n for p in (ROOT / folder).rglob("*.py") if (n := len(p.read_text("utf-8").splitlines())) > MOST_LINES}
    assert long == {}


def test_functions_are_short():
    long = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION:
                long[f"{module}.{node.name}"] = node.end_lineno - node.lineno + 1
    assert long == {}
