"""The collision probability sum_v p_v^2 of every path, which |e_a - p| in logit space needs."""

from __future__ import annotations

import pytest
import torch

from tepo_core.model.logprobs import chosen_logprobs, plain_logprobs


def inputs(dtype=torch.float64, scale: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64) * scale for n in (9, 13))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), torch.randint(13, (9,), generator=generator)


@pytest.mark.parametrize("chunk", [None, 1, 7, 40])
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (8.0, 0.7), (1e-3, 2.0)])
def test_collision_against_the_definition(chunk, scale, temperature):
    hidden, weight, targets = inputs(scale=scale)
    logprobs, entropy, collision = chosen_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, collision=True
    )
    p_NV = (hidden @ weight.T / temperature).softmax(-1)
    torch.testing.assert_close(collision, p_NV.square().sum(-1).detach())
    assert not collision.requires_grad and logprobs.requires_grad and entropy.requires_grad


@pytest.mark.parametrize("chunk", [None, 7])
def test_asking_for_it_changes_no_other_number_and_no_gradient(chunk):
    grads = []
    for wanted in (False, True):
        hidden, weight, targets = inputs(torch.float32)
        found = chosen_logprobs(hidden, weight, targets, chunk=chunk, collision=wanted)
        (found[0].sum() + found[1].sum()).backward()
        grads.append((found[0].detach(), found[1].detach(), hidden.grad))
        assert len(found) == 2 + wanted
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("chunk", [None, 7])
def test_without_entropy_and_with_a_certain_token(chunk):
    hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[200.0, 0.0], [0.0, 1.0], [-3.0, 0.0]])
    _, entropy, collision = chosen_logprobs(hidden, weight, torch.tensor([0]), entropy=False, chunk=chunk, collision=True)
    assert entropy is None and collision.tolist() == [1.0]
    assert plain_logprobs(hidden, weight, torch.tensor([0]), collision=True)[2].tolist() == [1.0]
