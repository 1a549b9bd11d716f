"""Off-policy correction: the sampler and the trainer give slightly different log-probs to the same tokens and weights.

The weight is pi_trainer_old / pi_sampler, truncated from above (truncated importance sampling, TIS). It multiplies the
surrogate, not the penalty. What is logged is taken before the truncation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_core.objectives.ratios import exp_ratio, response_mean

CORRECTIONS = ("none", "token", "sequence")


@dataclass(frozen=True)
class Correction:
    """weights_BT: None for kind ``none``. sums / extremes: as in ``LossOutput``, before the truncation."""

    weights_BT: Tensor | None
    sums: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, Tensor]


def off_policy_correction(
    trainer_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor, *, kind: str, cap: float
) -> Correction:
    """Weights min(w, cap), without gradient, and how far trainer and sampler are apart.

    token: w_it = exp(l - l_sampler). sequence: w_i = exp(mean_t (l - l_sampler)), the mean and not the sum, whose
    exponential has no useful range on long responses. Sums: mismatch (|l - l_sampler|), mismatch_kl (k3 estimate of
    KL(sampler || trainer)), correction (w), correction_sq, correction_capped (tokens with w > cap).
    Raises ValueError for an unknown kind or cap < 1."""
    if kind not in CORRECTIONS:
        raise ValueError(f"importance_correction = {kind!r}; allowed: {', '.join(CORRECTIONS)}")
    if not cap >= 1:
        raise ValueError(f"importance_cap = {cap}; allowed: a number >= 1 (a weight of 1 means no mismatch)")
    with torch.no_grad():
        difference_BT = (trainer_logprobs_BT - sampler_logprobs_BT).masked_fill(~mask_BT, 0.0)
        by_response = kind == "sequence"
        log_weight = response_mean(difference_BT, mask_BT) if by_response else difference_BT
        weight_BT = exp_ratio(log_weight).expand_as(difference_BT).masked_fill(~mask_BT, 0.0)
        tokens = mask_BT.count_nonzero()
        kl = torch.expm1(difference_BT.clamp(max=20.0)).sum() - difference_BT.sum()
        sums = {
            "mismatch": (difference_BT.abs().sum(), tokens),
            "mismatch_kl": (kl, tokens),
            "correction": (weight_BT.sum(), tokens),
            "correction_sq": (weight_BT.square().sum(), tokens),
            "correction_capped": ((weight_BT > cap).count_nonzero(), tokens),
        }
        extremes = {"correction_max": weight_BT.amax(), "mismatch_max": difference_BT.abs().amax()}
        return Correction(None if kind == "none" else weight_BT.clamp(max=cap), sums, extremes)
