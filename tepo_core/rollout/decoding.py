"""One token at a time: a cache that is written in place and, on a CPU, attention that reads it where it lies.

transformers joins the cache and the new token into new tensors at every step and, when queries share keys and a mask is
there, copies every key once more for each query head. With a tiny policy the two cost more than the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BLOCK = 32
"""Tokens by which a full buffer grows."""
NAME = "tepo_decoding"
PLAIN = {"llama", "mistral", "phi3", "qwen2", "qwen3"}
"""``model_type`` of the architectures whose attention is nothing but softmax(q k / sqrt(d) + mask) v."""


class RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, S, D] as views of buffers with room for more tokens."""

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.buffers, self.length = [layer.keys, layer.values], layer.get_seq_length()
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        if end > self.buffers[0].shape[-2]:
            self.buffers = [self._grown(buffer, end) for buffer in self.buffers]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        self._show()
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._show()

    def _grown(self, buffer: Tensor, end: int) -> Tensor:
        B, H, _, D = buffer.shape
        grown = buffer.new_empty(B, H, end + BLOCK, D)
        grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)


def roomy(cache: DynamicCache) -> DynamicCache:
    """The same cache, its plain layers written in place from now on. Sliding windows stay as they are.

    Raises ``ValueError`` for layers of another kind (linear attention, hybrids): their state cannot be handed from one row
    to another here."""
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(
                f"the model's cache has a {type(layer).__name__}, which rollout.engine: transformers cannot sample with; "
                "use rollout.engine: vllm, or a model with plain or sliding attention"
            )
    cache.layers = [RoomyLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def is_plain(model: Any, cache: DynamicCache) -> bool:
    """Whether every layer of a known architecture sees every token, by SDPA: one mask then serves all of them."""
    known = model.config.model_type in PLAIN and model.config._attn_implementation in ("sdpa", NAME)
    return known and all(type(layer) is RoomyLayer for layer in cache.layers)


@contextmanager
def decoding_attention(model: Any) -> Iterator[None]:
    """Inside, a known architecture that uses SDPA on a CPU attends by :func:`attention_forward`; any other is left as it is."""
    config, device = model.config, next(model.parameters()).device
    if config.model_type not in PLAIN or config._attn_implementation != "sdpa" or device.type != "cpu":
        yield
        return
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA's result for one query token. query [B, H, 1, D]; key, value [B, heads of keys, S, D], read where they lie.

    Prompts, other dtypes than float32 and masks that are not boolean go to transformers' own function."""
    B, H, T, D = query.shape
    ours = T == 1 and query.dtype == torch.float32 and (attention_mask is None or attention_mask.dtype == torch.bool)
    if not ours or query.requires_grad:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    K = key.shape[1]
    query_BKGD = query.reshape(B, K, H // K, D) * (D**-0.5 if scaling is None else scaling)
    scores_BKGS = torch.matmul(query_BKGD, key.transpose(-1, -2))
    if attention_mask is not None:
        scores_BKGS.masked_fill_(attention_mask.logical_not(), -torch.inf)
    return torch.matmul(scores_BKGS.softmax(-1), value).view(B, 1, H, value.shape[-1]), None
