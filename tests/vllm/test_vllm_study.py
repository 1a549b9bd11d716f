"""The stages with vLLM as the sampler: warm-up, training with measured mismatch and correction, evaluation."""

import json

import pytest
from tiny import TINY, tiny_study

from tepo_core.evaluation.stage import evaluate_run
from tepo_core.runs.folder import run_folder
from tepo_core.runs.metrics import read_metrics
from tepo_core.tasks.prepare import prepare
from tepo_core.training.trainer import Trainer
from tepo_core.training.warmup import warmup

pytestmark = pytest.mark.vllm


def test_a_smoke_study_with_vllm(vllm_python, monkeypatch, tmp_path):
    monkeypatch.setenv("TEPO_VLLM_PYTHON", vllm_python)
    study = tiny_study(
        rollout={"engine": "vllm", "batch_size": 64, "importance_correction": "token"},
        train={"rollouts": 3, "validate_every": 0, "record_every": 3},
        methods=["tepo_kl"],
        policy={"tiny": {**TINY, "head_size": 32}},  # the CPU kernels of vLLM know no head of 16
    )
    prepare(study, tmp_path)
    warmup(study, "facts", 0, tmp_path)
    out = run_folder(tmp_path, "train", "facts", 0, "tepo_kl")
    with Trainer(study, "facts", "tepo_kl", 0, tmp_path) as run:
        run.run()
        run.write(out)
        assert run.engine.restarts == 0 and run.engine.gap <= 1e-3

    rollouts = read_metrics(out).frame("rollout")
    assert len(rollouts) == 3 and (rollouts["entropy"] > 0).all()
    assert (rollouts["mismatch"] <= 1e-4).all() and (rollouts["mismatch_beyond_1pct"] == 0).all()
    assert ((rollouts["correction"] - 1).abs() <= 1e-3).all()
    first = [event for event in read_metrics(out).events["update"] if event["update"] == 1]
    assert len(first) == 3
    for event in first:  # the trainer's own log-probs are the old ones, so the ratio is 1 whatever the sampler is
        total, tokens = event["sums"]["abs_log_ratio"]
        assert total <= 1e-4 * tokens

    evaluate_run(study, "facts", "tepo_kl", 0, tmp_path)
    summary = json.loads((run_folder(tmp_path, "evaluate", "facts", 0, "tepo_kl") / "summary.json").read_text())
    test = summary["splits"]["test"]
    assert test["problems"] == 12 and test["samples"] == 4 and 0 <= test["greedy"] <= 1
    assert test["entropy"] is None  # vLLM gives none, and none is made up
