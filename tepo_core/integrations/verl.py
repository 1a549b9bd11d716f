"""Train with the study's objectives inside verl (Ray, FSDP, vLLM): every method becomes a policy loss of verl.

    VERL_USE_EXTERNAL_MODULES=tepo_core.integrations.verl  TEPO_STUDY_PARAMS=params.yaml
    actor_rollout_ref.actor.policy_loss.loss_mode=study:tepo_kl  actor_rollout_ref.actor.calculate_entropy=true

``study:NAME`` is a preset, or a variant of the parameter file that TEPO_STUDY_PARAMS names. verl samples, grades and computes
advantages; loss, denominators and metrics come from ``tepo_core.objectives``. verl's clip_ratio, clip_ratio_c and
kl_loss options have no effect. Entropies reach the loss by two hooks that importing this module installs: the trainer
keeps the entropies it computes beside the old log-probs, and the actor's loss passes them on. Written for verl 0.9.1.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from tepo_core.config import ConfigError, load_study
from tepo_core.objectives.methods import PRESETS, Method, MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.metrics import merge

KEY = "study_old_entropies"
_entropies: ContextVar[tuple[torch.Tensor | None, torch.Tensor | None]] = ContextVar("entropies", default=(None, None))


def policy_loss(method: Method) -> Any:
    """The method as one of verl's policy losses. Raises :class:`ConfigError` when called for what verl cannot supply."""

    def loss(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
    ):
        counts, (entropy_BT, old_entropy_BT) = config.global_batch_info, _entropies.get()
        _check(method, loss_agg_mode, counts, entropy_BT, old_entropy_BT)
        tokens, responses = float(counts["batch_num_tokens"]), float(counts["global_batch_size"])
        totals = MiniBatchTotals(tokens, responses, float(counts.get("loss_scale_factor") or response_mask.shape[-1]))
        batch = TokenBatch(
            log_prob,
            old_log_prob,
            response_mask.bool(),
            advantages,
            entropy_BT=entropy_BT,
            old_entropy_BT=old_entropy_BT,
            weights_BT=rollout_is_weights,
        )
        output = method.loss(batch, totals)
        sums, _ = merge([output])
        metrics = {f"actor/objective/{name}": top / bottom for name, (top, bottom) in sums.items() if bottom}
        return output.loss * counts.get("dp_size", 1), metrics  # FSDP averages gradients, shares must add

    return loss


def _check(method: Method, loss_agg_mode: str, counts: dict, entropy: Any, old_entropy: Any) -> None:
    wanted = method.settings.aggregate.replace("_", "-")
    if method.needs_population or method.needs_mtp or method.needs_exact_kl or method.needs_reference:
        lacking = "verl gives its losses no whole mini-batch, MTP modules, full distributions or reference policy"
    elif loss_agg_mode != wanted:
        lacking = f"it aggregates by {wanted!r}, and loss_agg_mode is {loss_agg_mode!r}; set the same"
    elif counts.get("batch_num_tokens") is None or counts.get("global_batch_size") is None:
        lacking = "global_batch_info must hold batch_num_tokens and global_batch_size, the counts of the whole mini-batch"
    elif method.needs_entropy and entropy is None:
        lacking = "it needs entropies; set actor_rollout_ref.actor.calculate_entropy=true"
    elif method.settings.entropy_test == "exact" and old_entropy is None:
        lacking = "it needs the sampling policy's entropies; old log-probs must be recomputed (no bypass mode)"
    else:
        return
    raise ConfigError(f"method {method.name} in verl: {lacking}")


def pass_entropies(ppo_loss: Any) -> Any:
    """verl's ``ppo_loss`` with the entropies of current and sampling policy within reach of the policy loss."""

    @wraps(ppo_loss)
    def loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        entropy, old = model_output.get("entropy"), data.get(KEY, None)
        old_BT = old.to_padded_tensor(0.0) if old is not None and old.is_nested else old
        token = _entropies.set((None if entropy is None else no_padding_2_padding(entropy, data), old_BT))
        try:
            return ppo_loss(config, model_output, data, dp_group)
        finally:
            _entropies.reset(token)

    return loss


def keep_entropies(compute_old_log_prob: Any) -> Any:
    """verl's ``_compute_old_log_prob`` with a copy of the entropies, which verl itself drops after logging them."""

    @wraps(compute_old_log_prob)
    def compute(self: Any, batch: Any) -> Any:
        result, mfu = compute_old_log_prob(self, batch)
        result.batch[KEY] = result.batch["entropys"].clone()
        return result, mfu

    return compute


def install() -> None:
    """Both hooks, and ``study:NAME`` for every preset and variant. Runs on import, in every process that verl starts."""
    losses.ppo_loss = pass_entropies(losses.ppo_loss)
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # after the first hook: it imports the workers

    RayPPOTrainer._compute_old_log_prob = keep_entropies(RayPPOTrainer._compute_old_log_prob)
    path = os.environ.get("TEPO_STUDY_PARAMS")
    variants = load_study(path).variants if path else {}
    for name in dict.fromkeys([*PRESETS, *variants]):
        register_policy_loss(f"study:{name}")(policy_loss(resolve(name, variants)))


install()
