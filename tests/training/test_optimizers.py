"""Half-precision policies move as float32 ones do: masters, their gradients, and a resume to equal bytes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tiny import run_bytes, tiny_study

from tepo_core.config import load_study
from tepo_core.model.policy import with_adapters
from tepo_core.tasks.prepare import prepare
from tepo_core.training import warmup as warmup_module
from tepo_core.training.optimizers import WarmupOptimizer
from tepo_core.training.trainer import Trainer, train
from tepo_core.training.warmup import initial_policy, warmup

PROFILES = sorted((Path(__file__).parents[2] / "profiles").glob("*.yaml"))
STEPS = 200


def equal_updates(model, optimizer, step, seed=0):
    """Many updates whose gradients vary around a fixed one; where each weight ended and how far it moved."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    before = {name: p.detach().double().clone() for name, p in trained}
    g = torch.Generator().manual_seed(seed)
    towards = {name: torch.randn(p.shape, generator=g) for name, p in trained}
    for _ in range(STEPS):
        optimizer.zero_grad()
        for name, p in trained:
            gradient = towards[name] + 0.3 * torch.randn(p.shape, generator=g)
            (p.float() * gradient).sum().backward()
        step()
    return {name: (end := p.detach().double(), end - before[name]) for name, p in trained}


def model_of(dtype, **policy):
    model = initial_policy(tiny_study(policy=policy), 0, Path(".")).model.bfloat16()  # equal numbers in both precisions
    return model.to(dtype)


def compare(moves):
    """Every weight ends within half a spacing of bfloat16 of where float32 takes it, and most of the way can be seen."""
    seen = total = 0.0
    for name, (end, exact) in moves[torch.float32].items():
        rounded = moves[torch.bfloat16][name][1]
        spacing = end.abs() * 2**-7
        assert ((rounded - exact).abs() <= spacing / 2 + exact.abs().mean() * 1e-2).all(), name
        far = exact.abs() > spacing
        seen, total = seen + float((rounded * exact)[far].sum()), total + float(exact[far].square().sum())
    assert total > 0 and seen / total == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("policy", [{}, {"mtp_modules": 1}], ids=["plain", "mtp"])
def test_rl_moves_bf16_weights_as_float32_ones_at_the_profiles_learning_rate(base, profile, policy):
    cfg, moves = load_study(profile).train, {}
    for dtype in (torch.float32, torch.bfloat16):
        with Trainer(tiny_study(train={"lr": cfg.lr}), "facts", "grpo", 0, base) as run:
            run.policy.model = model_of(dtype, **policy)
            run._learner()
            moves[dtype] = equal_updates(run.policy.model, run.optimizer, run.optimizer.step)
    compare(moves)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_warm_up_moves_bf16_weights_as_float32_ones(profile, kind):
    cfg, moves = load_study(profile).warmup.model_copy(update={"optimizer": kind}), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(dtype)
        optimizer = WarmupOptimizer(model, cfg)
        moves[dtype] = equal_updates(model, optimizer, lambda o=optimizer: o.step(cfg.lr))
    compare(moves)


def test_adapters_of_a_bf16_policy_move_too():
    pytest.importorskip("peft")
    moves = {}
    for dtype in (torch.float32, torch.bfloat16):
        study = tiny_study(policy={"lora_rank": 2})
        policy = initial_policy(study, 0, Path("."))
        policy.model = policy.model.bfloat16().to(dtype)
        model = with_adapters(policy, study.policy, 0).model
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.bfloat16().to(dtype)
        optimizer = WarmupOptimizer(model, study.warmup.model_copy(update={"optimizer": "adamw", "lr": 1e-6}))
        moves[dtype] = equal_updates(model, optimizer, lambda o=optimizer: o.step(1e-6))
    assert all("lora_" in name for name in moves[torch.float32])
    compare({dtype: {n: m for n, m in part.items() if "lora_A" in n} for dtype, part in moves.items()})


def test_gradients_of_micro_batches_are_added_in_float32(base):
    """256 + 1 + 1 is 256 in bfloat16."""
    with Trainer(tiny_study(policy={"dtype": "bfloat16"}), "facts", "grpo", 0, base) as run:
        run.optimizer.zero_grad()
        weight = run.policy.model.model.norm.weight
        assert weight.dtype == torch.bfloat16
        for size in (256.0, 1.0, 1.0):
            (weight * size).sum().backward()
        assert weight.grad is None, "freed as soon as it is added up"
        (total,) = [t.grad for t in run.optimizer.tensors if t.grad is not None]
        assert total.dtype == torch.float32 and total.tolist() == [258.0] * len(total)


def test_the_policy_holds_the_rounded_masters_and_a_copy_has_no_hooks(base):
    with Trainer(tiny_study(policy={"dtype": "bfloat16"}), "facts", "grpo", 0, base) as run:
        equal_updates(run.policy.model, run.optimizer, run.optimizer.step)
        trained = [p for p in run.policy.model.parameters() if p.requires_grad]
        for p, master in zip(trained, run.optimizer.tensors, strict=True):
            assert torch.equal(p, master.bfloat16()) and not torch.equal(p.float(), master)
        other = copy.deepcopy(run.policy.model)
        run.optimizer.zero_grad()
        other.model.norm.weight.sum().backward()
        assert other.model.norm.weight.grad is not None and all(t.grad is None for t in run.optimizer.tensors)


@pytest.mark.parametrize("method", ["grpo", "tepo_kl"])
def test_a_killed_bf16_run_ends_with_the_same_bytes(base, tmp_path, monkeypatch, method):
    study = tiny_study(policy={"dtype": "bfloat16"}, train={"lr": 1e-5, "rollouts": 3, "validate_every": 0})
    whole = train(study, "facts", method, 0, base, tmp_path / "whole")
    original = Trainer._rollout_step

    def kill(self):
        if self.step == 2:
            raise KeyboardInterrupt
        return original(self)

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Trainer, "_rollout_step", kill)
        train(study, "facts", method, 0, base, tmp_path / "killed")
    resumed = train(study, "facts", method, 0, base, tmp_path / "killed")
    assert run_bytes(resumed.folder) == run_bytes(whole.folder)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_killed_bf16_warm_up_ends_with_the_same_bytes(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(warmup_module, "SAVE_EVERY", 5)
    study = tiny_study(policy={"dtype": "bfloat16"}, warmup={"steps": 12, "lr": 1e-4, "optimizer": kind})
    prepare(study, tmp_path)
    whole = warmup(study, "facts", 0, tmp_path, tmp_path / "whole")
    original = WarmupOptimizer.step

    def kill(self, lr, seen=[]):  # noqa: B006
        seen.append(lr)
        if len(seen) == 8:
            raise KeyboardInterrupt
        original(self, lr)

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(WarmupOptimizer, "step", kill)
        warmup(study, "facts", 0, tmp_path, tmp_path / "killed")
    resumed = warmup(study, "facts", 0, tmp_path, tmp_path / "killed")
    assert run_bytes(resumed.folder) == run_bytes(whole.folder)
