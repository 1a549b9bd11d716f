"""What docstrings, comments and pages refer to exists: modules, functions, files, sections and the names of tests."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
CODE = sorted(p for folder in ("tepo_core", "bench", "tests") for p in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "REPRODUCIBILITY.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "dvc.yaml", ROOT / "Makefile",
         ROOT / "params.yaml", ROOT / "claims.yaml", *sorted((ROOT / "profiles").glob("*.yaml"))]  # fmt: skip
ROLE = re.compile(r":(mod|func|class|data|meth|attr|exc|obj|const):`~?([^`]+)`")
# A path of the project: a known first folder, or a file of the top that has an ending of ours.
FOLDERS = ("tepo_core", "docs", "tests", "notebooks", "profiles", "bench", "requirements", "records", "bin", ".ci", ".dvc")
FILE = re.compile(rf"(?<![\w/.~-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*\w|data/(?:published|verl)[\w.]*\w)")
SCRIPTS = ("tepo_core.grading.jail",)  # started, never imported
MADE_LATER = (".dvc/cache", "requirements/lock.txt.bak")
MODULE = re.compile(r"\b(tepo_core(?:\.[A-Za-z_]\w*)+)")
PAGE = re.compile(r"(?<![\w/.-])([A-Z][A-Z_]+\.md)\b")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and other strings of several words, and comments, with their lines; pages as a whole."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), start=1)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def load(name: str) -> object:
    """A module; of a script without a guard, or one that wants a package which is not installed, the names it binds at its top."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    try:
        if name not in SCRIPTS:
            return importlib.import_module(name)
    except ImportError:
        if not path.is_file():
            raise
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= {node.name} if hasattr(node, "name") else set()
        names |= {alias.asname or alias.name for alias in getattr(node, "names", [])}
        names |= {target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)}
    return SimpleNamespace(**dict.fromkeys(names))


def resolves(target: str, module: str) -> bool:
    """A name from the module it stands in, or a dotted one from the top; a name in a class of the module, too."""
    target = target.removesuffix("()")
    inside = load(module)
    holders = [inside, *(value for value in vars(inside).values() if isinstance(value, type) and value.__module__ == module)]
    parts = target.split(".")
    if any(_walk(holder, parts) for holder in holders):
        return True
    for count in range(len(parts), 0, -1):
        try:
            found = load(".".join(parts[:count]))
        except ImportError:
            continue
        return _walk(found, parts[count:])
    builtin = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
    return target in builtin


def _walk(value: object, parts: list[str]) -> bool:
    for part in parts:
        fields = {**getattr(value, "__annotations__", {}), **getattr(value, "model_fields", {})}
        if not hasattr(value, part) and part not in fields:
            return False
        value = getattr(value, part, object)
    return True


def dead_roles(path: Path) -> list[str]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = [(line, match[2]) for line, text in texts(path) for match in ROLE.finditer(text)]
    return [f"{path.relative_to(ROOT)}:{line}: {target}" for line, target in found if not resolves(target, module)]


def dead_paths(path: Path) -> list[str]:
    found = [(line, name) for line, text in texts(path) for name in FILE.findall(text) + PAGE.findall(text)]
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in found if not there(name)]


def there(name: str) -> bool:
    name = name.rstrip("./")
    if name.startswith(MADE_LATER) or "NAME" in name:
        return True
    if "*" in name:
        return any(ROOT.glob(name))
    return (
        (ROOT / name).exists() or (ROOT / f"{name}.py").exists() or (name.endswith(".md") and (ROOT / "docs" / name).exists())
    )


def dead_modules(path: Path) -> list[str]:
    found = [(line, name) for line, text in texts(path) for name in MODULE.findall(text)]
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in found if not resolves(name, "tepo_core.config")]


def test_names_in_docstrings_exist() -> None:
    assert [fault for path in CODE if path.is_relative_to(ROOT / "tepo_core") for fault in dead_roles(path)] == []


@pytest.mark.parametrize("where", ["code", "pages"])
def test_files_that_are_named_exist(where: str) -> None:
    assert [fault for path in (CODE if where == "code" else PAGES) for fault in dead_paths(path)] == []


def test_modules_that_are_named_exist() -> None:
    assert [fault for path in [*CODE, *PAGES] for fault in dead_modules(path)] == []


def test_links_of_pages_lead_somewhere() -> None:
    faults = []
    for page in (p for p in PAGES if p.suffix == ".md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", text):
            if target and "://" not in target and not (page.parent / target).exists():
                faults.append(f"{page.name}: {target}")
        for anchor in re.findall(r"\]\(#([^)]+)\)", text):
            headings = [
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            ]
            if anchor not in headings:
                faults.append(f"{page.name}: #{anchor}")
    assert faults == []


def test_dead_references_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolves("find_root", "tepo_core.config") and resolves("Study.train_for", "tepo_core.config")
    assert resolves("tepo_core.config.Study.seeds", "tepo_core.files") and resolves("train_for", "tepo_core.config")
    assert not resolves("snapshot", "tepo_core.config") and not resolves("tepo_core.run", "tepo_core.config")
    assert not resolves("tepo_core.config.nothing", "tepo_core.files") and not resolves("Study.nothing", "tepo_core.config")
    text = '"""See :func:`nothing`, docs/nothing.md and tepo_core.nowhere."""\n# as in tests/nowhere.py\n'
    path = ROOT / "tepo_core" / "config.py"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert dead_roles(path) == ["tepo_core/config.py:1: nothing"] and dead_modules(path) == [
        "tepo_core/config.py:1: tepo_core.nowhere"
    ]
    assert dead_paths(path) == ["tepo_core/config.py:1: docs/nothing.md", "tepo_core/config.py:2: tests/nowhere.py"]
