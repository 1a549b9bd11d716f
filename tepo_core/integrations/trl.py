"""Train with the study's objectives inside TRL: :class:`StudyGRPOTrainer` is ``trl.GRPOTrainer`` with another loss.

    trainer = StudyGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=..., method="tepo_kl")

TRL samples, grades and computes advantages; loss, denominators and metrics come from ``tepo_core.objectives``. The
denominators are those of the optimiser step, over all its micro-batches and processes. Metrics appear as ``objective/...``.
Written for TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from tepo_core.config import ConfigError
from tepo_core.objectives.methods import Method, MiniBatchTotals, TokenBatch, resolve
from tepo_core.objectives.metrics import merge

SCALE_REWARDS = {"group": ("group", True), "centred": ("none", False)}
UNUSED = {"top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "entropy_coef": 0.0}


class StudyGRPOTrainer(GRPOTrainer):
    """``method``: a preset or a key of ``variants``, as in params.yaml. TRL's own loss options (loss_type, epsilon, delta,
    importance_sampling_level, use_bias_correction_kl) have no effect. Raises :class:`ConfigError` for what TRL cannot supply
    or would contradict."""

    def __init__(
        self,
        *positional: Any,
        args: GRPOConfig,
        method: str,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        **named: Any,
    ) -> None:
        self.method = resolve(method, variants)
        _check(self.method, args)
        super().__init__(*positional, args=args, **named)
        self._outputs: list[Any] = []

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and buffered is not self._buffered_inputs:
            for part in self._buffered_inputs:  # the policy that sampled, before its first update
                with torch.no_grad():
                    part["old_per_token_logps"], part["old_entropies"] = self._policy(self.model, part)
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        logprobs_BT, entropy_BT = self._policy(model, inputs)
        mask_BT = _mask(inputs)
        advantages = inputs["advantages"]
        batch = TokenBatch(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=inputs.get("old_per_token_logps", logprobs_BT.detach()),
            mask_BT=mask_BT,
            advantages_BT=(advantages[:, None] if advantages.ndim == 1 else advantages).expand(mask_BT.shape),
            entropy_BT=entropy_BT if self.method.needs_entropy_grad else entropy_BT.detach(),
            old_entropy_BT=inputs.get("old_entropies", entropy_BT.detach()),
            ref_logprobs_BT=inputs.get("ref_per_token_logps"),
            weights_BT=inputs.get("importance_sampling_ratio") if self.use_vllm else None,
        )
        output = self.method.loss(batch, self._totals(mask_BT))
        self._outputs.append(output)
        if self.accelerator.sync_gradients or not self.model.training:
            group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
            sums, values = merge(self._outputs, group)
            ratios = {name: top / bottom for name, (top, bottom) in sums.items() if bottom}
            for name, value in (ratios | values).items():
                self._metrics["train" if self.model.training else "eval"][f"objective/{name}"].append(value)
            self._outputs.clear()
        return output.loss * self.accelerator.num_processes  # data parallelism averages gradients, shares must add

    def _totals(self, mask_BT: torch.Tensor) -> MiniBatchTotals:
        """Counts of the whole optimiser step (of this batch alone in evaluation)."""
        masks = [mask_BT]
        if self.model.training:
            steps, parts = self.current_gradient_accumulation_steps, len(self._buffered_inputs)
            first = self._step // steps * steps
            masks = [_mask(self._buffered_inputs[i % parts]) for i in range(first, first + steps)]
        group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        width = max(mask.shape[1] for mask in masks)
        rows = torch.cat([torch.nn.functional.pad(mask, (0, width - mask.shape[1])) for mask in masks])
        return MiniBatchTotals.from_mask(rows, constant=float(self.max_completion_length), group=group)

    def _policy(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the completion tokens."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logprobs_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(model, ids, attention, width, compute_entropy=True)
        return logprobs_BT, entropy_BT


def _check(method: Method, args: GRPOConfig) -> None:
    if method.needs_population or method.needs_mtp or method.needs_exact_kl:
        raise ConfigError(f"method {method.name}: needs whole mini-batches, MTP modules or full distributions; TRL has none")
    if args.scale_rewards not in (allowed := SCALE_REWARDS.get(method.advantage, ())):
        raise ConfigError(
            f"scale_rewards = {args.scale_rewards!r}: method {method.name} has advantage {method.advantage}; allowed: "
            f"{', '.join(map(repr, allowed)) or 'none, TRL has no such advantage'}"
        )
    if (args.beta != 0.0) != method.needs_reference:
        raise ConfigError(
            f"beta = {args.beta}: TRL loads a reference policy exactly when beta is not 0, and method {method.name} "
            f"{'needs one; set any beta > 0' if method.needs_reference else 'needs none; set beta = 0'} "
            "(the coefficient itself is the method's kl.beta)"
        )
    for option, neutral in UNUSED.items():
        if getattr(args, option, neutral) != neutral:
            raise ConfigError(f"{option} = {getattr(args, option)!r} is not used here; allowed: {neutral!r}")


def _mask(inputs: dict[str, Any]) -> torch.Tensor:
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()
