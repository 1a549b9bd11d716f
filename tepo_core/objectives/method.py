"""What a method is: a preset with its options resolved, and its objective J with loss, metrics and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_core.objectives import metrics, population
from tepo_core.objectives.aggregate import aggregate
from tepo_core.objectives.options import ClipCov, Common, KLCov
from tepo_core.objectives.penalties import kl_penalty, penalty_mask
from tepo_core.objectives.surrogates import Surrogate
from tepo_core.objectives.types import LossOutput, MiniBatchTotals, TokenBatch, TokenOutput, zero_padding
from tepo_core.objectives.validation import check_present, validate

Objective = Callable[[TokenBatch, Any], Surrogate]


@dataclass(frozen=True)
class Preset:
    """A named objective. surrogate(batch, options) returns the terms of J. equation: J in LaTeX, for reports. status:
    ``known`` (from the paper's text or code), ``reconstructed`` (parts of it are unknown and options), or ``own``.
    inert_at_zero: whether a response with A = 0 adds nothing to the gradient of the surrogate."""

    name: str
    surrogate: Objective
    options: type[Common]
    defaults: Mapping[str, Any]
    source: str
    title: str
    equation: str
    status: str
    inert_at_zero: bool


@dataclass(frozen=True)
class Method:
    """A resolved objective: frozen, validated. See :meth:`loss`."""

    name: str
    _preset: Preset
    settings: Common

    @property
    def preset(self) -> str:
        """Name of the preset."""
        return self._preset.name

    @property
    def source(self) -> str:
        """Where the equation comes from."""
        return self._preset.source

    @cached_property
    def options(self) -> dict[str, Any]:
        """Every option the method uses with its resolved value, as JSON types."""
        return self.settings.model_dump(mode="json")

    @property
    def advantage(self) -> str:
        """Kind of advantage: group, centred or loo (see :mod:`tepo_core.credit.group`)."""
        return self.settings.advantage

    @property
    def needs_reference(self) -> bool:
        """Whether ``ref_logprobs_BT`` must be given (unless the exact KL is)."""
        kl = self.settings.kl
        return kl is not None and kl.reference == "ref"

    @property
    def needs_exact_kl(self) -> bool:
        """Whether ``exact_kl_BT`` must be given, with gradient when it is the gradient estimator."""
        kl = self.settings.kl
        return kl is not None and "exact" in (kl.estimator, kl.gradient)

    @property
    def needs_population(self) -> bool:
        """Whether :meth:`select` must run on the whole mini-batch before the loss."""
        return isinstance(self.settings, (ClipCov, KLCov)) or self.settings.entropy_test == "covariance"

    @property
    def needs_mtp(self) -> bool:
        """Whether log-probs of multi-token-prediction heads must be given."""
        return self.mtp_modules > 0

    @property
    def mtp_modules(self) -> int:
        """Number of multi-token-prediction modules the policy must have: K - 1, or 0."""
        block = getattr(self.settings, "block", None)
        return block.size - 1 if block is not None and block.logprobs == "mtp" else 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss itself (not only its metrics) reads ``entropy_BT``."""
        return self.needs_entropy_grad or self.settings.entropy_test in ("exact", "first_order")

    @property
    def needs_entropy_grad(self) -> bool:
        """Whether ``entropy_BT`` must carry gradient (entropy bonus)."""
        return self.settings.entropy_bonus > 0

    @property
    def inert_without_advantage(self) -> bool:
        """Whether a response whose advantage is 0 adds nothing to the gradient, so that its forward pass may be left out."""
        kl = self.settings.kl
        charged = kl is not None and kl.beta > 0 and kl.mask not in ("tepo", "positive")
        return self._preset.inert_at_zero and not (self.needs_population or self.needs_entropy_grad or charged)

    def select(
        self,
        logprobs_BT: Tensor,
        advantages_BT: Tensor,
        mask_BT: Tensor,
        generator: torch.Generator,
        group: dist.ProcessGroup | None = None,
        identities_BT: Tensor | None = None,
    ) -> Tensor:
        """Tokens chosen by their covariance over the WHOLE mini-batch (and all ranks of ``group``), bool [B, T].

        KL-Cov: the largest. Clip-Cov: a random few inside the band (these are dropped). entropy_test covariance: all with
        Cov > 0. Responses whose advantage is 0 are not in the population, and none of their tokens is chosen. Seed
        ``generator`` per (run, step, update), equal on all ranks. identities_BT: of :func:`population.identities`, where a
        row is not one response."""
        if identities_BT is None:
            identities_BT = population.identities(logprobs_BT, advantages_BT, mask_BT)
        population_BT = mask_BT & (advantages_BT != 0)
        logprobs_N, mine = population.gather_tokens(logprobs_BT.detach()[population_BT], group)
        advantages_N, _ = population.gather_tokens(advantages_BT[population_BT], group)
        identities_N, _ = population.gather_tokens(identities_BT[population_BT], group)
        covariance_N = population.centred_products(logprobs_N, advantages_N)
        match self.settings:
            case ClipCov(share=share, band=(low, high)):
                chosen_N = population.random_in_band(covariance_N, share, low, high, generator, identities_N)
            case KLCov(share=share):
                chosen_N = population.largest(covariance_N, share, identities_N)
            case _:
                chosen_N = covariance_N > 0
        return torch.zeros_like(mask_BT).masked_scatter(population_BT, chosen_N[mine])

    def validate(self, batch: TokenBatch) -> None:
        """Check a mini-batch before the loss; reads values, so it synchronises: call it once, outside the hot path.

        Raises ``BatchError`` naming the tensor and the response: shapes, NaN or infinite log-probs, no token at all,
        a tensor that the method needs and that is missing, advantages that vary inside a response where one is needed."""
        validate(self, batch)

    def loss(self, batch: TokenBatch, totals: MiniBatchTotals) -> LossOutput:
        """Loss -J of a micro-batch, divided by the denominators of the whole mini-batch. Never waits for a device.

        A backward pass per micro-batch, gradients added (over ranks too), gives the gradient of the mini-batch. The
        gradient of J is worked out here once and handed to the backward pass: that is where ``token.signed_BT`` comes from.
        Second derivatives are refused by torch. Raises ``BatchError`` for a tensor that is missing; the other checks are
        :meth:`validate`'s."""
        check_present(self, batch)
        wanted = [name for name, needed in self._carries_gradient().items() if needed]
        with torch.enable_grad():
            tokens = batch.prepared(wanted)
            leaves = [name for name in wanted if getattr(tokens, name) is not None and getattr(tokens, name).requires_grad]
            objective, penalty, surrogate, kl_BT, charged_BT = self._objective(tokens, totals)
        loss = -objective.detach() if penalty is None else penalty.detach() - objective.detach()
        sampled = penalty is not None and self.settings.kl.gradient != "exact"
        signed_BT, kl_gradient = None, metrics.penalty_sums(loss, None, None) if sampled else {}
        if leaves:
            inputs = [getattr(tokens, name) for name in leaves]
            gradients = [zero_padding(part, tokens.valid_BT) for part in gradients_of(-objective, inputs)]
            if penalty is not None:
                of_kl = [zero_padding(part, tokens.valid_BT) for part in gradients_of(penalty, inputs)]
                if sampled:
                    own = leaves.index("logprobs_BT")
                    kl_gradient = metrics.penalty_sums(loss, of_kl[own], gradients[own])
                gradients = [added(*pair) for pair in zip(gradients, of_kl, strict=True)]
            loss = with_gradient(loss, [getattr(batch, name) for name in leaves], gradients)
            signed_BT = token_gradient(dict(zip(leaves, gradients, strict=True)))
        with torch.no_grad():
            clipped_BT = metrics.clipped_tokens(surrogate, tokens.valid_BT)
            ratio_BT, credit_BT = surrogate.ratio_BT.expand_as(clipped_BT), logit_norms(tokens, signed_BT)
            return LossOutput(
                loss=loss,
                sums=metrics.token_sums(tokens, surrogate, clipped_BT, kl_BT, charged_BT) | kl_gradient,
                extremes=metrics.extremes(surrogate.ratio_BT, tokens.valid_BT),
                token=TokenOutput(ratio_BT, clipped_BT, charged_BT, signed_BT, credit_BT),
            )

    def _objective(
        self, tokens: TokenBatch, totals: MiniBatchTotals
    ) -> tuple[Tensor, Tensor | None, Surrogate, Tensor | None, Tensor]:
        """The two parts of J, aggregate(weights * surrogate + bonus * H) minus aggregate(beta * mask * KL), and what the
        metrics need."""
        options, penalty, kl_BT, charged_BT = self.settings, None, None, torch.zeros_like(tokens.valid_BT)
        surrogate = self._preset.surrogate(tokens, options)  # ratio and clip
        terms_BT = surrogate.terms_BT
        if tokens.weights_BT is not None:
            terms_BT = terms_BT * tokens.weights_BT
        if (kl := options.kl) is not None:
            kl_BT = kl_penalty(tokens, **kl.model_dump(include={"reference", "direction", "estimator", "gradient", "sampling"}))
            charged_BT = penalty_mask(tokens, kl.mask, options.entropy_test, options.entropy_margin)
            penalty = aggregate(kl.beta * charged_BT * kl_BT, tokens.valid_BT, totals, options.aggregate)
        if options.entropy_bonus > 0:
            terms_BT = terms_BT + options.entropy_bonus * tokens.entropy_BT
        objective = aggregate(terms_BT, tokens.valid_BT, totals, options.aggregate)
        return objective, penalty, _detached(surrogate), None if kl_BT is None else kl_BT.detach(), charged_BT

    def _carries_gradient(self) -> dict[str, bool]:
        return {
            "logprobs_BT": True,
            "entropy_BT": self.needs_entropy_grad,
            "mtp_logprobs_BTK": self.needs_mtp,
            "exact_kl_BT": self.needs_exact_kl,
        }


def _detached(surrogate: Surrogate) -> Surrogate:
    return Surrogate(*[None if part is None else part.detach() for part in surrogate])


def gradients_of(value: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Derivatives of a scalar, None for an input it does not depend on; what it shares with another scalar stays usable."""
    if not value.requires_grad:
        return [None] * len(inputs)
    return torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=True)


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two derivatives, either of which may be absent."""
    return one if other is None else other if one is None else one + other


class _WithGradient(torch.autograd.Function):
    """A scalar whose derivatives are known: backward multiplies them by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *inputs_and_gradients: Tensor | None) -> Tensor:
        ctx.gradients = inputs_and_gradients[count:]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        known = [None if gradient is None else upstream * gradient for gradient in ctx.gradients]
        return (None, None, *known, *[None] * len(known))


def with_gradient(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """``value`` as a function of ``inputs`` with the derivatives ``gradients`` (None: does not depend on it)."""
    return _WithGradient.apply(value, len(inputs), *inputs, *gradients)


def token_gradient(gradients: Mapping[str, Tensor | None]) -> Tensor | None:
    """dJ/dlogprob of every token, [B, T], so right for every ratio; ``gradients`` are those of the loss.

    What a multi-token head says about o_t+n counts for token t+n."""
    own_BT, heads_BTK = gradients.get("logprobs_BT"), gradients.get("mtp_logprobs_BTK")
    if own_BT is None or heads_BTK is None:
        return None if own_BT is None else -own_BT
    total_BT = own_BT.clone()
    for n in range(1, min(heads_BTK.shape[-1], own_BT.shape[-1] - 1) + 1):
        total_BT[:, n:] += heads_BTK[:, :-n, n - 1]
    return total_BT.neg_()


def logit_norms(tokens: TokenBatch, signed_BT: Tensor | None) -> Tensor | None:
    """|dJ/dz| of each token alone, [B, T], z the logits: |dJ/dlogprob| |e_a - p|, |e_a - p|^2 = 1 - 2 p_a + sum_v p_v^2."""
    if signed_BT is None or tokens.collision_BT is None:
        return None
    square_BT = 1 - 2 * tokens.logprobs_BT.detach().exp() + tokens.collision_BT
    return signed_BT.abs() * square_BT.clamp(min=0).sqrt()
