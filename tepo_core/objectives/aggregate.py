"""Aggregation: how token terms become one number. Denominators are always those of the whole mini-batch."""

from __future__ import annotations

from torch import Tensor

from tepo_core.objectives.ratios import response_mean
from tepo_core.objectives.types import BatchError, MiniBatchTotals

AGGREGATES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def aggregate(terms_BT: Tensor, valid_BT: Tensor, totals: MiniBatchTotals, kind: str) -> Tensor:
    """This micro-batch's share of the mini-batch value, a scalar; the shares of all micro-batches and ranks just add.

    token_mean: sum / N (DAPO). seq_mean_token_mean: sum_i (1/T_i) sum_t / B (GRPO). seq_mean_token_sum: sum / B.
    seq_mean_token_sum_norm: sum / (B * constant) (Dr. GRPO)."""
    terms_BT = terms_BT * valid_BT
    if kind == "token_mean":
        return terms_BT.sum() / totals.tokens
    if kind == "seq_mean_token_mean":
        return response_mean(terms_BT, valid_BT).sum() / totals.responses
    if kind == "seq_mean_token_sum":
        return terms_BT.sum() / totals.responses
    if kind == "seq_mean_token_sum_norm":
        if not totals.constant or totals.constant <= 0:
            raise BatchError(
                f"aggregate: {kind} needs MiniBatchTotals.constant > 0 (the maximal response length), got {totals.constant}"
            )
        return terms_BT.sum() / (totals.responses * totals.constant)
    raise ValueError(f"aggregate {kind!r} is unknown; allowed: {', '.join(AGGREGATES)}")
