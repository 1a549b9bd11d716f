"""What makes a stage stale: a table of files of every room, and what a line added to each runs again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pipeline_project import ROOT, write_notebook

from tepo_core.commands.why import compare, describe
from tepo_core.config import load_study
from tepo_core.pipeline.dependencies import code_hashes, unused
from tepo_core.pipeline.normalise import write_build
from tepo_core.pipeline.notebooks import read_notebook
from tepo_core.pipeline.stages import AXES

METHODS = ["grpo", "dapo", "kl_cov", "tepo", "tepo_kl", "mpo"]
TRAINED = {f"train {name}" for name in METHODS}
EVALUATED = {"evaluate", "evaluate_base"}
SEEN = {"analyse", "report"}
TABLE = {
    # pictures, the report, published numbers, and what only hands values on: nothing is trained
    "analysis/figures/objectives.py": set(),
    "analysis/figures/single.py": set(),
    "analysis/figures/outcome.py": SEEN,
    "analysis/statistics.py": SEEN,
    "analysis/claims.py": SEEN,
    "report/published.py": {"report"},
    "report/templates/report.html.j2": {"report"},
    "report/assets/report.css": {"report"},
    "commands/cli.py": set(),
    "pipeline/runner.py": set(),
    "integrations/verl.py": set(),
    "objectives/invariance.py": set(),
    # one method: its own runs, and the report that shows its equation
    "objectives/methods/mpo.py": {"train mpo", "report"},
    "objectives/methods/tepo.py": {"train tepo", "train tepo_kl", "report"},
    "objectives/methods/covariance.py": {"train kl_cov", "report"},
    # what all methods share
    "objectives/penalties.py": TRAINED | {"report"},
    "credit/group.py": TRAINED,
    "training/update.py": TRAINED,
    # what the stages share, as far as each uses it
    "training/warmup.py": {"warmup"},
    "model/logprobs.py": {"warmup", "train", "evaluate"},
    "rollout/transformers_engine.py": TRAINED | EVALUATED,
    "rollout/vllm_engine.py": set(),  # this study samples with transformers
    "grading/exact.py": {"prepare"} | TRAINED | EVALUATED,
    "grading/math_grader.py": set(),  # no task of this study needs it
    "tasks/contamination.py": {"prepare"},
    "evaluation/passk.py": EVALUATED | SEEN,
    "runs/metrics.py": {"warmup"} | TRAINED | SEEN,
    "seeding.py": {"prepare", "warmup"} | TRAINED | EVALUATED | SEEN,
}
TABLE["model/logprobs.py"] = {"warmup"} | TRAINED | EVALUATED


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "tepo_core", folder / "tepo_core", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks").symlink_to(ROOT / "notebooks")
    return folder


@pytest.fixture(scope="module")
def study():
    return load_study(ROOT / "params.yaml").model_copy(update={"methods": METHODS})


def state(folder: Path) -> dict[str, bytes]:
    """Stage -> what DVC looks at, a training stage once a method."""
    build = folder / "build"
    code = {stage: (build / "code" / f"{stage}.json").read_bytes() for stage in AXES}
    methods = {f"train {name}": code["train"] + (build / "methods" / f"{name}.json").read_bytes() for name in METHODS}
    return {**{stage: text for stage, text in code.items() if stage != "train"}, **methods}


def test_what_a_line_in_each_file_makes_stale(project: Path, study) -> None:
    write_build(project, study)
    before, found = state(project), {}
    for name in TABLE:
        path = project / "tepo_core" / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n", encoding="utf-8")
        write_build(project, study)
        now = state(project)
        found[name] = {stage for stage in before if now[stage] != before[stage]}
        path.write_text(text, encoding="utf-8")
    assert found == TABLE


def test_a_variant_depends_on_the_ratio_it_uses(project: Path, study) -> None:
    """GRPO with MPO's blocks: a change of MPO trains it again."""
    blocks = {"preset": "grpo", "ratio": "block", "block": {"size": 2}}
    write_build(project, study.model_copy(update={"methods": ["grpo", "grpo_blocks"], "variants": {"grpo_blocks": blocks}}))
    files = {
        name: json.loads((project / "build/methods" / f"{name}.json").read_text())["code"] for name in ("grpo", "grpo_blocks")
    }
    assert (
        "tepo_core/objectives/methods/mpo.py" in files["grpo_blocks"]
        and "tepo_core/objectives/methods/grpo.py" in files["grpo_blocks"]
    )
    assert "tepo_core/objectives/methods/mpo.py" not in files["grpo"]


def test_what_a_study_rules_out_comes_back_with_its_parameters(study) -> None:
    assert unused(study) == {"tepo_core.grading.math_grader", "tepo_core.grading.code_grader", "tepo_core.rollout.vllm_engine"}
    other = study.model_copy(
        update={
            "data": study.data.model_copy(update={"eval_sets": ["math500", "humaneval"]}),
            "rollout": study.rollout.model_copy(update={"engine": "vllm"}),
        }
    )
    assert unused(other) == {"tepo_core.rollout.transformers_engine"}
    files = code_hashes(ROOT, read_notebook(ROOT / "notebooks" / "evaluate.ipynb"), "evaluate", unused(other))
    started = {"grading/zygote.py", "grading/jail.py", "rollout/vllm_worker.py"}  # scripts that other processes run
    assert started <= {name.removeprefix("tepo_core/") for name in files}


def test_files_named_in_strings_are_followed(tmp_path: Path) -> None:
    package = tmp_path / "tepo_core"
    for name, text in {
        "room/a.py": "PAGE = HERE / 'page.html'\nSCRIPT = 'script.py'\nFOLDER = 'templates'\nSTART = '-m', 'tepo_core.room.started'\n",
        "room/__init__.py": "",
        "room/page.html": "<p>",
        "room/script.py": "from tepo_core.room import used_by_script\n",
        "room/used_by_script.py": "",
        "room/started.py": "",
        "room/templates/deep/x.j2": "",
        "room/not_named.html": "",
        "room/sibling/__init__.py": "",  # a package is imported or it is not; its name in a string says nothing
        "room/b.py": "x = 'sibling'\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    write_notebook(tmp_path / "n.ipynb", "from tepo_core.room import a, b")
    files = code_hashes(tmp_path, read_notebook(tmp_path / "n.ipynb"))
    assert {name.removeprefix("tepo_core/room/") for name in files} == {
        "__init__.py", "a.py", "b.py", "page.html", "script.py", "used_by_script.py", "started.py", "templates/deep/x.j2",
    }  # fmt: skip


def test_differences_in_words() -> None:
    before = {"code": {"tepo_core/a.py": "1", "tepo_core/b.py": "2"}, "train": {"lr": 1e-4, "clip": [0.2, 0.2]}}
    now = {"code": {"tepo_core/a.py": "9", "tepo_core/c.py": "3"}, "train": {"lr": 2e-4, "clip": [0.2, 0.2], "epochs": 2}}
    assert {name: describe(name, *pair) for name, pair in compare(before, now).items()} == {
        "tepo_core/a.py": "changed",
        "tepo_core/b.py": "gone",
        "tepo_core/c.py": "new",
        "train.lr": "0.0001 -> 0.0002",
        "train.epochs": "new: 2",
    }
    assert compare(now, now) == {}
