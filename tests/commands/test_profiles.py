"""A profile states what differs from the complete one; using it writes complete, commented parameters and says what changed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from pipeline_project import ROOT, make_project
from ruamel.yaml import YAML

from tepo_core.commands import profiles
from tepo_core.config import ConfigError, Study, load_study
from tepo_core.objectives.methods import resolve
from tepo_core.pipeline.parameters import load_validated

NAMES = profiles.names(ROOT)


def test_the_profiles_that_must_be_there() -> None:
    assert {"smoke", "quick", "full"} <= set(NAMES)
    smoke, quick, full = (profiles.load_profile(ROOT, name) for name in ("smoke", "quick", "full"))
    assert (len(smoke.methods), len(smoke.seeds), smoke.train.rollouts) == (2, 1, 4)
    assert quick.methods == ["grpo", "dapo", "gspo", "kl_cov", "tepo", "tepo_kl", "mpo"] and len(quick.seeds) == 3
    assert set(quick.methods) <= set(full.methods) and len(full.seeds) == 5 and len(full.tasks) == 2
    assert smoke.train.adam_beta1 == quick.train.adam_beta1 == 0.95, "from quick, not from the defaults of the code"


@pytest.mark.parametrize("name", NAMES)
def test_complete_valid_and_named_after_its_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tepo_core.model.policy.examine", lambda *_: None
    )  # whether this machine has the model is not asked here
    (tmp_path / "params.yaml").write_text(profiles.text_of(ROOT, name), encoding="utf-8")
    study = load_validated(tmp_path / "params.yaml")
    assert study.profile == name
    assert study == profiles.load_profile(ROOT, name) == load_study(ROOT / "profiles" / f"{name}.yaml")
    assert profiles.purpose(ROOT / "profiles" / f"{name}.yaml")
    assert f"the profile '{name}':" in profiles.text_of(ROOT, name).splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name: str) -> None:
    """Unit, range or choices, or source: a comment on the line of every parameter."""
    section = ""
    for line in profiles.text_of(ROOT, name).splitlines():
        if match := re.fullmatch(r"([a-z_0-9]+):.*", line):
            section = match[1]
        parameter = re.fullmatch(r" {2,4}([a-z_0-9]+): \S.*", line)
        if parameter and section != "variants":
            assert re.search(r"\s# \S", line), f"profiles/{name}.yaml: {section}.{parameter[1]} has no comment"


@pytest.mark.parametrize("name", sorted({*NAMES} - {"quick"}))
def test_a_profile_states_what_differs_and_no_comment_twice(name: str) -> None:
    own, quick = ((ROOT / "profiles" / f"{file}.yaml").read_text(encoding="utf-8") for file in (name, "quick"))
    read = YAML(typ="safe").load
    ours, theirs = dict(leaves(read(own))), dict(leaves(read(quick)))
    assert {key for key, value in ours.items() if value == theirs.get(key)} == set(), "as in quick: leave it out"
    explained = [set(re.findall(r"(?m)^ *(\w+): [^#\n]*[^# \n] +# (.+)$", text)) for text in (own, quick)]
    assert explained[0] & explained[1] == set(), "a comment that is quick's: leave it out"


def leaves(values: dict, path: tuple[str, ...] = ()):
    for key, value in values.items():
        if isinstance(value, dict) and key != "variants":
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


@pytest.mark.parametrize("name", NAMES)
def test_params_yaml_is_what_use_quick_writes(tmp_path: Path, name: str) -> None:
    """From every other profile, too: there and back."""
    project = make_project(tmp_path / "project", "quick")
    assert bool(profiles.use(project, name)) == (name != "quick")
    assert (project / "params.yaml").read_text() == profiles.text_of(ROOT, name)
    assert bool(profiles.use(project, "quick")) == (name != "quick")
    assert (project / "params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_shares_of_tokens_act_in_every_profile() -> None:
    """Ten tokens of a mini-batch at least, with responses half as long as they may be; the paper's shares where N is large."""
    for name in NAMES:
        study = load_study(ROOT / "profiles" / f"{name}.yaml")
        for method in study.methods:
            share = getattr(resolve(method, study.variants).settings, "share", None)
            train = study.train_for(method)
            tokens = train.prompts_per_rollout * train.group_size / train.minibatches * train.max_new_tokens / 2
            assert share is None or share * tokens >= 10, (name, method)


def test_using_a_profile_says_what_changed_and_keeps_the_old(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", "quick")
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("variants:\n", "variants:\n  mine: {preset: grpo}\n"))
    changes = [str(change) for change in profiles.use(project, "smoke")]
    assert changes[0] == "profile: quick -> smoke", "in the order of the file"
    assert "train.rollouts: 60 -> 4" in changes
    assert "variants.mine.preset: grpo (removed)" in changes
    assert (project / "params.yaml").read_text() == profiles.text_of(ROOT, "smoke")
    assert "mine" in (project / ".tepo" / "params.previous.yaml").read_text()
    assert profiles.use(project, "smoke") == []


def test_a_broken_params_yaml_can_be_replaced(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    (project / "params.yaml").write_text("a: [")
    assert "profile: smoke (new)" in {str(change) for change in profiles.use(project, "smoke")}
    (project / "params.yaml").unlink()
    profiles.use(project, "smoke")
    assert load_study(project / "params.yaml").profile == "smoke"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A project with profiles of its own, where a user may add one."""
    project = make_project(tmp_path / "project")
    (project / "profiles").unlink()
    shutil.copytree(ROOT / "profiles", project / "profiles")
    return project


def test_a_profile_of_ones_own(own: Path) -> None:
    """Differences, or a whole parameter file as it was written before there was a complete one."""
    (own / "profiles" / "mine.yaml").write_text(
        "# It is the profile 'mine': mine.\nprofile: mine\npolicy: {tiny: {layers: 3}}\n"
    )
    study, quick = profiles.load_profile(own, "mine"), profiles.load_profile(own, "quick")
    assert study.policy.tiny.layers == 3 and study.train == quick.train and study.policy.tiny.heads == quick.policy.tiny.heads
    text = profiles.text_of(own, "mine")
    assert text.startswith("# It is the profile 'mine': mine.\n\n# A parameter that is missing")
    assert "\n    layers: 3                 # >= 1; 2 is twice as fast" in text
    whole = profiles.text_of(own, "smollm").replace("profile: smollm ", "profile: whole ")
    (own / "profiles" / "whole.yaml").write_text(whole)
    assert profiles.text_of(own, "whole") == whole
    profiles.use(own, "whole")
    assert (own / "params.yaml").read_text() == whole


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methods: [grpo]\n", "mine.yaml: parameter 'profile' is missing"),
        ("profile: mine\ntrian: {lr: 1.0e-4}\n", "mine.yaml: unknown parameter 'trian'"),
        ("profile: mine\ntrain:\n  lr: fast\n", "mine.yaml: train.lr = 'fast'"),
        (
            "profile: mine\npolicy: {layers: 4}\n",
            "mine.yaml: unknown parameter 'policy.layers'; it is 'policy.tiny.layers' now",
        ),
        (
            "profile: mine\ndata: &d {test_size: 8}\ntrain: {rollouts: &n 7}\nseeds: [*n]\n",
            "profiles/mine.yaml: cannot be put into",
        ),
        ("a: [", "mine.yaml: not valid YAML"),
        ("", "mine.yaml: empty or not a mapping"),
    ],
    ids=["no name", "unknown group", "wrong type", "flat", "anchors", "not YAML", "empty"],
)
def test_a_faulty_profile_is_refused_before_anything_is_written(own: Path, text: str, words: str) -> None:
    (own / "profiles" / "mine.yaml").write_text(text)
    before = (own / "params.yaml").read_bytes()
    with pytest.raises(ConfigError, match=re.escape(words)):
        profiles.use(own, "mine")
    assert (own / "params.yaml").read_bytes() == before


def test_without_the_complete_profile_no_other_is_used(own: Path) -> None:
    (own / "profiles" / "quick.yaml").unlink()
    with pytest.raises(ConfigError, match="profiles/quick.yaml: no such file; the other profiles state what differs"):
        profiles.use(own, "full")
    (own / "profiles" / "quick.yaml").write_text("")
    with pytest.raises(ConfigError, match="profiles/quick.yaml: empty or not a mapping of parameters; the other profiles"):
        profiles.use(own, "full")


def test_unknown_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown profile 'smok'.*did you mean 'smoke'.*allowed: .*full.*quick"):
        profiles.use(make_project(tmp_path / "project"), "smok")


def test_every_group_of_the_code_is_in_the_profiles() -> None:
    text = (ROOT / "profiles" / "quick.yaml").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^([a-z_]+):", text) == list(Study.model_fields), "the same order, too, so that both read alike"
