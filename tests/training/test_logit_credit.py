"""Credit in logit space: |dJ/dlogits| of the states of a mini-batch, against autograd on the logits themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.training.logit_credit import state_credit

V = 6
PROMPTS = [[7], [7], [7], [8]]
RESPONSES = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 3]]  # three share a prompt; 1 and 3 are equal; another prompt is alone


def logits_of(states: list[tuple]) -> dict[tuple, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {state: torch.randn(V, generator=generator, dtype=torch.float64).requires_grad_() for state in states}


def states_of(prompt: list[int], response: list[int]) -> list[tuple]:
    return [(tuple(prompt), tuple(response[:t])) for t in range(len(response))]


def mini_batch(advantages: list[float], name: str = "dapo"):
    """The rows through an objective at ratio 1, each state a leaf of its own: tokens that share a state share its logits."""
    every = [states_of(p, r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    table = logits_of(sorted({state for row in every for state in row}))
    logp = {state: logits.log_softmax(-1) for state, logits in table.items()}
    chosen_BT = torch.stack(
        [torch.stack([logp[s][a] for s, a in zip(row, r, strict=True)]) for row, r in zip(every, RESPONSES, strict=True)]
    )
    collision_BT = torch.stack([torch.stack([logp[s].detach().exp().square().sum() for s in row]) for row in every])
    advantages_BT = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(chosen_BT)
    batch = TokenBatch(chosen_BT, chosen_BT.detach(), torch.ones_like(chosen_BT) > 0, advantages_BT, collision_BT=collision_BT)
    out = resolve(name).loss(batch, MiniBatchTotals(12, 4))
    out.loss.backward()
    norms = {state: logits.grad.norm().item() for state, logits in table.items()}
    return out, batch, norms, every


def test_token_credit_is_the_norm_of_its_own_gradient_in_the_logits():
    """One response: |dJ/dlogp| |e_a - p| is what autograd finds on the logits of each state, and it differs between tokens."""
    out, _, norms, every = mini_batch([0.0, 0.0, 0.0, -2.0])
    found, plain = out.token.credit_BT[3].tolist(), out.token.gradient_BT[3].tolist()
    assert found == pytest.approx([norms[state] for state in every[3]])
    assert np.ptp(plain) == pytest.approx(0) and np.ptp(found) > 0.01


def net(out, batch):
    arrays = [x.detach().numpy() for x in (out.token.signed_BT, batch.logprobs_BT, batch.collision_BT)]
    return state_credit(PROMPTS, RESPONSES, *[list(array) for array in arrays])


@pytest.mark.parametrize("advantages", [[1.0, -1.0, 0.5, 0.3], [1.0, 1.0, 1.0, -1.0], [2.0, -1.0, -1.0, 0.0]])
def test_what_falls_on_a_state_is_summed_with_its_sign(advantages):
    """Over all responses that pass through a state, the sum of shares is the norm of the summed gradient of its logits."""
    out, batch, norms, every = mini_batch(advantages)
    shares = net(out, batch)
    totals: dict[tuple, float] = {}
    for row, values in zip(every, shares, strict=True):
        for state, value in zip(row, values, strict=True):
            totals[state] = totals.get(state, 0.0) + float(value)
    assert totals == pytest.approx(norms)


def test_opposite_advantages_cancel_on_the_shared_prefix_and_not_behind_it():
    """A = 1, -1, 0: tokens 1 and 2 are the same for right and wrong, so nothing is learned there; the third decides."""
    out, batch, _, _ = mini_batch([1.0, -1.0, 0.0, 0.0])
    shares = np.array(net(out, batch))
    assert shares[:2, :2] == pytest.approx(0) and (shares[:2, 2] > 0.01).all()
    assert (out.token.credit_BT[:2, :2] > 0.01).all()  # each alone has a gradient there


def test_a_sure_token_gets_no_credit():
    """p_a = 1: |e_a - p| = 0, whatever the advantage, where |dJ/dlogp| is |A| / N like everywhere else."""
    zero_BT = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    ones_BT = torch.ones(1, 1, dtype=torch.float64)
    out = resolve("dapo").loss(
        TokenBatch(zero_BT, zero_BT.detach(), ones_BT > 0, ones_BT, collision_BT=ones_BT), MiniBatchTotals(1, 1)
    )
    assert out.token.credit_BT.tolist() == [[0.0]] and out.token.gradient_BT.tolist() == [[1.0]]


def test_without_the_collision_probability_there_is_no_credit():
    out = resolve("dapo").loss(
        TokenBatch(torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1), torch.ones(1, 1) > 0, torch.ones(1, 1)),
        MiniBatchTotals(1, 1),
    )
    assert out.token.credit_BT is None
