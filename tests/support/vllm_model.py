"""A tiny model and its vLLM engine."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tepo_core.rollout.vllm_engine import VllmEngine

EOS, VOCABULARY = 2, 25


def tiny_model(tied=True, seed=0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model


def start(model, python, **options):
    return VllmEngine(model, eos_ids=[EOS], pad_id=0, context=128, temperature=0.7, python=python, **options)


PROMPTS = [[3, 4, 5, 3 + i % 20, 3 + i % 7] for i in range(32)]
