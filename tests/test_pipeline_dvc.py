"""dvc.yaml says what the code does: places, dependencies, parameters."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tepo_core.config import Study, load_study
from tepo_core.pipeline.normalise import read_notebook
from tepo_core.pipeline.stages import AXES, REPORT_PARTS, Run, all_runs
from tepo_core.run_record import run_folder

ROOT = Path(__file__).parents[1]
STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
# They only hand values on; every value is itself a parameter that dvc.yaml names.
PLUMBING = ("tepo_core.config", "tepo_core.progress", "tepo_core.pipeline", "tepo_core.integrations")

# Groups that the modules of a stage mention without letting them decide its results, and why that is so.
HANDED_ON = {
    "warmup": {"data": "arrives as files; named in the checkpoint's key"},
    "train": {"data": "arrives as files", "warmup": "arrives as the base policy"},
    "evaluate": {"data": "arrives as files", "train": "arrives as the policy; its temperature only sets up vLLM"},
    "evaluate_base": {"data": "arrives as files", "train": "its temperature only sets up vLLM"},
}


@cache
def module_file(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


@cache
def imported(source: str, package: str) -> set[str]:
    """Modules of the project that a piece of code imports, also inside functions, but not for type checking alone."""
    found: set[str] = set()
    tree = ast.parse(source)
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            base = f"{parent}.{node.module}" if node.level and node.module else node.module or parent
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("tepo_core.") and module_file(name)}


def closure(source: str) -> set[str]:
    """All modules of the project that run when ``source`` runs, plumbing left out."""
    todo, seen = imported(source, "tepo_core"), set()
    while todo:
        name = todo.pop()
        if name in seen or name.startswith(PLUMBING):
            continue
        seen.add(name)
        path = module_file(name)
        package = name if path.name == "__init__.py" else name.rsplit(".", 1)[0]
        todo |= imported(path.read_text(encoding="utf-8"), package)
    return seen


@cache
def notebook_source(stage: str) -> str:
    notebook = read_notebook(ROOT / "notebooks" / f"{stage}.ipynb")
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def place(module: str) -> str:
    """The dependency that covers a module: its package's folder, or the file of a module at the top."""
    parts = module.split(".")
    path = module_file(module)
    if len(parts) == 2 and path.name != "__init__.py":
        return f"tepo_core/{parts[1]}.py"
    return f"tepo_core/{parts[1]}"


@pytest.mark.parametrize("stage", list(AXES))
def test_code_dependencies_are_the_imports_of_the_notebook(stage: str) -> None:
    wanted = {place(module) for module in closure(notebook_source(stage))}
    listed = {dep for dep in STAGES[stage]["deps"] if dep.startswith("tepo_core/")}
    assert listed == wanted, (
        f"stage {stage} in dvc.yaml: add {sorted(wanted - listed)}, remove {sorted(listed - wanted)}"
    )


@pytest.mark.parametrize("stage", list(AXES))
def test_parameter_groups_that_the_code_reads_are_listed(stage: str) -> None:
    groups = set(Study.model_fields) - {"variants"}
    used: set[str] = set()
    for module in closure(notebook_source(stage)):
        text = module_file(module).read_text(encoding="utf-8")
        used |= {group for group in re.findall(r"\bstudy\.([a-z_]+)", text) if group in groups}
    if stage not in ("analyse", "report"):  # an axis: the matrix hands it in
        used -= {"tasks", "seeds", "methods"} if AXES[stage] else {"methods"}
    listed = set(STAGES[stage]["params"])
    used -= set(HANDED_ON.get(stage, ()))
    assert used <= listed, f"stage {stage} in dvc.yaml: params misses {sorted(used - listed)}"
    assert "profile" in listed


@pytest.mark.parametrize("stage", list(AXES))
def test_outputs_command_and_inputs_agree_with_the_runner(stage: str) -> None:
    values = {"task": "facts", "method": "grpo", "seed": 3}
    run = Run(stage, **{axis: values[axis] for axis in AXES[stage]})

    def filled(text: str) -> str:
        return re.sub(r"\$\{item\.(\w+)\}", lambda match: str(values[match[1]]), text)

    folder = run.folder.as_posix()
    outs = [f"{folder}/{part}" for part in REPORT_PARTS] if stage == "report" else [folder]
    assert [filled(out) for out in STAGES[stage]["outs"]] == outs
    options = "".join(f" --{axis} {values[axis]}" for axis in AXES[stage])
    assert filled(STAGES[stage]["cmd"]) == f"bin/stage {stage}{options}"
    assert set(STAGES[stage].get("matrix", {})) == set(AXES[stage])
    study = load_study(ROOT / "params.yaml").model_copy(update={"tasks": ["facts"], "methods": ["grpo"], "seeds": [3]})
    deps = [filled(dep) for dep in STAGES[stage]["deps"]]
    for needed in run.inputs(study):
        assert any(needed.as_posix() == dep or needed.as_posix().startswith(dep + "/") for dep in deps), needed


def test_folders_are_those_of_the_run_record() -> None:
    for run in (Run("warmup", "facts", seed=1), Run("train", "facts", "grpo", 1), Run("evaluate", "facts", "grpo", 1)):
        assert Path("/r") / run.folder == run_folder(Path("/r"), run.stage, run.task, run.seed, run.method)
    assert Path("/r") / Run("evaluate_base", "facts", seed=1).folder == run_folder(
        Path("/r"), "evaluate", "facts", 1, "base"
    )


def test_all_runs_of_a_study() -> None:
    study = load_study(ROOT / "profiles" / "smoke.yaml")
    labels = [run.label for run in all_runs(study)]
    assert labels == [
        "prepare", "warmup facts-s0", "train facts-grpo-s0", "train facts-tepo_kl-s0", "evaluate facts-grpo-s0",
        "evaluate facts-tepo_kl-s0", "evaluate_base facts-base-s0", "analyse", "report",
    ]  # fmt: skip
