"""Time of an objective with all its metrics against verl's vanilla loss on the same tensors. Run by hand, prints ratios.

    tests/peers/run.sh verl                                     # builds .venv-verl
    PYTHONPATH=. .venv-verl/bin/python bench/objective_speed.py [--device cuda] [--responses 256] [--length 1024]

Both sides do forward and backward down to the log-probs. verl's side computes its three metrics and, as it always does,
brings them to the host; ours computes every sum, the extremes and the per-token results (the gradient of each token
included), and stays on the device. The two alternate, so that
whatever else the machine does falls on both; the ratio is that of the medians, with its quartiles.
On CUDA, a pass under the profiler's synchronisation check proves that our loss never waits for the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from tepo_core.objectives.methods import PRESETS, MiniBatchTotals, TokenBatch, resolve

LIMIT = 1.2  # of verl's vanilla loss, for the same objective with all metrics on


def inputs(responses: int, length: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (responses, length)
    old_BT = -torch.rand(shape, generator=generator) * 3
    mask_BT = torch.arange(length) < torch.randint(length // 4, length + 1, (responses, 1), generator=generator)
    tensors = {
        "logprobs_BT": old_BT + 0.1 * torch.randn(shape, generator=generator),
        "old_logprobs_BT": old_BT,
        "advantages_BT": torch.randn((responses, 1), generator=generator).expand(shape).contiguous(),
        "mask_BT": mask_BT,
        "entropy_BT": torch.rand(shape, generator=generator),
        "old_entropy_BT": torch.rand(shape, generator=generator),
        "selected_BT": torch.rand(shape, generator=generator) < 2e-3,
    }
    return {name: value.to(device) for name, value in tensors.items()}


def verl_step(tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Forward and backward of verl's vanilla loss, metrics included."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1)
    loss_fn, mask_BT = get_policy_loss_fn("vanilla"), tensors["mask_BT"]

    def step() -> None:
        logprobs_BT = tensors["logprobs_BT"].detach().requires_grad_()
        loss, _ = loss_fn(tensors["old_logprobs_BT"], logprobs_BT, tensors["advantages_BT"], mask_BT, "token-mean", config)
        loss.backward()

    return step


def our_step(name: str, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Forward and backward of one of our objectives, all metrics included."""
    method = resolve(name, {"vanilla": {"preset": "dapo", "clip": [0.2, 0.2], "dual_clip": 3.0}})
    totals = MiniBatchTotals.from_mask(tensors["mask_BT"], constant=1024.0)

    def step() -> None:
        logprobs_BT = tensors["logprobs_BT"].detach().requires_grad_()
        method.loss(TokenBatch(**{**tensors, "logprobs_BT": logprobs_BT}), totals).loss.backward()

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratio(ours: Callable[[], None], peer: Callable[[], None], device: str, rounds: int) -> tuple[float, float, list[float]]:
    """Median seconds of both, and the quartiles of the ratio of neighbouring measurements."""
    for step in (ours, peer) * 3:
        seconds(step, device)
    pairs = [(seconds(ours, device), seconds(peer, device)) for _ in range(rounds)]
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return mine, theirs, statistics.quantiles([a / b for a, b in pairs], n=4)


def check_no_synchronisation(step: Callable[[], None]) -> None:
    """Raise if the step makes the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tensors = inputs(options.responses, options.length, options.device)
    peer = verl_step(tensors)
    print(
        f"{options.responses} x {options.length} tokens, {options.device}, {options.threads} threads, {options.rounds} rounds"
    )
    print(f"{'objective':<12}{'ours ms':>9}{'verl vanilla ms':>17}{'ratio':>7}   quartiles")
    for name in ["vanilla", *PRESETS]:
        ours = our_step(name, tensors)
        if options.device == "cuda":
            check_no_synchronisation(ours)
        mine, theirs, (low, middle, high) = ratio(ours, peer, options.device, options.rounds)
        verdict = f" (at most {LIMIT}: {'met' if middle <= LIMIT else 'NOT met'})"
        print(f"{name:<12}{1e3 * mine:>9.2f}{1e3 * theirs:>17.2f}{middle:>7.2f}   {low:.2f} .. {high:.2f}{verdict}")


if __name__ == "__main__":
    main()
