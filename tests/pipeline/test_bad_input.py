"""Bad input: the message names the parameter or file, its value and what is allowed; nothing half-made remains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_project import ROOT, environment, make_project

from tepo_core.commands.profiles import text_of
from tepo_core.config import ConfigError, find_root
from tepo_core.pipeline.parameters import load_validated

SMOKE = text_of(ROOT, "smoke")


def edited(folder: Path, *edits: tuple[str, str]) -> Path:
    text = SMOKE
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return path


BAD_PARAMETERS = {
    "unknown method": (("methods: [grpo, tepo_kl]", "methods: [grpo, tepoo]"), ["tepoo", "allowed", "tepo_kl"]),
    "unknown parameter": (
        ("  lr_warmup_rollouts:", "  lr_warmup_rolouts:"),
        ["train.lr_warmup_rolouts", "lr_warmup_rollouts"],
    ),
    "unknown group": (("compute: ", "computer: "), ["'computer'", "compute"]),
    "missing parameter": (("  weight_decay: 0.01 ", "  # weight_decay: 0.01"), ["missing", "warmup.weight_decay"]),
    "word for a number": (("lr: 1.0e-4", "lr: fast"), ["train.lr", "'fast'", "number"]),
    "number for a list": (("seeds: [0]", "seeds: 3"), ["seeds", "3", "list"]),
    "negative seed": (("seeds: [0]", "seeds: [-1]"), ["seeds.0", "-1", "greater than or equal to 0"]),
    "zero temperature": (("  group_size: 8 ", "  temperature: 0\n  group_size: 8 "), ["temperature"]),
    "group of one": (("group_size: 8", "group_size: 1"), ["train.group_size", "1", "greater than or equal to 2"]),
    "indivisible batch": (
        ("minibatches: 4", "minibatches: 3"),
        ["minibatches = 3", "prompts_per_rollout = 16", "[1, 2, 4, 8, 16]"],
    ),
    "share of one token": (
        ("methods: [grpo, tepo_kl]", "methods: [grpo, kl_cov]"),
        [
            "variants.kl_cov",
            "share = 0.002 selects 1 of the about 576 tokens",
            "0.0174 or more",
            "{preset: kl_cov, share: 0.02}",
        ],
    ),
    "share of no token": (
        ("methods: [grpo, tepo_kl]", "methods: [grpo, clip_cov]"),
        ["variants.clip_cov", "share = 0.0002 selects 0 of", "0.0174 or more"],
    ),
    "share too small by a variant's own mini-batches": (
        ("variants: {}", "variants: {few: {preset: kl_cov, share: 0.02, train: {minibatches: 16}}}"),
        ["variants.few", "share = 0.02 selects 2 of the about 144 tokens", "0.0695 or more"],
    ),
    "empty seeds": (("seeds: [0]", "seeds: []"), ["seeds", "at least 1"]),
    "empty methods": (("methods: [grpo, tepo_kl]", "methods: []"), ["methods", "at least 1"]),
    "seed twice": (("seeds: [0]", "seeds: [0, 1, 0]"), ["seeds", "[0] is listed twice"]),
    "method twice": (("methods: [grpo, tepo_kl]", "methods: [grpo, grpo]"), ["methods", "['grpo'] is listed twice"]),
    "unused option": (
        ("variants: {}", "variants: {mine: {preset: grpo, band: [1, 5]}}"),
        ["variants.mine", "'band'", "it uses", "clip"],
    ),
    "unknown preset": (
        ("variants: {}", "variants: {mine: {preset: grop}}"),
        ["variants.mine", "'grop'", "allowed", "grpo"],
    ),
    "variant's training": (
        ("variants: {}", "variants: {mine: {preset: grpo, train: {lr: -1.0}}}"),
        ["variants.mine.train", "lr", "-1.0"],
    ),
    "variant's training is no mapping": (
        ("variants: {}", "variants: {mine: {preset: grpo, train: 3}}"),
        ["variants.mine.train", "mapping"],
    ),
    "unknown task": (
        ("tasks: [facts]", "tasks: [fact]"),
        ["tasks: 'fact' is unknown", "did you mean 'facts'", "allowed: facts, facts_hard, noise"],
    ),
    "unknown split": (
        ("splits: [test, long]", "splits: [tset]"),
        ["evaluate.splits: 'tset'", "did you mean 'test'", "long"],
    ),
    "unknown evaluation set": (
        ("eval_sets: []", "eval_sets: [amc24]"),
        ["data.eval_sets: 'amc24'", "did you mean 'amc23'"],
    ),
    "no benchmarks": (
        ("benchmarks_dir: null", "benchmarks_dir: nowhere"),
        ["data.benchmarks_dir = 'nowhere'", "no such folder"],
    ),
    "no worked solutions": (
        ("tasks: [facts]", "tasks: [dapo-math-17k]"),
        ["warmup.steps = 50", "dapo-math-17k has no worked solutions", "set it to 0"],
    ),
    "k above n": (("k: [1, 2, 4]", "k: [1, 8]"), ["k = 8", "samples = 4"]),
    "name of a folder": (("profile: smoke", "profile: ../x"), ["'../x'", "folder name"]),
    "method called base": (("methods: [grpo, tepo_kl]", "methods: [base]"), ["'base'", "another name"]),
    "shape of the tiny model outside its group": (
        ("  lora_rank: 0 ", "  layers: 4\n  lora_rank: 0 "),
        ["unknown parameter 'policy.layers'; it is 'policy.tiny.layers' now"],
    ),
    "context outside its group": (
        ("  lora_rank: 0 ", "  context: 4096\n  lora_rank: 0 "),
        ["unknown parameter 'policy.context'; it is 'policy.tiny.context' now"],
    ),
    "unknown in a group of a group": (
        ("    mlp_size: 384", "    mlp_sice: 384"),
        ["unknown parameter 'policy.tiny.mlp_sice'", "known here: context, head_size"],
    ),
    "missing in a group of a group": (
        ("    mlp_size: 384", "    # mlp_size: 384"),
        ["parameters missing: policy.tiny.mlp_size; each must be given"],
    ),
    "context too small": (("context: 128", "context: 32"), ["policy.tiny.context = 32", "max_new_tokens = 36"]),
}


@pytest.mark.parametrize("case", BAD_PARAMETERS)
def test_parameters(tmp_path: Path, case: str) -> None:
    edit, words = BAD_PARAMETERS[case]
    if case == "zero temperature":  # train and evaluate both have one, so the line is put where it is unique
        text = SMOKE.replace("  temperature: 1.0            # of sampling", "  temperature: 0              # of sampling")
        assert text != SMOKE
        (tmp_path / "params.yaml").write_text(text)
        words = ["train.temperature", "0", "greater than 0"]
    else:
        edited(tmp_path, edit)
    with pytest.raises(ConfigError) as caught:
        load_validated(tmp_path / "params.yaml")
    for word in ["params.yaml", *words]:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("tasks: [facts\nseeds: ]", ["not valid YAML", "line"]),
        ("", ["empty", "tepo profile use quick"]),
        ("- a\n- b\n", ["not a mapping", "tepo profile use quick"]),
        ("a: \xff\xfe".encode("latin-1"), ["not valid YAML"]),
        (SMOKE + "\nprofile: other\n", ["not valid YAML", "duplicate key"]),
    ],
    ids=["broken", "empty", "list", "not UTF-8", "key twice"],
)
def test_params_yaml_itself(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_validated(path)
    for word in ["params.yaml", *words]:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"
    path.unlink()
    with pytest.raises(ConfigError, match=r"params.yaml: no such file; run 'tepo profile use quick'"):
        load_validated(path)


def test_all_faults_at_once(tmp_path: Path) -> None:
    edited(tmp_path, ("tasks: [facts]", "tasks: [fact]"), ("methods: [grpo, tepo_kl]", "methods: [grop, tepoo]"))
    with pytest.raises(ConfigError) as caught:
        load_validated(tmp_path / "params.yaml")
    assert len(str(caught.value).splitlines()) == 3


def test_policy_folder_without_weights(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    edited(tmp_path, ("source: tiny ", f"source: {policy} "))
    with pytest.raises(ConfigError, match=rf"policy.source = '{policy}'.*no \*.safetensors"):
        load_validated(tmp_path / "params.yaml")
    edited(tmp_path, ("source: tiny ", "source: ./nowhere "))
    with pytest.raises(ConfigError, match=r"policy.source = './nowhere'.*no such folder"):
        load_validated(tmp_path / "params.yaml")


def test_what_was_found_right_is_remembered_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path / "project")
    calls = []
    monkeypatch.setattr("tepo_core.pipeline.parameters.check", lambda study, *_: calls.append(study.profile))
    load_validated(project / "params.yaml")
    load_validated(project / "params.yaml")
    assert calls == ["smoke"]
    edited(project, ("rollouts: 4 ", "rollouts: 5 "))
    load_validated(project / "params.yaml")
    assert calls == ["smoke", "smoke"]
    edited(project, ("source: tiny ", f"source: {tmp_path} "))
    load_validated(project / "params.yaml")
    load_validated(project / "params.yaml")
    assert len(calls) == 4, "a policy folder can change at any time"


def test_outside_the_repository(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not inside the project"):
        find_root(tmp_path)
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['tepo', 'plan']; from tepo_core.commands.cli import main; main()",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path} is not inside the project") and "cd into the clone first" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_parameters_stop_make_repro_before_dvc(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    edited(project, ("lr: 1.0e-4", "lr: fast"))
    before = sorted(p.name for p in project.iterdir())
    command = [sys.executable, "-m", "tepo_core.commands.cli", "repro"]
    done = subprocess.run(command, cwd=project, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: params.yaml: train.lr = 'fast'")
    assert sorted(p.name for p in project.iterdir()) == before


def test_old_python(tmp_path: Path) -> None:
    """In `make`, and when a module is started with an older interpreter directly."""
    fake = tmp_path / "python3"
    fake.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c \"import sys; sys.version_info = (3, 9, 1); sys.argv = ['-c']; $2\"\n"
    )
    fake.chmod(0o755)
    command = ["make", "-C", str(ROOT), "venv", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed, and" in done.stderr and "is 3.9" in done.stderr
    assert not (tmp_path / "venv").exists()
    code = "import sys; sys.version_info = (3, 10, 2, 'final', 0); import tepo_core.pipeline"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("Python 3.11 or newer is needed; this is 3.10")
