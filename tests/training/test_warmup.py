"""The warm-up: its schedule, its optimisers, and batches cut by length."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from tiny import tiny_study
from torch import nn

from tepo_core.analysis.figures.single import warmup_figure
from tepo_core.config import Warmup
from tepo_core.model.batching import length_parts
from tepo_core.model.logprobs import response_states, state_logprobs
from tepo_core.model.policy import load_policy
from tepo_core.training.optimizers import WarmupOptimizer
from tepo_core.training.warmup import cosine_lr, initial_policy, warmup


def policy():
    return initial_policy(tiny_study(), 0, Path("."))


def test_muon_takes_the_matrices_inside_the_layers_and_adamw_the_rest():
    model = policy().model
    adamw, muon = WarmupOptimizer(model, Warmup(optimizer="muon")).parts
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for p in muon.param_groups[0]["params"]}
    rest = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert matrices | rest == set(names.values()) and not matrices & rest
    assert matrices == {name for name in names.values() if "proj" in name}
    assert "model.embed_tokens.weight" in rest  # tied to the output matrix
    assert len(WarmupOptimizer(model, Warmup(optimizer="adamw")).parts) == 1


def test_a_muon_step_is_nearly_orthogonal_and_of_adamws_size():
    """torch's Muon with match_rms_adamw: the update U V' of the gradient's SVD, times 0.2 sqrt(max(rows, columns))."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    model.get_output_embeddings = lambda: None
    before = model[0].weight.detach().clone()
    gradient = torch.randn(4, 6)
    optimizer = WarmupOptimizer(model, Warmup(optimizer="muon", lr=0.01, weight_decay=0))
    model[0].weight.grad = gradient.clone()
    optimizer.step(0.02)
    moved = (before - model[0].weight.detach()) / 0.02 / (0.2 * math.sqrt(6))
    assert torch.linalg.svdvals(moved).tolist() == pytest.approx([1] * 4, abs=0.35)  # five Newton-Schulz steps get that near
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    assert float((moved * (u @ v)).sum() / (moved.norm() * (u @ v).norm())) > 0.97


def test_state_of_both_parts_is_kept():
    one, other = policy().model, policy().model
    first, second = (WarmupOptimizer(m, Warmup(optimizer="muon")) for m in (one, other))
    for step in range(3):
        if step == 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch would share the tensors
            other.load_state_dict(one.state_dict())
        for model, optimizer in ((one, first), (other, second)):
            optimizer.zero_grad()
            model(torch.arange(8)[None]).logits.square().mean().backward()
            optimizer.step(1e-3)
        if step == 0:
            with torch.no_grad():
                [p.add_(0.1) for p in other.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_parts_of_like_length_have_the_gradient_of_the_whole_batch():
    rows, lengths = [7, 3, 9, 4, 1], [5, 9, 2, 9, 3]
    assert length_parts(rows, lengths, 2) == [[9, 1, 7], [3, 4]]
    assert length_parts([5], [3], 3) == [[5]]
    model = policy().model.double()
    prompts = [[2, 3], [4, 5, 6, 7], [3], [8, 9, 2]]
    responses = [[5, 6], [7, 8, 9, 2, 3, 4], [5], [6, 7, 8]]
    tokens = sum(map(len, responses))

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            states = response_states(model, [prompts[r] for r in part], [responses[r] for r in part], pad_id=0)
            (-state_logprobs(model, states, temperature=1.0, entropy=False)[0].sum() / tokens).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient([[0, 1, 2, 3]])
    parts = gradient(length_parts([0, 1, 2, 3], [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)], 3))
    assert torch.allclose(whole, parts, rtol=1e-9, atol=1e-12) and whole.norm() > 0


def test_cosine_after_a_ramp():
    # 100 steps: the ramp is 3 steps; halfway down the cosine at (3 + 100) / 2
    assert [cosine_lr(6.0, step, 100) for step in (0, 1, 2)] == pytest.approx([2, 4, 6])
    assert cosine_lr(6.0, 3, 100) == pytest.approx(6)
    assert cosine_lr(6.0, 99, 100) == pytest.approx(3 * (1 + math.cos(math.pi * 96 / 97)))
    assert cosine_lr(1.0, 0, 1) == 1.0  # a single step has no schedule


def test_no_steps_keep_the_policy_and_show_an_empty_table(tmp_path):
    study = tiny_study(warmup={"steps": 0})
    result = warmup(study, "facts", 0, tmp_path, tmp_path / "run")
    assert result.table().empty and warmup_figure(result.metrics).axes
    weights = load_policy(tmp_path / "run" / "policy", study.policy).model.state_dict()
    assert all(
        torch.equal(weights[name], value) for name, value in initial_policy(study, 0, tmp_path).model.state_dict().items()
    )
