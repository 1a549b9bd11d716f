"""Which files decide a stage's numbers: the modules that its notebook imports, the scripts they start, the files they read.

A module counts as its own file, never as its folder. Followed are imports anywhere in a module, inside functions too, and names in
its strings: of a file or a folder of files beside it (a template, a script that another process runs), of a module of the project.
Left out is what cannot change a number of the stage: see :data:`PLUMBING`, :data:`SHOWN`, :func:`unused` and, for training,
the methods that the run does not use. ``tepo plan --why STAGE`` shows what changed."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from tepo_core.config import Study

# They only hand values on; every value is itself a parameter that the stage depends on.
PLUMBING = ("tepo_core.config", "tepo_core.progress", "tepo_core.pipeline", "tepo_core.integrations", "tepo_core.commands")
# Pictures of one run, drawn in its notebook after the work: a new look trains nothing again.
SHOWN, SHOWING = "tepo_core.analysis", ("prepare", "warmup", "train", "evaluate", "evaluate_base")
METHODS = "tepo_core.objectives.methods"
"""The package of methods. It imports every file of its folder; a training run depends on the files of its own method
(build/methods/NAME.json), the report on all of them."""
OWN_METHOD = ("train",)


def code_hashes(root: Path, notebook: NotebookNode, stage: str = "", leave_out: Collection[str] = ()) -> dict[str, str]:
    """File -> SHA-256 of what a notebook runs, as a stage of that name. ``leave_out``: modules not to be followed."""
    return _hashes(root, imported_modules(root, notebook, stage, leave_out))


def module_hashes(root: Path, modules: Iterable[str]) -> dict[str, str]:
    """File -> SHA-256 of some modules and all that they run."""
    return _hashes(root, _closure(root, modules, PLUMBING))


def methods_in(root: Path) -> set[str]:
    """Every module of the package of methods."""
    folder = root.joinpath(*METHODS.split("."))
    return {f"{METHODS}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"}


def unused(study: Study) -> set[str]:
    """Modules that a study's parameters rule out: engines it does not sample with, graders that none of its tasks needs."""
    from tepo_core.tasks.data import grader_kind

    engines = {"transformers": "tepo_core.rollout.transformers_engine", "vllm": "tepo_core.rollout.vllm_engine"}
    graders = {"math": "tepo_core.grading.math_grader", "code": "tepo_core.grading.code_grader"}
    kinds = {grader_kind(name) for name in [*study.tasks, *study.data.eval_sets]}
    return {module for name, module in engines.items() if name != study.rollout.engine} | {
        module for name, module in graders.items() if name not in kinds
    }


def imported_modules(root: Path, notebook: NotebookNode, stage: str = "", leave_out: Collection[str] = ()) -> set[str]:
    """Modules of the project that decide what a notebook computes, as a stage of that name."""
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    skipped = (*PLUMBING, *leave_out, *([SHOWN] if stage in SHOWING else []))
    modules = _closure(root, imports_of(root, source), skipped)
    every_method = METHODS in modules and stage not in OWN_METHOD
    return _closure(root, modules | methods_in(root), skipped) if every_method else modules


def module_file(root: Path, name: str) -> Path | None:
    """The file of a module, or None when the project has no such module."""
    base = root.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _closure(root: Path, start: Iterable[str], leave_out: Collection[str]) -> set[str]:
    todo, seen = set(start), set()
    while todo:
        name = todo.pop()
        if name in seen or any(name == left or name.startswith(f"{left}.") for left in leave_out):
            continue
        seen.add(name)
        path = module_file(root, name)
        package = name if path.name == "__init__.py" else name.rsplit(".", 1)[0]
        todo |= {name.rsplit(".", 1)[0]} - {"tepo_core"}  # importing a module runs its package
        todo |= imports_of(root, path.read_text(encoding="utf-8"), package)
        todo |= {script_module(root, file) for file in read_by(root, name) if file.suffix == ".py"}
    return seen


def _hashes(root: Path, modules: Iterable[str]) -> dict[str, str]:
    files = {file for name in modules for file in (module_file(root, name), *read_by(root, name))}
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def script_module(root: Path, path: Path) -> str:
    """The module name of a file of the project."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def read_by(root: Path, name: str) -> list[Path]:
    """Files that a module names in a string: files beside it, and everything in folders beside it that are no packages."""
    path = module_file(root, name)
    found: set[Path] = set()
    for text in _strings(path.read_text(encoding="utf-8")):
        beside = path.parent / text
        if beside.is_file() and beside != path:
            found.add(beside)
        elif beside.is_dir() and beside != path.parent and not any(beside.rglob("*.py")):
            found |= {file for file in beside.rglob("*") if file.is_file() and not file.name.startswith(".")}
    return sorted(found)


@cache
def _strings(source: str) -> frozenset[str]:
    """Strings of a module that could be the name of a file: one part, no spaces."""
    values = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return frozenset(
        v for v in values if isinstance(v, str) and 0 < len(v) < 80 and not set(v) & set(" /\\\n\0") and v.strip(".")
    )


@cache
def imports_of(root: Path, source: str, package: str = "tepo_core") -> frozenset[str]:
    """Modules of the project that code imports, also inside functions, or names in a string (to start them); not those that
    it imports for type checking alone."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
                base = f"{parent}.{node.module}" if node.module else parent
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tepo_core."):
            found.add(node.value)
    return frozenset(name for name in found if name.startswith("tepo_core.") and module_file(root, name))
