"""Profiles are complete, commented, valid; using one says what changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pipeline_project import ROOT, make_project

from tepo_core.commands import profiles
from tepo_core.config import ConfigError, Study, load_study
from tepo_core.pipeline.parameters import load_validated

NAMES = profiles.names(ROOT)


def test_the_profiles_that_must_be_there() -> None:
    assert {"smoke", "quick", "full"} <= set(NAMES)
    smoke, quick, full = (load_study(ROOT / "profiles" / f"{name}.yaml") for name in ("smoke", "quick", "full"))
    assert (len(smoke.methods), len(smoke.seeds), smoke.train.rollouts) == (2, 1, 4)
    assert quick.methods == ["grpo", "dapo", "gspo", "kl_cov", "tepo", "tepo_kl", "mpo"] and len(quick.seeds) == 3
    assert set(quick.methods) <= set(full.methods) and len(full.seeds) == 5 and len(full.tasks) == 2


@pytest.mark.parametrize("name", NAMES)
def test_complete_valid_and_named_after_its_file(name: str) -> None:
    study = load_validated(ROOT / "profiles" / f"{name}.yaml")
    assert study.profile == name
    assert profiles.purpose(ROOT / "profiles" / f"{name}.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name: str) -> None:
    """Unit, range or choices, or source: a comment on the line of every parameter."""
    section = ""
    for line in (ROOT / "profiles" / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"([a-z_0-9]+):.*", line):
            section = match[1]
        parameter = re.fullmatch(r"  ([a-z_0-9]+): \S.*", line)
        if parameter and section != "variants":
            assert re.search(r"\s# \S", line), f"profiles/{name}.yaml: {section}.{parameter[1]} has no comment"


def test_params_yaml_is_the_quick_profile() -> None:
    assert (ROOT / "params.yaml").read_bytes() == (ROOT / "profiles" / "quick.yaml").read_bytes()


def test_using_a_profile_says_what_changed_and_keeps_the_old(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", "quick")
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("variants: {}", "variants: {mine: {preset: grpo}}"))
    changes = {str(change) for change in profiles.use(project, "smoke")}
    assert "profile: quick -> smoke" in changes
    assert "train.rollouts: 60 -> 4" in changes
    assert "variants.mine.preset: grpo (removed)" in changes
    assert (project / "params.yaml").read_bytes() == (ROOT / "profiles" / "smoke.yaml").read_bytes()
    assert "mine" in (project / ".tepo" / "params.previous.yaml").read_text()
    assert profiles.use(project, "smoke") == []


def test_a_broken_params_yaml_can_be_replaced(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    (project / "params.yaml").write_text("a: [")
    assert "profile: smoke (new)" in {str(change) for change in profiles.use(project, "smoke")}
    (project / "params.yaml").unlink()
    profiles.use(project, "smoke")
    assert load_study(project / "params.yaml").profile == "smoke"


def test_unknown_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown profile 'smok'.*did you mean 'smoke'.*allowed: .*full.*quick"):
        profiles.use(make_project(tmp_path / "project"), "smok")


def test_every_group_of_the_code_is_in_the_profiles() -> None:
    text = (ROOT / "profiles" / "quick.yaml").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^([a-z_]+):", text) == list(Study.model_fields), (
        "the same order, too, so that both read alike"
    )
