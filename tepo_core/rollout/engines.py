"""Which engine samples: one place that reads ``rollout.engine``."""

from __future__ import annotations

from tepo_core.config import ConfigError, Study, Train
from tepo_core.model.policy import Policy
from tepo_core.rollout.types import Engine


def make_engine(study: Study, policy: Policy, train: Train) -> Engine:
    """The engine that ``rollout.engine`` names, holding the policy's weights. Close it when done."""
    cfg = study.rollout
    if cfg.engine == "vllm":
        if train.top_p < 1:
            raise ConfigError(
                f"train.top_p = {train.top_p}: vLLM gives log-probs after top-p, which cannot be compared with the trainer's; "
                "set train.top_p: 1.0, or rollout.engine: transformers"
            )
        from tepo_core.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            policy.model,
            eos_ids=policy.eos_ids,
            pad_id=policy.pad_id,
            context=policy.context,
            temperature=train.temperature,
            gpu_memory_share=cfg.gpu_memory_share,
            batch_size=cfg.batch_size,
        )
    from tepo_core.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(policy.model, pad_id=policy.pad_id, eos_ids=policy.eos_ids, batch_size=cfg.batch_size)
