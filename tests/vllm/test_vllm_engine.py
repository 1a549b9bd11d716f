"""Sampling with a real vLLM: agreement with the transformers engine, weight updates part by part, staleness, clean ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from vllm_model import EOS, PROMPTS, VOCABULARY, start, tiny_model

from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.transformers_engine import TransformersEngine
from tepo_core.rollout.types import SamplingParams
from tepo_core.rollout.vllm_engine import EngineError

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tied(vllm_python):
    model = tiny_model()
    engine = start(model, vllm_python)
    yield engine, model
    engine.close()


@pytest.fixture(scope="module")
def untied(vllm_python):
    model = tiny_model(tied=False)
    engine = start(model, vllm_python)
    yield engine, model
    engine.close()


def gaps(a, b):
    """|difference| of two lists of log-prob rows, token by token."""
    assert [len(row) for row in a] == [len(row) for row in b]
    return np.abs(np.concatenate(a) - np.concatenate(b))


def test_sampled_logprobs_agree_with_the_trainers(tied):
    engine, model = tied
    engine.update_weights(model)
    assert engine.gap <= 1e-3 and engine.restarts == 0
    rollouts = engine.generate(PROMPTS, 8, SamplingParams(0.7, 1.0, 40), list(range(32)))
    assert len(rollouts) == 256 and rollouts.prompt_index == [p for p in range(32) for _ in range(8)]
    assert rollouts.prompt_ids[9] == PROMPTS[1] and rollouts.sample_index[9] == 1
    scored, _ = rescore(model, rollouts, pad_id=0, temperature=0.7, micro_batch_tokens=8192)
    gap = gaps(rollouts.logprobs, scored)
    assert gap.max() <= 1e-3 and gap.size > 2000
    for ids, done in zip(rollouts.response_ids, rollouts.finished, strict=True):
        assert EOS not in ids[:-1] and 1 <= len(ids) <= 40
        assert done == (ids[-1] == EOS) and (done or len(ids) == 40)
    assert 10 < sum(rollouts.finished) < 256


def test_greedy_answers_agree_with_the_transformers_engine(tied):
    engine, model = tied
    engine.update_weights(model)
    params = SamplingParams(1.0, 1.0, 30, greedy=True)
    ours = TransformersEngine(model, pad_id=0, eos_ids=[EOS]).generate(PROMPTS, 1, params, list(range(32)))
    theirs = engine.generate(PROMPTS, 1, params, list(range(32)))
    assert theirs.response_ids == ours.response_ids and theirs.finished == ours.finished
    assert gaps(theirs.logprobs, ours.logprobs).max() <= 1e-3


def test_first_tokens_follow_the_models_distribution(tied):
    engine, model = tied
    engine.update_weights(model)
    n = 3000
    rollouts = engine.generate([[3, 4, 5]], n, SamplingParams(0.7, 1.0, 1), [11])
    counts = np.bincount([ids[0] for ids in rollouts.response_ids], minlength=VOCABULARY)
    with torch.no_grad():
        p = (model(torch.tensor([[3, 4, 5]])).logits[0, -1] / 0.7).softmax(-1).double().numpy()
    expected = n * p
    statistic = ((counts - expected) ** 2 / expected)[expected >= 5].sum()
    # chi-square with at most 24 degrees of freedom: 51.2 is exceeded with probability 0.001.
    assert (expected >= 5).sum() > 8 and statistic < 51.2


def test_seeds_decide_whatever_else_is_in_the_batch(tied):
    engine, model = tied
    engine.update_weights(model)
    params = SamplingParams(0.7, 1.0, 20)
    whole = engine.generate(PROMPTS[:8], 4, params, list(range(8)))
    alone = engine.generate([PROMPTS[5]], 4, params, [5])
    assert alone.response_ids == whole.response_ids[20:24]
    assert len({tuple(ids) for ids in alone.response_ids}) > 1
    assert engine.generate([PROMPTS[5]], 4, params, [6]).response_ids != alone.response_ids


def part_by_part(engine, model):
    """Change one named parameter at a time; each change reaches vLLM and would have been seen had it not."""
    engine.update_weights(model)
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(torch.where(torch.arange(parameter.numel()).view_as(parameter) % 2 == 0, 1.6, 0.6))
        stale = engine.probe_gap(model)
        assert stale > 2e-3, f"{name}: the probe does not see this change ({stale})"
        engine.update_weights(model)
        assert engine.gap <= 1e-3 and engine.restarts == 0, name
        with torch.no_grad():
            parameter.copy_(before)
        # Back to the start before the next part: q_norm changed here and k_norm there would cancel in their product.
        engine.update_weights(model)
        assert engine.gap <= 1e-3 and engine.restarts == 0, name


def test_every_part_of_a_tied_model_is_updated(tied):
    part_by_part(*tied)


def test_every_part_of_an_untied_model_is_updated(untied):
    assert "lm_head.weight" in dict(untied[1].named_parameters())
    part_by_part(*untied)


def test_prefix_cache_of_old_weights_is_forgotten(untied):
    engine, model = untied
    engine.update_weights(model)
    params = SamplingParams(1.0, 1.0, 8, greedy=True)
    long_prompts = [[3 + (7 * i + j) % 20 for j in range(64)] for i in range(4)]  # whole blocks, so they are cached
    engine.generate(long_prompts, 2, params, [0] * 4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(1.4)
            layer.self_attn.v_proj.weight.mul_(-1.0)
    engine.update_weights(model)
    after = engine.generate(long_prompts, 2, params, [0] * 4)
    scored, _ = rescore(model, after, pad_id=0, temperature=1.0, micro_batch_tokens=8192)
    assert gaps(after.logprobs, scored).max() <= 1e-3


def test_lora_updates_are_merged(vllm_python, untied):
    from peft import LoraConfig, get_peft_model

    engine, _ = untied
    lora = get_peft_model(tiny_model(tied=False, seed=4), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    engine.update_weights(lora)
    assert engine.gap <= 1e-3 and engine.restarts == 0
    with lora.disable_adapter():
        assert engine.probe_gap(lora) > 0.05


def test_twenty_cycles_without_growth_of_memory(tied):
    engine, model = tied
    params = SamplingParams(0.7, 1.0, 24)
    seen = []
    for cycle in range(25):
        engine.generate(PROMPTS, 8, params, list(range(32)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0005)
        engine.update_weights(model)
        assert engine.gap <= 1e-3
        if cycle >= 4:  # allocators settle first
            seen.append(engine._call("memory"))
    assert seen[-1] <= 1.05 * seen[0], [s // 2**20 for s in seen]
    assert engine.restarts == 0


def test_without_repacking_the_stale_output_matrix_is_caught_and_a_restart_helps(vllm_python):
    model = tiny_model()
    engine = start(model, vllm_python, repack=False, self_test=False)
    try:
        with torch.no_grad():
            model.model.norm.weight.mul_(1.3)
        engine.update_weights(model)
        assert engine.restarts == 0
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.3)
        engine.update_weights(model)
        assert engine.restarts == 1 and engine.gap <= 1e-3
    finally:
        engine.close()


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


def test_a_worker_that_dies_is_reported_and_close_leaves_nothing(vllm_python, monkeypatch):
    model = tiny_model()
    engine = start(model, vllm_python, self_test=False)
    pid, folder, params = engine.worker.process.pid, engine.folder, SamplingParams(1.0, 1.0, 4)
    try:
        # An engine that is given no new weights: caught, started afresh from the old file, refused.
        monkeypatch.setattr(engine, "_write", lambda model: None)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.05)
        with pytest.raises(EngineError, match=r"differ by .* nats.*rollout.engine: transformers"):
            engine.update_weights(model)
        assert engine.restarts == 1 and not alive(pid) and folder.is_dir()
        pid = engine.worker.process.pid
        assert alive(pid) and len(engine.generate([[3]], 2, params, [0])) == 2
        engine.worker.process.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match=r"(?s)vLLM ended .*'generate'.*last lines"):
            engine.generate([[3]], 1, params, [0])
    finally:
        engine.close()
    assert not alive(pid) and not folder.exists()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[3]], 1, params, [0])


TRAINER = """
import sys
sys.path[:0] = [{root!r}, {support!r}]
from vllm_model import PROMPTS, start, tiny_model
from tepo_core.rollout.types import SamplingParams
engine = start(tiny_model(), {python!r})
print(engine.worker.process.pid, engine.folder, flush=True)
while True:
    engine.generate(PROMPTS, 64, SamplingParams(0.7, 1.0, 100), list(range(32)))
"""


def test_the_worker_ends_when_the_trainer_is_killed_while_sampling(vllm_python):
    script = TRAINER.format(root=str(ROOT), support=str(Path(__file__).parents[1] / "support"), python=vllm_python)
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        pid, folder = trainer.stdout.readline().split()
        time.sleep(1.5)
        assert alive(int(pid)) and Path(folder).is_dir()
        trainer.kill()
        trainer.wait(10)
        assert wait_until(lambda: not alive(int(pid)), 15)
        assert wait_until(lambda: not Path(folder).exists(), 5)
    finally:
        trainer.kill()
