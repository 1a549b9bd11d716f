"""A policy is a causal LM with its tokenizer. Build the tiny one, load any other, save in safetensors."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub.constants as hub
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from tepo_core import config
from tepo_core.config import ConfigError
from tepo_core.machine import usable_cores
from tepo_core.model import mtp
from tepo_core.model.inspect import check_chat, check_folder, check_vocabulary, context_of
from tepo_core.model.norms import use_lean_norms
from tepo_core.model.sources import add_adapters, end_of_turn, gguf_file, gguf_tokenizer, load_gguf, merged
from tepo_core.model.text import exact_text, prompt_ids, response_text
from tepo_core.seeding import derive_seed

transformers_logging.disable_progress_bar()
# Settings by which a training pass differs from another; those of classifiers do not touch a language model.
RANDOM = re.compile("^(?!classifier|summary).*(dropout|pdrop|drop_path|layerdrop|jitter)")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass
class Policy:
    """``model`` is a transformers causal LM, ``tokenizer`` a fast tokenizer with an EOS and a PAD token."""

    model: Any
    tokenizer: Any
    prompt_format: str = "plain"
    _texts: dict[int, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    @property
    def eos_ids(self) -> list[int]:
        """Every token that ends a response: EOS of tokenizer and generation config, and the chat template's end of turn."""
        declared = (
            getattr(self.model.generation_config, "eos_token_id", None) if hasattr(self.model, "generation_config") else None
        )
        extra = declared if isinstance(declared, list) else [] if declared is None else [declared]
        turn = end_of_turn(self.tokenizer) if self.prompt_format == "chat" else None
        return sorted({self.tokenizer.eos_token_id, *extra, *([] if turn is None else [turn])})

    @property
    def context(self) -> int:
        """Longest sequence in tokens, prompt and response together."""
        return context_of(self.model.config, getattr(self.model.config, "name_or_path", ""))

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, through the chat template when ``prompt_format`` is ``chat``; nothing stands behind it."""
        if self.prompt_format == "chat":
            message = [{"role": "user", "content": prompt}]
            return list(self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        return prompt_ids(self.tokenizer, prompt)

    def decode(self, ids: list[int]) -> str:
        """Text of a response as the model said it, without the token that ends it. For grading and showing only."""
        return response_text(self.tokenizer, ids, self._ends)

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.eos_ids)

    def token_texts(self, ids: list[int]) -> list[str]:
        """Text of each token by itself."""
        known = self._texts
        for i in set(ids).difference(known):
            known[i] = exact_text(self.tokenizer, [i])
        return [known[i] for i in ids]


def build_tiny(cfg: config.Policy, tokenizer: Any, seed: int) -> Policy:
    """A Qwen3-architecture model with random weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=cfg.tiny.hidden_size,
                num_hidden_layers=cfg.tiny.layers,
                num_attention_heads=cfg.tiny.heads,
                num_key_value_heads=cfg.tiny.kv_heads,
                head_dim=cfg.tiny.head_size,
                intermediate_size=cfg.tiny.mlp_size,
                max_position_embeddings=cfg.tiny.context,
                tie_word_embeddings=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
    model = model.to(getattr(torch, cfg.dtype))
    if cfg.mtp_modules:
        mtp.add_modules(model, cfg.mtp_modules, seed=seed)
    use_lean_norms(model)
    return Policy(model, tokenizer, cfg.prompt_format)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write weights (safetensors), configuration and tokenizer. Adapters are merged: the folder holds a plain model."""
    plain = merged(policy.model)
    plain.save_pretrained(folder, state_dict=mtp.backbone_state(plain))
    mtp.save_modules(plain, folder)
    policy.tokenizer.save_pretrained(folder)


def with_adapters(policy: Policy, cfg: config.Policy, seed: int) -> Policy:
    """The policy to train: itself, or with LoRA adapters of ``policy.lora_rank`` that start from ``seed``."""
    if cfg.lora_rank:
        policy.model = add_adapters(policy.model, cfg.lora_rank, derive_seed(seed, "lora"))
    return policy


def load_policy(source: str | Path, cfg: config.Policy) -> Policy:
    """Load a folder or a hub id. Safetensors only; the repository's own code runs only with ``policy.trust_remote_code: true``.

    Raises :class:`ConfigError` for a folder without whole weights, a tokenizer without EOS, a chat template that is missing or fails, a
    model without a longest sequence, or a hub id that cannot be reached."""
    if path := gguf_file(str(source)):
        model, tokenizer = load_gguf(path, getattr(torch, cfg.dtype))
        return _ready(model, tokenizer, source, cfg)
    folder = Path(source)
    if folder.exists() or str(source).startswith(("/", ".")):
        check_folder(folder)
    options = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    try:
        model_config, tokenizer = _described(source, options)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=model_config, dtype=getattr(torch, cfg.dtype), use_safetensors=True, **options
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"policy.source = {str(source)!r}: cannot be loaded ({_first_line(error)}); allowed: 'tiny', 'smollm2-135m-gguf', "
            "a folder with config.json, *.safetensors and a tokenizer, or a hub id that this machine can reach"
        ) from None
    mtp.load_modules(model, folder)
    return _ready(model, tokenizer, source, cfg)


def examine(source: str | Path, cfg: config.Policy) -> None:
    """What :func:`load_policy` would refuse, found without reading weights. Raises :class:`ConfigError` as it does.

    Of a hub id what the cache or the hub can be asked for; where neither answers, loading it will say so."""
    if path := gguf_file(str(source)):
        if cfg.prompt_format == "chat":
            check_chat(gguf_tokenizer(path), source)
        return
    local = isinstance(source, Path)
    if local:
        check_folder(source)
    options = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    options["local_files_only"] = local or not _hub_answers()
    try:
        model_config, tokenizer = _described(source, options)
    except ValueError as error:
        if not local:
            return
        raise ConfigError(f"{source}: config.json or the tokenizer cannot be read ({_first_line(error)})") from None
    context_of(model_config, source)
    check_vocabulary(tokenizer, source)
    if cfg.prompt_format == "chat":
        check_chat(tokenizer, source)


def _described(source: str | Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Configuration and tokenizer. Raises ValueError for whatever transformers raises about them, a dozen unrelated types."""
    try:
        return AutoConfig.from_pretrained(source, **options), AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


def _hub_answers() -> bool:
    """Whether the hub's name can be resolved; without that, asking it takes half a minute of retries."""
    try:
        socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, 443)
    except OSError:
        return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    return True


def _ready(model: Any, tokenizer: Any, source: str | Path, cfg: config.Policy) -> Policy:
    """Check the tokenizer, fill in its padding token, and switch on what the parameters ask for."""
    check_vocabulary(tokenizer, source)
    context_of(model.config, source)
    if cfg.prompt_format == "chat":
        check_chat(tokenizer, source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # safe here: padding is masked by length, never by value
    if cfg.gradient_checkpointing:
        _refuse_dropout(model, source)
        model.gradient_checkpointing_enable()
    use_lean_norms(model)
    return Policy(model, tokenizer, cfg.prompt_format)


def _refuse_dropout(model: Any, source: str | Path) -> None:
    """Gradient checkpointing works in training mode alone, in which dropout would change the log-probs that are learned from:
    the ratio to the sampling policy would not be 1 before any update."""
    declared = {n: v for n, v in model.config.get_text_config().to_dict().items() if RANDOM.search(n) and _positive(v)}
    acting = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.p > 0}
    if declared or acting:
        found = ", ".join(f"{name} = {value}" for name, value in (declared or acting).items())
        raise ConfigError(
            f"policy.gradient_checkpointing = true with policy.source = {str(source)!r}, whose model has {found}: the learned "
            "log-probs would differ at random from the sampled ones; allowed: 0. Set it to 0 in the model's config.json, or "
            "policy.gradient_checkpointing: false (no dropout then acts in RL)"
        )


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def resolve_device(cfg: config.Compute) -> torch.device:
    """The device to train on. Raises :class:`ConfigError` when ``compute.device: cuda`` and there is none."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("compute.device = 'cuda', but torch sees no CUDA device; allowed here: 'auto', 'cpu'")
    return torch.device("cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu")


def keep_freed_memory() -> None:
    """Let glibc keep what an update frees: given back to the kernel, it returns page by page at the next one. A no-op elsewhere.

    Tensors of 32 MiB and more still go back at once."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def set_threads(study: config.Study) -> int:
    """Set torch's threads to ``compute.threads``. With 0 to one for the tiny model, whose operations are too small to share (two beside
    a busy core are many times slower than one), else to the cores this process may use. Returns the number.

    Also :func:`keep_freed_memory`."""
    threads = study.compute.threads or (1 if study.policy.source == "tiny" else usable_cores())
    torch.set_num_threads(threads)
    keep_freed_memory()
    return threads
