"""Which parts of the code decide a stage's numbers: those that its notebook imports, directly or through others."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

from tepo_core.pipeline.notebooks import NotebookNode

# They only hand values on; every value is itself a parameter that the stage depends on.
PLUMBING = ("tepo_core.config", "tepo_core.progress", "tepo_core.pipeline", "tepo_core.integrations")


def code_hashes(root: Path, notebook: NotebookNode) -> dict[str, str]:
    """File -> SHA-256 of the code that a notebook runs.

    A module at the top of tepo_core counts as its file; a module in a sub-package as the whole sub-package, templates and
    scripts that are started rather than imported included."""
    files: set[Path] = set()
    for module in imported_modules(root, notebook):
        parts = module.split(".")
        folder = root / "tepo_core" / parts[1]
        files |= (
            {path for path in folder.rglob("*") if _counts(path)} if folder.is_dir() else {module_file(root, module)}
        )
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def imported_modules(root: Path, notebook: NotebookNode) -> set[str]:
    """All modules of the project that run when a notebook runs, plumbing left out."""
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    todo, seen = set(_imports(root, source, "tepo_core")), set()
    while todo:
        name = todo.pop()
        if name in seen or name.startswith(PLUMBING):
            continue
        seen.add(name)
        path = module_file(root, name)
        package = name if path.name == "__init__.py" else name.rsplit(".", 1)[0]
        todo |= _imports(root, path.read_text(encoding="utf-8"), package)
    return seen


def module_file(root: Path, name: str) -> Path | None:
    """The file of a module, or None when the project has no such module."""
    base = root.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


@cache
def _imports(root: Path, source: str, package: str) -> frozenset[str]:
    """Modules of the project that code imports, also inside functions, but not for type checking alone."""
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
    return frozenset(name for name in found if name.startswith("tepo_core.") and module_file(root, name))


def _counts(path: Path) -> bool:
    return (
        path.is_file()
        and path.suffix != ".pyc"
        and not any(part.startswith((".", "__pycache__")) for part in path.parts[-3:])
    )
