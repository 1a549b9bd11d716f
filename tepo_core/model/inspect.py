"""What a policy's files must be for the study to use it, looked at before any work: whole weights, a context, a chat template.

Reads headers, never weights, so that ``tepo plan`` can ask; :mod:`tepo_core.model.policy` asks again when it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tepo_core.config import ConfigError

LFS_POINTER = b"version https://git-lfs"
LARGEST_HEADER = 100 * 2**20  # bytes; the limit of the safetensors format
INDEX = "model.safetensors.index.json"
MARKER = "zqxj"
FETCH = "fetch the file again (a clone with git-lfs: 'git lfs pull'), or name another policy.source"


def check_folder(folder: Path) -> None:
    """A folder with config.json and whole *.safetensors files. Raises :class:`ConfigError` naming the file, what is wrong with it
    and what to do."""
    if not folder.is_dir():
        raise ConfigError(f"policy folder {folder}: no such folder; run the stage that writes it (warmup or train) first")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"policy folder {folder}: config.json is missing; remove the run and run its stage again")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(
            f"policy folder {folder}: no *.safetensors file, so there are no weights to load (other formats are refused); "
            "remove the run and run its stage again, or convert the weights with save_pretrained"
        )
    for path in sorted(folder.glob("*.json")):
        _refuse_pointer(path)
    for path in weights:
        check_safetensors(path)
    if (folder / INDEX).is_file():
        named = set(_json(folder / INDEX).get("weight_map", {}).values())
        if missing := sorted(named - {path.name for path in weights}):
            raise ConfigError(f"{folder / missing[0]}: missing, though {INDEX} names it ({len(missing)} in all); {FETCH}")


def check_safetensors(path: Path) -> None:
    """The file must be as long as its header says. Raises :class:`ConfigError`."""
    _refuse_pointer(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise ConfigError(f"{path}: {size} bytes, no safetensors file or cut inside its header; {FETCH}")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ConfigError(f"{path}: its header is no safetensors header; {FETCH}") from None
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise ConfigError(f"{path}: {size} bytes, but its header describes {wanted}: cut short or damaged; {FETCH}")


def check_gguf(path: Path, source: str) -> None:
    """A GGUF file by its first bytes. Raises :class:`ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"policy.source = {source!r}: no such file")
    _refuse_pointer(path)
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"{path}: not a GGUF file (it does not begin with 'GGUF'); {FETCH}")


def context_of(model_config: Any, source: str | Path) -> int:
    """Longest sequence in tokens, of the text model where there are several. Raises :class:`ConfigError` where none is given."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    value = getattr(text, "max_position_embeddings", None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"policy.source = {str(source)!r}: config.json gives no max_position_embeddings (found: {value!r}; model_type = "
            f"{getattr(text, 'model_type', None)!r}), so the longest sequence is unknown; write it into the config.json of a local copy"
        )
    return value


def check_chat(tokenizer: Any, source: str | Path) -> None:
    """The tokenizer's chat template must render a prompt, and a prompt with its answer. Raises :class:`ConfigError`."""
    remedy = "set policy.prompt_format: plain, or mend chat_template.jinja (or 'chat_template' in tokenizer_config.json)"
    about = f"policy.prompt_format = 'chat': the tokenizer of policy.source = {str(source)!r}"
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"{about} has no chat template; {remedy}")
    prompt = [{"role": "user", "content": MARKER}]
    for messages, more in ((prompt, True), ([*prompt, {"role": "assistant", "content": MARKER}], False)):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=more)
        except Exception as error:  # a template raises what it likes
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            raise ConfigError(f"{about} has a chat template that fails ({type(error).__name__}: {reason}); {remedy}") from None
        if MARKER not in text:
            raise ConfigError(f"{about} has a chat template that drops the prompt; {remedy}")


def check_vocabulary(tokenizer: Any, source: str | Path) -> None:
    """A response needs a token that ends it. Raises :class:`ConfigError`."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"policy.source = {str(source)!r}: its tokenizer has no EOS token; set 'eos_token' in tokenizer_config.json"
        )


def _refuse_pointer(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ConfigError(f"{path}: a git-lfs pointer, not the file itself; {FETCH}")


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); {FETCH}") from None
    return value if isinstance(value, dict) else {}
