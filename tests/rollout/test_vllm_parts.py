"""What surrounds vLLM and needs no vLLM: exported weights, rescoring, staleness, failures to start."""

import math
import stat
import sys

import numpy as np
import pytest
import torch
from tiny import tiny_study
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tepo_core.config import ConfigError
from tepo_core.model.batching import micro_batches
from tepo_core.rollout.engines import make_engine
from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.transformers_engine import TransformersEngine
from tepo_core.rollout.types import Rollouts, SamplingParams
from tepo_core.rollout.vllm_engine import EngineError, VllmEngine, _changed_copy, export_weights


def tiny_model(tied=True, seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=25,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_exported_weights_rebuild_the_model(tied):
    model = tiny_model(tied)
    model.mtp = nn.ModuleList([nn.Linear(2, 2)])  # multi-token modules stay with the trainer
    weights = export_weights(model)
    assert ("lm_head.weight" in weights) is not tied
    other = tiny_model(tied, seed=1)
    missing = other.load_state_dict(weights, strict=False)
    assert missing.unexpected_keys == [] and missing.missing_keys == (["lm_head.weight"] if tied else [])
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_exported_lora_weights_are_merged_and_the_model_is_left_alone():
    from peft import LoraConfig, get_peft_model

    lora = get_peft_model(tiny_model(), LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(5)
    for name, parameter in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    before = {name: p.clone() for name, p in lora.named_parameters()}
    plain = tiny_model(seed=1)
    assert plain.load_state_dict(export_weights(lora), strict=False).unexpected_keys == []
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(plain(ids).logits, lora(ids).logits, rtol=1e-4, atol=1e-4)
    with lora.disable_adapter():
        assert (plain(ids).logits - lora(ids).logits).abs().max() > 0.1
    assert all(torch.equal(before[name], p) for name, p in lora.named_parameters())


def test_the_self_tests_copy_changes_every_weight_and_not_the_model():
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    changed = _changed_copy(model)
    assert changed.lm_head.weight is changed.model.embed_tokens.weight
    for name, parameter in changed.named_parameters():
        ratio = parameter / before[name]
        assert set(ratio[before[name] != 0].round(decimals=4).unique().tolist()) <= {0.5, 1.5}
        assert torch.equal(before[name], dict(model.named_parameters())[name])


def sampled(model, temperature=0.8, n=4):
    engine = TransformersEngine(model, pad_id=0, eos_ids=[2])
    prompts = [[3, 4, 5], [6], [7, 8, 9, 10, 11]]
    return engine.generate(prompts, n, SamplingParams(temperature, 1.0, 14), [1, 2, 3])


@pytest.mark.parametrize("budget", [1, 100_000])
def test_rescore_agrees_with_the_engine_whatever_the_batches(budget):
    model = tiny_model().train()
    rollouts = sampled(model)
    assert len({len(r) for r in rollouts.response_ids}) > 3
    logprobs, entropies = rescore(model, rollouts, pad_id=0, temperature=0.8, micro_batch_tokens=budget)
    assert model.training
    for row in range(len(rollouts)):
        np.testing.assert_allclose(logprobs[row], rollouts.logprobs[row], atol=1e-4)
        np.testing.assert_allclose(entropies[row], rollouts.entropies[row], atol=1e-4)
    colder, _ = rescore(model, rollouts, pad_id=0, temperature=0.4, micro_batch_tokens=budget)
    assert np.abs(np.concatenate(colder) - np.concatenate(rollouts.logprobs)).max() > 0.1


def test_micro_batches_keep_every_row_within_the_budget():
    lengths = [5, 9, 3, 9, 1, 30]
    batches = micro_batches(lengths, 18)
    assert batches == [[4, 2, 0], [1, 3], [5]]  # 3 x 5, 2 x 9, and 30 alone
    assert micro_batches([], 10) == []


def test_top_p_below_one_is_refused_for_training():
    study = tiny_study(rollout={"engine": "vllm"}, train={"top_p": 0.9})
    with pytest.raises(ConfigError, match=r"train.top_p = 0.9.*rollout.engine: transformers"):
        make_engine(study, None, study.train)


def interpreter(tmp_path, body):
    """An executable in the place of vLLM's Python."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def start(python, model=None):
    return VllmEngine(model or tiny_model(), eos_ids=[2], pad_id=0, context=64, python=python)


def test_a_missing_vllm_is_named_with_the_alternative(tmp_path):
    # -S: the bare interpreter, without the packages of this environment, which may or may not hold vLLM.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(EngineError, match=r"not installed.*rollout.engine: transformers"):
        start(str(bare))


def test_a_failing_start_shows_its_last_lines_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    lines = "\n".join(f"print('line {i}')" for i in range(30))
    with pytest.raises(EngineError) as caught:
        start(interpreter(tmp_path, f"{lines}\nprint('CUDA out of memory')\nsys.exit(7)"))
    text = str(caught.value)
    assert "code 7" in text and "line 29" in text and "line 3\n" not in text and "rollout.engine: transformers" in text
    assert "lower rollout.gpu_memory_share" in text
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_vocabulary_that_differs_is_refused(tmp_path):
    answer = {"vocabulary": 30, "context": 64, "vllm": "0", "torch": "0"}
    body = (
        "import json\nfrom multiprocessing.connection import Connection\n"
        f"c = Connection(json.loads(sys.argv[3])['socket'])\nc.send(('ok', {answer!r}))\nc.recv()"
    )
    with pytest.raises(EngineError, match="30 tokens and the trainer's 25"):
        start(interpreter(tmp_path, body))


class Parrot(VllmEngine):
    """The trainer's half of the engine with a worker that answers from a model of its own, without vLLM."""

    def _start(self):
        self.held = tiny_model(seed=9)
        self.held.load_state_dict(export_weights(self.model_to_hold), strict=False)

    def _call(self, name, **arguments):
        if name == "update":
            return self.on_update()
        prompts, seeds = arguments["prompts"], arguments["seeds"]
        params = SamplingParams(arguments["temperature"], arguments["top_p"], arguments["max_new_tokens"], arguments["greedy"])
        rollouts = TransformersEngine(self.held, pad_id=0, eos_ids=[2]).generate(prompts, 1, params, seeds)
        return {"tokens": rollouts.response_ids, "logprobs": [row.tolist() for row in rollouts.logprobs]}


def test_a_stale_sampler_is_caught_restarted_and_then_refused(caplog):
    model = tiny_model()

    class Stale(Parrot):
        model_to_hold = model

        def on_update(self):
            return None

    engine = Stale(model, eos_ids=[2], pad_id=0, context=64, self_test=False)
    assert engine.gap < 1e-4
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    engine.update_weights(model)  # the restart reads the new weights, so it helps
    assert engine.restarts == 1 and engine.gap < 1e-4 and "starting vLLM afresh" in caplog.text
    Stale.model_to_hold = tiny_model(seed=3)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    with pytest.raises(EngineError, match="differ by .* nats"):
        engine.update_weights(model)
    engine.close()
    engine.close()


def test_the_self_test_finds_a_sampler_that_never_takes_over_one_part():
    # The real update below is far smaller than the tolerance: only the strongly changed weights of the self test show it.
    model = tiny_model()
    handed = []

    class Partial(Parrot):
        model_to_hold = model

        def on_update(self):
            handed.append(1)
            weights = export_weights(Partial.source)
            del weights["model.embed_tokens.weight"]
            self.held.load_state_dict(weights, strict=False)

        def _write(self, model):
            Partial.source = model

    for self_test, restarts in ((False, 0), (True, 1)):
        engine = Partial(model, eos_ids=[2], pad_id=0, context=64, self_test=self_test)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1 + 1e-6)
        Partial.model_to_hold = model
        if self_test:
            with pytest.raises(EngineError, match="differ by"):
                engine.update_weights(model)
        else:
            engine.update_weights(model)
        assert engine.restarts == restarts
        engine.close()


def test_bad_requests_name_what_is_wrong():
    model = tiny_model()

    class Quiet(Parrot):
        model_to_hold = model

    engine = Quiet(model, eos_ids=[2], pad_id=0, context=64)
    params = SamplingParams(1.0, 1.0, 60)
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        engine.generate([[3], [4]], 1, params, [1])
    with pytest.raises(EngineError, match="prompt 1 .* vocabulary of 25"):
        engine.generate([[3], [25]], 1, params, [1, 2])
    with pytest.raises(EngineError, match="prompt 0 has 5 tokens and max_new_tokens = 60"):
        engine.generate([[3] * 5], 1, params, [1])
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        VllmEngine._call(engine, "generate")
    with pytest.raises(EngineError, match="float16"):
        start(sys.executable, tiny_model().half())


def test_logprobs_are_nan_where_vllm_cannot_give_them_and_entropies_none():
    model = tiny_model()

    class Quiet(Parrot):
        model_to_hold = model

    engine = Quiet(model, eos_ids=[2], pad_id=0, context=64)
    for params, known in [
        (SamplingParams(0.7, 1.0, 5), True),
        (SamplingParams(0.7, 0.9, 5), False),
        (SamplingParams(1.0, 1.0, 5, greedy=True), True),
        (SamplingParams(0.7, 1.0, 5, greedy=True), False),
    ]:
        rollouts = engine.generate([[3, 4]], 2, params, [1])
        assert isinstance(rollouts, Rollouts) and rollouts.entropies == [None, None]
        assert all(math.isnan(x) is not known for row in rollouts.logprobs for x in row)
    engine.close()
