"""Bad input: the message names the parameter or file, its value and what is allowed; nothing half-made remains."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline_project import ROOT, environment, make_project, runner, write_notebook
from stages import validated

from tepo_core.commands.profiles import text_of
from tepo_core.config import ConfigError, find_root
from tepo_core.pipeline.inputs import RecordError, check_folder, check_space, explain_os_error, put_in_place, sha256
from tepo_core.pipeline.parameters import load_validated
from tepo_core.pipeline.runner import guarded
from tepo_core.pipeline.stages import Run

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
        ["variants.kl_cov", "share = 0.002 selects 1 of the about 576 tokens", "0.0174 or more", "{preset: kl_cov, share: 0.02}"],
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
        text = SMOKE.replace(
            "  temperature: 1.0            # of sampling", "  temperature: 0              # of sampling"
        )
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


# -- files between stages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A root with prepared data, a base policy and a trained one, each complete by its own record."""
    data = tmp_path / "data" / "prepared" / "facts-s0"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    (data / "manifest.json").write_text(json.dumps({"sha256": {"train.jsonl": sha256(data / "train.jsonl")}}))
    for folder in (tmp_path / "runs" / "warmup" / "facts-s0", tmp_path / "runs" / "train" / "facts-grpo-s0"):
        (folder / "policy").mkdir(parents=True)
        for name in ("config.json", "metrics.jsonl", "policy/model.safetensors"):
            (folder / name).write_text(name)
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        (folder / "done.json").write_text(json.dumps({"files": {n: sha256(folder / n) for n in names}, "ok": True}))
    return tmp_path


DATA, BASE = Path("data/prepared/facts-s0"), Path("runs/warmup/facts-s0")


def test_complete_inputs_pass(runs: Path) -> None:
    check_folder(runs, DATA)
    check_folder(runs, BASE)


@pytest.mark.parametrize(
    ("damage", "folder", "words"),
    [
        (
            lambda r: shutil.rmtree(r / DATA),
            DATA,
            ["data/prepared/facts-s0: missing", "stage 'prepare' first", "tepo run prepare"],
        ),
        (lambda r: (r / DATA / "train.jsonl").unlink(), DATA, ["facts-s0/train.jsonl: missing", "dvc repro"]),
        (
            lambda r: (r / DATA / "train.jsonl").write_text('{"a": 1}\n{"b'),
            DATA,
            ["train.jsonl: changed or truncated since 'prepare'"],
        ),
        (lambda r: (r / DATA / "manifest.json").write_text('{"sha'), DATA, ["manifest.json: truncated or not JSON"]),
        (
            lambda r: (r / BASE / "done.json").unlink(),
            BASE,
            ["done.json is missing, so it was never finished", "tepo run warmup"],
        ),
        (
            lambda r: (r / BASE / "policy/model.safetensors").unlink(),
            BASE,
            ["model.safetensors: the policy has no weights"],
        ),
        (
            lambda r: (r / BASE / "done.json").write_text(
                json.dumps({"files": {"config.json": sha256(r / BASE / "config.json")}})
            ),
            BASE,
            ["runs/warmup/facts-s0/policy: no weights"],
        ),
        (
            lambda r: (r / BASE / "policy/model.safetensors").write_text("other"),
            BASE,
            ["changed or truncated since 'warmup' wrote it"],
        ),
    ],
    ids=["no data", "gone", "truncated", "no manifest", "unfinished", "no weights", "never weights", "other weights"],
)
def test_damaged_inputs(runs: Path, damage, folder: Path, words: list[str]) -> None:
    damage(runs)
    with pytest.raises(RecordError) as caught:
        check_folder(runs, folder)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


def test_a_stage_with_damaged_inputs_does_not_start(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    write_notebook(project / "build" / "notebooks" / "warmup.ipynb", "open('started', 'w')")
    validated(project)
    process = runner(project, "warmup", "--task", "facts", "--seed", "0")
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert text == (
        "error: data/prepared/facts-s0: missing; run the stage 'prepare' first ('dvc repro', or 'tepo run prepare')\n"
    )
    assert not (project / "started").exists() and not (project / "runs").exists()


# -- the machine ------------------------------------------------------------------------------------------------------------


def test_no_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5 * 2**20))
    with pytest.raises(RecordError, match=r"only 5 MB free on this disk; at least 200 MB"):
        check_space(tmp_path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EACCES, "no permission to write"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "Not a dir"),
    ],
)
def test_operating_system_errors_say_what_to_do(number: int, words: str, capsys: pytest.CaptureFixture) -> None:
    def action() -> None:
        raise OSError(number, os.strerror(number), "runs/train/x")

    assert guarded(action) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: runs/train/x: ") and words in shown
    assert explain_os_error(OSError(number, os.strerror(number))).find(words) >= 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_write_permission_for_real(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert guarded((tmp_path / "runs").mkdir) == 1
    finally:
        tmp_path.chmod(0o700)


def test_what_was_there_stays_when_the_new_cannot_be_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "runs" / "warmup" / "facts-s0", tmp_path / "work" / "out"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir(parents=True)
        (folder / "x").write_text(text)
    real = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(source) == new:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        put_in_place(tmp_path, Run("warmup", "facts", seed=0), new)
    assert (old / "x").read_text() == "old"
    monkeypatch.setattr(os, "replace", real)
    put_in_place(tmp_path, Run("warmup", "facts", seed=0), new)
    assert (old / "x").read_text() == "new" and not new.exists()


def test_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runs/ may be a link to a scratch disk, which a rename cannot cross."""
    new, real = tmp_path / "work" / "out", os.replace
    new.mkdir(parents=True)
    (new / "x").write_text("new")

    def across(source: Path, target: Path) -> None:
        if Path(source).parent != Path(target).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", across)
    put_in_place(tmp_path, Run("warmup", "facts", seed=0), new)
    folder = tmp_path / "runs" / "warmup"
    assert [p.name for p in folder.iterdir()] == ["facts-s0"] and (folder / "facts-s0" / "x").read_text() == "new"


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
    assert (
        done.stderr.startswith(f"error: {tmp_path} is not inside the project")
        and "cd into the clone first" in done.stderr
    )
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
