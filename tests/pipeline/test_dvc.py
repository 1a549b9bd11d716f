"""dvc.yaml and the runner agree, and what a stage depends on is what its code uses."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from pipeline_project import ROOT, write_notebook
from ruamel.yaml import YAML

from tepo_core.commands.profiles import load_profile
from tepo_core.config import Study
from tepo_core.pipeline.dependencies import code_hashes, imported_modules, module_file
from tepo_core.pipeline.normalise import write_build
from tepo_core.pipeline.notebooks import NotebookNode, read_notebook
from tepo_core.pipeline.stages import AXES, PARAMETERS, REPORT_PARTS, Run, all_runs
from tepo_core.runs.folder import run_folder

STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
# Groups that the modules of a stage mention without letting them decide its results, and why that is so.
HANDED_ON = {
    "warmup": {"data": "arrives as files; named in the checkpoint's key"},
    "train": {"data": "arrives as files", "warmup": "arrives as the base policy"},
    "evaluate": {
        "data": "arrives as files",
        "warmup": "worked solutions arrive as files",
        "train": "arrives as the policy; its temperature only sets up vLLM",
    },
    "evaluate_base": {
        "data": "arrives as files",
        "warmup": "arrives as the policy",
        "train": "its temperature only sets up vLLM",
    },
}


@cache
def notebook(stage: str) -> NotebookNode:
    return read_notebook(ROOT / "notebooks" / f"{stage}.ipynb")


@pytest.mark.parametrize("stage", list(AXES))
def test_parameter_groups_that_the_code_reads_are_listed(stage: str) -> None:
    groups = set(Study.model_fields) - {"variants"}
    used: set[str] = set()
    for module in imported_modules(ROOT, notebook(stage), stage):
        text = module_file(ROOT, module).read_text(encoding="utf-8")
        used |= {group for group in re.findall(r"\bstudy\.([a-z_]+)", text) if group in groups}
    if stage not in ("analyse", "report"):  # an axis: the matrix hands it in
        used -= {"tasks", "seeds", "methods"} if AXES[stage] else {"methods"}
    used -= set(HANDED_ON.get(stage, ()))
    assert used <= set(PARAMETERS[stage]), f"PARAMETERS of {stage} misses {sorted(used - set(PARAMETERS[stage]))}"
    assert "profile" in PARAMETERS[stage], "every artifact carries the profile's name"


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
    deps = [filled(dep) for dep in STAGES[stage]["deps"]]
    for needed in run.inputs():
        assert any(needed.as_posix() == dep or needed.as_posix().startswith(dep + "/") for dep in deps), needed
    standing = [f"build/code/{stage}.json", f"build/notebooks/{stage}.ipynb", f"build/parameters/{stage}.json"]
    assert set(standing) <= set(deps)
    assert ("build/methods/grpo.json" in deps) == (stage == "train")


def test_the_code_of_each_stage() -> None:
    code = {stage: set(code_hashes(ROOT, notebook(stage), stage)) for stage in AXES}
    assert {"tepo_core/training/trainer.py", "tepo_core/objectives/method.py", "tepo_core/rollout/vllm_worker.py"} <= code[
        "train"
    ]
    assert "tepo_core/training/warmup.py" in code["warmup"] and "tepo_core/training/trainer.py" not in code["warmup"]
    for stage in ("prepare", "warmup", "train", "evaluate", "evaluate_base"):
        assert not any(name.startswith(("tepo_core/report", "tepo_core/analysis")) for name in code[stage]), stage
    assert any(name.endswith((".html", ".j2", ".css")) for name in code["report"]), "templates decide the report, too"
    for names in code.values():
        assert not any("pipeline" in name or "__pycache__" in name or name == "tepo_core/config.py" for name in names)


def test_imports_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "tepo_core"
    for name, text in {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tepo_core import typed\n"
                "def f():\n    from tepo_core.sub import lazy\n",
        "sub/__init__.py": "",
        "sub/lazy.py": "PAGE = 'page.html'\nfrom . import sibling\nfrom .sibling import x\nfrom ..b import y\n",
        "sub/sibling.py": "x = 1\n",
        "sub/started_as_a_script.py": "",
        "sub/page.html": "<p>",
        "sub/__pycache__/lazy.pyc": "",
        "b.py": "import tepo_core.c\ny = 1\n",
        "c.py": "import json\nfrom tepo_core.config import Study\n",
        "typed.py": "",
        "other.py": "",
        "config.py": "import tepo_core.other\n",
    }.items():  # fmt: skip
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    write_notebook(tmp_path / "n.ipynb", "from tepo_core.a import f")
    hashes = code_hashes(tmp_path, read_notebook(tmp_path / "n.ipynb"))
    sub = ["__init__.py", "lazy.py", "page.html", "sibling.py"]  # not a script that nothing names
    assert list(hashes) == [
        "tepo_core/a.py",
        "tepo_core/b.py",
        "tepo_core/c.py",
        *(f"tepo_core/sub/{name}" for name in sub),
    ]
    before = hashes.copy()
    (package / "sub" / "page.html").write_text("<p>new")
    after = code_hashes(tmp_path, read_notebook(tmp_path / "n.ipynb"))
    assert [name for name in after if after[name] != before[name]] == ["tepo_core/sub/page.html"]


def test_build_holds_resolved_methods_and_parameters(tmp_path: Path) -> None:
    for name in ("notebooks", "tepo_core"):
        (tmp_path / name).symlink_to(ROOT / name)
    study = load_profile(ROOT, "smoke")
    wide = {"preset": "grpo", "clip": [0.2, 0.4], "train": {"lr": 2e-5}}
    write_build(tmp_path, study.model_copy(update={"methods": ["grpo", "wide"], "variants": {"wide": wide}}))
    methods = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "build" / "methods").iterdir()}
    assert set(methods) == {"grpo", "wide"}
    assert methods["wide"]["preset"] == "grpo" and methods["wide"]["train"]["lr"] == 2e-5
    assert methods["wide"]["objective"]["clip"] == [0.2, 0.4] and methods["grpo"]["train"]["lr"] == study.train.lr
    first = {path: path.read_bytes() for path in (tmp_path / "build").rglob("*.json")}
    write_build(tmp_path, study.model_copy(update={"methods": ["grpo", "wide"], "variants": {"wide": wide}}))
    assert first == {path: path.read_bytes() for path in (tmp_path / "build").rglob("*.json")}
    # another learning rate: the methods that do not set their own, the analysis that reads it, the report that shows it
    changed = study.train.model_copy(update={"lr": 1e-5})
    write_build(tmp_path, study.model_copy(update={"methods": ["grpo", "wide"], "variants": {"wide": wide}, "train": changed}))
    stale = [path.relative_to(tmp_path / "build").as_posix() for path, content in first.items() if path.read_bytes() != content]
    assert sorted(stale) == ["methods/grpo.json", "parameters/analyse.json", "parameters/report.json", "params.json"]


def test_folders_are_those_of_the_run_record() -> None:
    for run in (Run("warmup", "facts", seed=1), Run("train", "facts", "grpo", 1), Run("evaluate", "facts", "grpo", 1)):
        assert Path("/r") / run.folder == run_folder(Path("/r"), run.stage, run.task, run.seed, run.method)
    assert Path("/r") / Run("evaluate_base", "facts", seed=1).folder == run_folder(Path("/r"), "evaluate", "facts", 1, "base")


def test_all_runs_of_a_study() -> None:
    study = load_profile(ROOT, "smoke")
    labels = [run.label for run in all_runs(study)]
    assert labels == [
        "prepare", "warmup facts-s0", "train facts-grpo-s0", "train facts-tepo_kl-s0", "evaluate facts-grpo-s0",
        "evaluate facts-tepo_kl-s0", "evaluate_base facts-base-s0", "analyse", "report",
    ]  # fmt: skip
