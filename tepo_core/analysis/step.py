"""One update looked at token by token, for notebooks/one_step.ipynb: which responses to show, and what each token adds to J."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_core.model.policy import Policy
from tepo_core.objectives.aggregate import aggregate
from tepo_core.objectives.types import MiniBatchTotals
from tepo_core.tasks.problem import TOKEN_KINDS
from tepo_core.training.experience import Experience


@dataclass(frozen=True)
class Shown:
    """A response as pictures show it. row: in the experience. decisive: for each token, whether its fact is planted wrong."""

    row: int
    texts: list[str]
    decisive: list[bool]
    advantage: float
    correct: bool


def shown(experience: Experience, row: int, policy: Policy) -> Shown:
    """The response of ``row``, end of sequence included; no token is decisive where the task knows none."""
    texts = policy.token_texts(experience.rollouts.response_ids[row])
    kinds = [""] * len(texts) if experience.kinds is None else [TOKEN_KINDS[kind] for kind in experience.kinds[row]]
    decisive = [kind == "decisive" for kind in kinds]
    return Shown(row, texts, decisive, experience.advantage(row), experience.grades[row].reward == 1.0)


def telling_rows(experience: Experience) -> list[int]:
    """Rows that show most of one group: the right and the wrong response that agree for the most tokens (the token where they
    part decided), and the shortest response where it is neither.

    Raises ValueError when all responses are right or all are wrong: then no advantage tells them apart."""
    ids = experience.rollouts.response_ids
    right = [row for row, grade in enumerate(experience.grades) if grade.reward == 1.0]
    wrong = [row for row in range(len(ids)) if row not in right]
    if not right or not wrong:
        raise ValueError(f"{len(right)} of {len(ids)} responses are right; a group with right and wrong ones is needed")
    pair = max(((r, w) for r in right for w in wrong), key=lambda pair: _agreement(ids[pair[0]], ids[pair[1]]))
    shortest = min(range(len(ids)), key=lambda row: len(ids[row]))
    return list(dict.fromkeys([*pair, shortest]))


def _agreement(first: list[int], second: list[int]) -> int:
    """Number of tokens at the start that are the same."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


def token_shares(terms_BT: Tensor, mask_BT: Tensor, totals: MiniBatchTotals, kind: str) -> Tensor:
    """What every token adds to ``aggregate(terms_BT, ...)``, [B, T], detached, 0 at padding; their sum is the aggregate.

    Aggregation is linear in the terms, so a share is the term times the derivative of the aggregate."""
    leaf_BT = terms_BT.detach().clone().requires_grad_()
    (weight_BT,) = torch.autograd.grad(aggregate(leaf_BT, mask_BT.to(leaf_BT.dtype), totals, kind), leaf_BT)
    return weight_BT * leaf_BT.detach()
