"""Penalties: KL estimators with value and gradient chosen apart, TEPO's entropy test, and the masks they are charged on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from tepo_core.objectives.ratios import exp_ratio
from tepo_core.objectives.surrogates import positive
from tepo_core.objectives.types import TokenBatch

NOISE = 1e-5  # nats; above what sampling and training differ by in float32, and the same as the entropy test's margin


def kl_estimate(difference_BT: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(p || q) from x = log p - log q on tokens sampled from p (Schulman, "Approximating KL divergence").

    k1 = x (unbiased, signed); k2 = x^2 / 2; k3 = exp(-x) - 1 + x (unbiased, >= 0); abs = |x| (the KL-Cov code), 0 below
    1e-5 nats."""
    if estimator == "k1":
        return difference_BT
    if estimator == "k2":
        return 0.5 * difference_BT.square()
    if estimator == "k3":
        return torch.expm1((-difference_BT).clamp(max=20.0)) + difference_BT
    if estimator == "abs":
        return hardshrink(difference_BT, NOISE).abs()  # 0 with gradient 0 where |x| is rounding: there its sign is noise
    raise ValueError(f"KL estimator {estimator!r} is unknown; allowed: k1, k2, k3, abs")


def sampling_weight(batch: TokenBatch, *, reference: str, direction: str) -> Tensor | None:
    """w = p / old of the chosen tokens, [B, T], p the first argument of the KL; None where p is the policy that sampled.

    E_old[w f] = E_p[f] at every state that old visited. With p = policy w is the token ratio, and carries gradient; with
    p = ref it is fixed. Limited to e^-20 .. e^20 like every ratio."""
    if direction == "policy_reference":
        return exp_ratio(batch.log_ratio_BT)
    return None if reference == "old" else exp_ratio(batch.ref_logprobs_BT - batch.old_logprobs_BT)


def kl_penalty(
    batch: TokenBatch, *, reference: str, direction: str, estimator: str, gradient: str, sampling: str | None
) -> Tensor:
    """KL a token, [B, T]: the value of ``estimator`` with the gradient of ``gradient``. ``batch`` is prepared.

    Tokens come from old, not from the first argument p of the KL. ``sampling`` weighted: estimates times w = p / old
    (DeepSeek-V3.2, arXiv 2512.02556, for k3), and in expectation over old
      k1, k3   value and gradient of the KL, in either direction
      k2       the gradient of KL(policy || .), where w is held: E_p[x d log p] is exact; its value is E_p[x^2] / 2
      abs      E_p[|x|] and its gradient, which is no KL
    unweighted: means under old of the same terms, which are those of the KL only while p = old. exact uses no tokens."""

    def estimate(kind: str) -> Tensor:
        if kind == "exact":
            return batch.exact_kl_BT
        reference_BT = batch.old_logprobs_BT if reference == "old" else batch.ref_logprobs_BT
        difference_BT = batch.logprobs_BT - reference_BT
        plain_BT = kl_estimate(difference_BT if direction == "policy_reference" else -difference_BT, kind)
        weight_BT = sampling_weight(batch, reference=reference, direction=direction) if sampling == "weighted" else None
        if weight_BT is None:
            return plain_BT
        return plain_BT * (weight_BT.detach() if kind == "k2" else weight_BT)

    if gradient == estimator:
        return estimate(estimator)
    slope_BT = estimate(gradient)
    return estimate(estimator).detach() + slope_BT - slope_BT.detach()


def entropy_fell(batch: TokenBatch, test: str, margin: float) -> Tensor:
    """1 on tokens whose entropy counts as falling, [B, T] (TEPO's 1(dH < 0)). No gradient passes.

    exact: H_theta < H_old - margin over the full vocabulary. first_order: log pi + H_theta > 0, the sign of the exact
    derivative dH/dz = -p (log p + H) along the chosen token's own logit. covariance: (log pi - mean)(A - mean) > 0 over the
    mini-batch, found beforehand by ``Method.select``."""
    if test == "exact":
        return positive(batch.old_entropy_BT - margin - batch.entropy_BT)
    if test == "first_order":
        return positive(batch.logprobs_BT + batch.entropy_BT)
    if test == "covariance":
        return batch.selected_BT.to(batch.valid_BT.dtype)
    raise ValueError(f"entropy test {test!r} is unknown; allowed: exact, first_order, covariance")


def penalty_mask(batch: TokenBatch, mask: str, entropy_test: str | None, entropy_margin: float | None) -> Tensor:
    """1 on tokens on which the KL is charged, [B, T]. ``batch`` is prepared.

    all; positive: A > 0; falling: the entropy fell; tepo: both; selected: the tokens of ``Method.select``."""
    if mask == "all":
        return batch.valid_BT
    if mask == "selected":
        return batch.selected_BT * batch.valid_BT
    if mask == "positive":
        return positive(batch.advantages_BT)
    fell_BT = entropy_fell(batch, entropy_test, entropy_margin) * batch.valid_BT
    return fell_BT * positive(batch.advantages_BT) if mask == "tepo" else fell_BT
