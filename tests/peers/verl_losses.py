"""verl's registered policy losses on our batches: losses, gradients, micro-batches. Imported only where verl is installed.

Run as a script it measures how far verl's gradients move when only the micro-batch size changes, and writes the record that
notebooks/objectives.ipynb shows beside ours: PYTHONPATH=. .venv-verl/bin/python tests/peers/verl_losses.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import verl
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from tepo_core.objectives.invariance import chunks, random_batch, relative_error
from tepo_core.objectives.methods import TokenBatch, resolve

RECORD = Path(__file__).parents[2] / "data" / "verl_invariance.json"
CASE = {"responses": 32, "longest": 300, "dtype": torch.float32}
PAPER = {  # our preset -> verl's loss, aggregation and the settings of the method's paper
    "grpo": ("vanilla", "seq-mean-token-mean", {}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", {"loss_scale_factor": 300}),
    "dapo": ("vanilla", "token-mean", {"clip_ratio_high": 0.28}),
    "reinforce": ("gpg", "token-mean", {}),
    "gspo": ("gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "gmpo": ("geo_mean", "token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "cispo": ("cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.28}),
    "sapo": ("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "clip_cov": ("clip_cov", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0}),
    "kl_cov": ("kl_cov", "token-mean", {"kl_cov_ratio": 2e-3, "ppo_kl_coef": 1.0}),
}
POLICY_LOSS = ("kl_cov_ratio", "ppo_kl_coef", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")


def actor_config(settings: dict) -> ActorConfig:
    """verl's actor config. Dual clip is always on in verl; 1e9 puts it out of reach unless a setting says otherwise."""
    top = {key: value for key, value in settings.items() if key not in POLICY_LOSS}
    config = ActorConfig(**{"strategy": "fsdp", "rollout_n": 8, "ppo_micro_batch_size_per_gpu": 1, "clip_ratio_c": 1e9, **top})
    for key in POLICY_LOSS:
        if key in settings:
            object.__setattr__(config.policy_loss, key, settings[key])
    return config


def verl_gradient(
    loss: str, aggregation: str, settings: dict, batch: TokenBatch, parts: list[Tensor] | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient as verl's engine gets them: backward per micro-batch, with the global counts it is given."""
    config = actor_config(settings)
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(batch.mask_BT.sum()),
        global_batch_size=len(batch.mask_BT),
        loss_scale_factor=config.loss_scale_factor,
    )
    leaf_BT, total = batch.logprobs_BT.detach().clone().requires_grad_(), 0.0
    for rows in parts or [torch.arange(len(batch.mask_BT))]:
        value, _ = get_policy_loss_fn(loss)(
            batch.old_logprobs_BT[rows], leaf_BT[rows], batch.advantages_BT[rows], batch.mask_BT[rows], aggregation, config
        )
        value.backward()
        total += value.item()
    return total, leaf_BT.grad


def plain_batch(name: str, **case: object) -> TokenBatch:
    """A random mini-batch with log-probs and advantages only, as verl's losses see it."""
    full = random_batch(resolve(name), **{**CASE, **case})
    return TokenBatch(full.logprobs_BT, full.old_logprobs_BT, full.mask_BT, full.advantages_BT, selected_BT=full.selected_BT)


def micro_batch_error(name: str, size: int) -> float:
    """Relative gradient error of verl's loss, micro-batches of ``size`` responses against all at once, same inputs."""
    batch = plain_batch(name)
    torch.manual_seed(0)
    _, whole = verl_gradient(*PAPER[name], batch)
    torch.manual_seed(0)
    _, split = verl_gradient(*PAPER[name], batch, chunks(len(batch.mask_BT), size))
    return relative_error({"logprobs_BT": split}, {"logprobs_BT": whole})


def measure(sizes: tuple[int, ...] = (16, 8, 2, 1)) -> dict:
    """The record: relative gradient error by preset and micro-batch size."""
    errors = {name: {str(size): float(f"{micro_batch_error(name, size):.3g}") for size in sizes} for name in PAPER}
    case = {key: str(value) if isinstance(value, torch.dtype) else value for key, value in CASE.items()}
    return {"verl": verl.__version__, "case": case, "relative_gradient_error": errors}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(measure(), indent=1, sort_keys=True) + "\n")
    print(RECORD.read_text())
