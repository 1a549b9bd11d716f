"""Between text and token ids: what is sampled from, and what is graded, whatever convenience settings a tokenizer carries.

A tokenizer's defaults are made for reading: decoding drops special tokens (``</think>`` may be one), tidies spaces before
punctuation and strips the first one; encoding may close a text with EOS. None of that is what the model saw or said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt that a response continues: what the tokenizer puts before a text (BOS, where the model was trained with
    one) and the text; never what it puts behind (``add_eos_token``), nor a second BOS where the text begins with one."""
    plain = _encode(tokenizer, prompt, False)
    dressed = _encode(tokenizer, prompt, True)
    size = len(plain)
    start = next((i for i in range(len(dressed) - size + 1) if dressed[i : i + size] == plain), 0)
    before = dressed[:start]
    return plain if plain[: len(before)] == before else before + plain


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    # truncation and padding may be stored in tokenizer.json
    return list(tokenizer(text, add_special_tokens=special, truncation=False, padding=False)["input_ids"])


def response_text(tokenizer: Any, ids: Sequence[int], eos_ids: Collection[int]) -> str:
    """Text of a response, character by character what the model said, without the ``eos_ids`` that end it.

    It is decoded behind another token, as it was sampled: some decoders strip the space that begins a text, and with it the
    indentation of a program's first line."""
    end = len(ids)
    while end and ids[end - 1] in eos_ids:
        end -= 1
    said, first = list(ids[:end]), tokenizer.eos_token_id
    text, before = exact_text(tokenizer, [first, *said]), exact_text(tokenizer, [first])
    return text[len(before) :] if text.startswith(before) else exact_text(tokenizer, said)


def exact_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Token ids as text with special tokens in it, nothing tidied."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False, spaces_between_special_tokens=False
    )
