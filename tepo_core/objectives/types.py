"""What goes into an objective and what comes out: token tensors, global denominators, loss and metrics.

Shapes: B responses of a micro-batch, T padded response length. Rows may be padded on either side and by any width; padding
is whatever ``mask_BT`` says and may hold any value, even NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor


class BatchError(ValueError):
    """The tensors given to an objective are wrong: shape, value, or a tensor that the method needs is missing."""


class NonFiniteError(BatchError):
    """A response holds NaN or infinite values: training has diverged, the call itself is right."""


def zero_padding(values: Tensor | None, valid_BT: Tensor) -> Tensor | None:
    """[B, T] or [B, T, K] values with 0 at padding; they must be finite there."""
    if values is None:
        return None
    return values * (valid_BT[..., None] if values.ndim == 3 else valid_BT)


@dataclass(frozen=True)
class MiniBatchTotals:
    """Denominators of the WHOLE mini-batch, over every micro-batch and rank. The only place they come from.

    tokens: N, response tokens. responses: B. constant: the length that Dr. GRPO divides by (maximal response length)."""

    tokens: float
    responses: float
    constant: float | None = None

    @classmethod
    def from_mask(
        cls, mask_BT: Tensor, *, constant: float | None = None, group: dist.ProcessGroup | None = None
    ) -> MiniBatchTotals:
        """Count a mini-batch; with ``group`` the counts of all ranks are added. Rows without a token are not responses.

        Raises :class:`BatchError` when no rank holds a token."""
        counts = torch.stack([mask_BT.sum(), mask_BT.any(dim=-1).sum()]).to(torch.float64)
        if group is not None:
            dist.all_reduce(counts, group=group)
        tokens, responses = counts.tolist()
        if tokens == 0:
            raise BatchError("mask_BT selects no token in the whole mini-batch; there is nothing to average over")
        return cls(tokens, responses, constant)


@dataclass(frozen=True)
class TokenBatch:
    """Per-token inputs of one micro-batch. Only ``logprobs_BT`` (and what a method asks for) carries gradient.

    logprobs_BT: log pi_theta of the chosen tokens, at the sampling temperature. old_logprobs_BT: the same under the policy
    that sampled them. mask_BT: True on response tokens, end-of-sequence included. advantages_BT: one value a response
    repeated on its tokens, or one a token. entropy_BT / old_entropy_BT: full-vocabulary entropy of the two policies (nats).
    collision_BT: sum_v p_v^2 of the current policy, for credit.
    ref_logprobs_BT: the reference policy. selected_BT: what ``Method.select`` returned for these rows.
    mtp_logprobs_BTK / old_mtp_logprobs_BTK: [..., n - 1] is log pi(o_t+n | o_<t) of the multi-token heads, n = 1..K-1.
    exact_kl_BT: KL over the vocabulary in the direction the method asks for. weights_BT: off-policy correction.
    valid_BT (the mask as 0 and 1) and log_ratio_BT (d = log pi_theta - log pi_old) are filled in by :meth:`prepared`."""

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    mask_BT: Tensor
    advantages_BT: Tensor
    entropy_BT: Tensor | None = None
    old_entropy_BT: Tensor | None = None
    collision_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    selected_BT: Tensor | None = None
    mtp_logprobs_BTK: Tensor | None = None
    old_mtp_logprobs_BTK: Tensor | None = None
    exact_kl_BT: Tensor | None = None
    weights_BT: Tensor | None = None
    valid_BT: Tensor | None = None
    log_ratio_BT: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def rows(self, index: Tensor | slice) -> TokenBatch:
        """Some of the responses, e.g. a micro-batch of a mini-batch."""
        return replace(self, **{name: value[index] for name, value in self.tensors().items()})

    def prepared(self, leaves: Sequence[str] = ("logprobs_BT",)) -> TokenBatch:
        """What objectives work on: a detached copy with zeros at padding, in which the tensors named in ``leaves`` are leaves
        that require gradient (those that did), and d = log pi_theta - log pi_old."""
        valid_BT = self.mask_BT.to(self.logprobs_BT.dtype)
        clean = {"valid_BT": valid_BT}
        for name, value in self.tensors().items():
            if value.is_floating_point():
                mask = self.mask_BT[..., None] if value.ndim == 3 else self.mask_BT
                zeroed = torch.where(mask, value.detach(), 0.0)  # not a product: NaN at padding goes, NaN on a token stays
                clean[name] = zeroed.requires_grad_(value.requires_grad and name in leaves)
        clean["log_ratio_BT"] = clean["logprobs_BT"] - clean["old_logprobs_BT"]
        return replace(self, **clean)

    @classmethod
    def from_packed(cls, lengths: Sequence[int], **packed: Tensor) -> TokenBatch:
        """Rows from packed tensors: every argument is [N] (or [N, K]) with the responses one after another.

        Arguments are the fields of the class without the mask, e.g. ``logprobs_BT=logprobs_N``; gradients pass through."""
        if any(value.shape[0] != sum(lengths) for value in packed.values()):
            sizes = {name: value.shape[0] for name, value in packed.items()}
            raise BatchError(f"lengths add up to {sum(lengths)} tokens, the packed tensors hold {sizes}")
        rows = {
            name: torch.nn.utils.rnn.pad_sequence(value.split(list(lengths)), batch_first=True)
            for name, value in packed.items()
        }
        device = next(iter(packed.values())).device
        mask_BT = torch.arange(max(lengths), device=device) < torch.tensor(list(lengths), device=device)[:, None]
        return cls(mask_BT=mask_BT, **rows)


@dataclass(frozen=True)
class TokenOutput:
    """Detached per-token results, [B, T]. ratio_BT: as the method uses it. signed_BT: dJ/dlogprob, the weight with which each
    token's log-probability enters the gradient, and gradient_BT its size; None where nothing required gradient. credit_BT: its
    size in the logits, |dJ/dlogprob| |e_a - p|; None without ``collision_BT``. The entropy bonus, an exact KL and the place of
    a head's own logits are not in them."""

    ratio_BT: Tensor
    clipped_01: Tensor
    charged_01: Tensor
    signed_BT: Tensor | None
    credit_BT: Tensor | None = None

    @property
    def gradient_BT(self) -> Tensor | None:
        """|dJ/dlogprob|."""
        return None if self.signed_BT is None else self.signed_BT.abs()

    @property
    def clipped_BT(self) -> Tensor:
        """Tokens on which a bound acts or that the method drops, bool."""
        return self.clipped_01.bool()

    @property
    def mask_BT(self) -> Tensor:
        """Tokens on which the KL penalty is charged (TEPO's mask), bool."""
        return self.charged_01.bool()


@dataclass(frozen=True)
class LossOutput:
    """``loss``: this micro-batch's share of the mini-batch loss (-J); shares of micro-batches and ranks just add.

    sums: name -> (numerator, denominator), tensors on the device; add them over micro-batches, see ``metrics.merge``.
    extremes: ratio_max and ratio_min over the micro-batch."""

    loss: Tensor
    sums: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, Tensor]
    token: TokenOutput
