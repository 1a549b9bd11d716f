"""Options of the methods: typed, frozen, unknown ones refused. A method uses exactly the fields of its options class."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tepo_core.config import Strict

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Estimator = Literal["k1", "k2", "k3", "abs", "exact"]


def _bounds(value: Any) -> Any:
    """[low, high], each a number >= 0 or null (no bound); low < 1, since the ratio is positive anyway."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("allowed are null (no clipping) or two numbers [low, high], e.g. [0.2, 0.28]; null removes one bound")
    for name, bound, limit in zip(("low", "high"), value, (1.0, float("inf")), strict=True):
        number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        if bound is not None and not (number and 0 <= bound < limit):
            allowed = "0 <= low < 1 (the ratio is kept above 1 - low)" if name == "low" else "high >= 0 and finite"
            raise ValueError(f"{name} = {bound!r}; allowed: {allowed}, or null for no bound")
    return tuple(None if bound is None else float(bound) for bound in value)


Clip = Annotated[tuple[float | None, float | None] | None, BeforeValidator(_bounds)]


def _interval(value: Any) -> Any:
    """[low, high] with low < high, finite."""
    numbers = isinstance(value, (list, tuple)) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value)
    if not numbers or len(value) != 2 or not -float("inf") < value[0] < value[1] < float("inf"):
        raise ValueError("allowed: two finite numbers [low, high] with low < high")
    return tuple(float(v) for v in value)


Band = Annotated[tuple[float, float], BeforeValidator(_interval)]


def _sampled(kl: dict[str, Any]) -> bool:
    """Whether an estimator of the penalty reads the chosen tokens, so that it matters who sampled them."""
    return {kl.get("estimator", "k3"), kl["gradient"]} != {"exact"}


class KL(Strict):
    """KL penalty -beta * KL. reference: ``old`` (the policy that sampled) or ``ref`` (the base policy). direction:
    KL(policy || reference), as in GRPO, or the other way round. estimator gives the value that is logged and enters the
    loss, gradient the one that is differentiated (default: the same). sampling: tokens come from the policy that sampled;
    ``weighted`` (default) weighs them by p / old, p the first argument, without which no estimator has the value or gradient
    of the KL once the policy has moved; null over the whole vocabulary. mask: tokens it is charged on."""

    reference: Literal["old", "ref"] = "ref"
    direction: Literal["policy_reference", "reference_policy"] = "policy_reference"
    estimator: Estimator = "k3"
    gradient: Estimator | None = None
    sampling: Literal["weighted", "unweighted"] | None = None
    beta: Weight = 0.01
    mask: Literal["all", "positive", "falling", "tepo", "selected"] = "all"

    @model_validator(mode="before")
    @classmethod
    def _gradient(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("gradient") is None:
            values = {**values, "gradient": values.get("estimator", "k3")}
        if isinstance(values, dict) and values.get("sampling") is None and _sampled(values):
            values = {**values, "sampling": "weighted"}
        return values

    @model_validator(mode="after")
    def _sampling(self) -> KL:
        if self.sampling is not None and not _sampled({"estimator": self.estimator, "gradient": self.gradient}):
            raise ValueError(f"sampling = {self.sampling} with estimator exact: no tokens are weighted; set sampling: null")
        return self


Ends = Literal["wrap", "fold", "truncate", "renormalise"]


class Block(Strict):
    """Blocks of MPO. size: K tokens. kind: windows that slide with the token, or disjoint blocks. weights: beta_n uniform, or
    decay^n. form: weighted geometric mean (normalised) or plain product. logprobs: of the backbone, or of MTP heads.

    ends: what a window reads beyond the end of its response, see :func:`~tepo_core.objectives.methods.mpo.block_ratio`. The
    default gives every token weight 1 at ratio 1: wrap; with heads, which say nothing of earlier tokens, fold for sliding
    windows and for disjoint blocks renormalise (truncate with a product)."""

    size: Annotated[int, Field(ge=1)] = 5
    kind: Literal["sliding", "disjoint"] = "sliding"
    weights: Literal["uniform", "geometric"] = "uniform"
    decay: Annotated[float, Field(gt=0, le=1)] | None = None
    form: Literal["normalised", "product"] = "normalised"
    logprobs: Literal["backbone", "mtp"] = "backbone"
    ends: Ends | None = None

    @model_validator(mode="before")
    @classmethod
    def _ends(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("ends") is None:
            blocks = "truncate" if values.get("form") == "product" else "renormalise"
            heads = blocks if values.get("kind") == "disjoint" else "fold"
            values = {**values, "ends": heads if values.get("logprobs") == "mtp" else "wrap"}
        return values

    @model_validator(mode="after")
    def _ends_fit(self) -> Block:
        if self.ends == "wrap" and self.logprobs == "mtp":
            raise ValueError("ends = wrap with logprobs = mtp: no head speaks of earlier tokens; use ends: fold")
        if self.ends == "fold" and self.kind == "disjoint":
            raise ValueError(
                "ends = fold with kind = disjoint: no block begins before the response; allowed: renormalise, truncate, wrap"
            )
        if self.ends == "renormalise" and self.form == "product":
            raise ValueError(
                "ends = renormalise with form = product: a product has no weights to normalise; use ends: truncate"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Block:
        if self.form == "product" and self.weights != "uniform":
            raise ValueError("weights: a plain product has beta_n = 1; use weights: uniform, or form: normalised")
        if (self.weights == "geometric") != (self.decay is not None):
            raise ValueError(
                f"decay = {self.decay} with weights = {self.weights}; give decay exactly when weights is geometric"
            )
        if self.logprobs == "mtp" and self.size == 1:
            raise ValueError("logprobs = mtp with size = 1: a block of one token needs no heads; use logprobs: backbone")
        return self

    def beta(self) -> list[float]:
        """beta_0..beta_K-1 before normalisation."""
        return [(self.decay or 1.0) ** n for n in range(self.size)]


class Common(Strict):
    """Options of every method: aggregation, advantage, KL penalty (TEPO's mask with its entropy test), entropy bonus.

    entropy_margin (nats, default 1e-5): by how much the entropy must fall in the exact test. It is above the rounding
    noise between sampling and training, so that nothing has fallen while the two policies are still the same."""

    aggregate: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = "token_mean"
    advantage: Literal["group", "centred", "loo"] = "group"
    kl: KL | None = None
    entropy_test: Literal["exact", "first_order", "covariance"] | None = None
    entropy_margin: Weight | None = None
    entropy_bonus: Weight = 0.0

    @model_validator(mode="before")
    @classmethod
    def _margin(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("entropy_test") == "exact" and values.get("entropy_margin") is None:
            values = {**values, "entropy_margin": 1e-5}
        return values

    @model_validator(mode="after")
    def _masks(self) -> Common:
        mask = self.kl.mask if self.kl else None
        if mask in ("tepo", "falling") and self.entropy_test is None:
            raise ValueError(f"entropy_test is missing and kl.mask = {mask} needs it; allowed: exact, first_order, covariance")
        if mask not in ("tepo", "falling") and self.entropy_test is not None:
            raise ValueError(
                f"entropy_test = {self.entropy_test} is used only with kl.mask tepo or falling, here "
                f"{f'kl.mask is {mask}' if self.kl else 'kl is null'}; set entropy_test: null"
            )
        if self.entropy_margin is not None and self.entropy_test != "exact":
            raise ValueError("entropy_margin is used only with entropy_test: exact; set entropy_margin: null")
        if mask == "selected" and not isinstance(self, KLCov):
            raise ValueError("kl.mask = selected: only kl_cov selects tokens; allowed here: all, positive, falling, tepo")
        return self


class Weighted(Common):
    """Options of methods with a token ratio and bounds on it (GMPO, CISPO)."""

    clip: Clip = None


class Clipped(Weighted):
    """Options of the PPO-clip family, where the ratio is a choice. p: exponent of the power mean. block: see MPO.
    dual_clip: c > 1, floor c * A of the terms with A < 0."""

    ratio: Literal["token", "sequence", "sequence_token", "block", "power_mean"] = "token"
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    p: Annotated[float, Field(allow_inf_nan=False)] | None = None
    block: Block | None = None

    @model_validator(mode="after")
    def _ratio_options(self) -> Clipped:
        for option, ratio in (("p", "power_mean"), ("block", "block")):
            given = getattr(self, option) is not None
            if given and self.ratio != ratio:
                raise ValueError(f"{option} is used only with ratio: {ratio}, here ratio is {self.ratio}; set {option}: null")
            if not given and self.ratio == ratio:
                raise ValueError(f"{option} is missing and ratio: {ratio} needs it")
        return self


class SoftGate(Common):
    """Options of SAPO: temperatures of the gate for A > 0 and A <= 0."""

    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


class ClipCov(Weighted):
    """Options of Clip-Cov. share: budget of dropped tokens, of the mini-batch's. band: candidates have low < Cov < high."""

    share: Share = 2e-4
    band: Band = (1.0, 5.0)


class KLCov(Common):
    """Options of KL-Cov. share: tokens with the largest covariance that are charged, of the mini-batch's."""

    share: Share = 2e-3
