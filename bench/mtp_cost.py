"""What MPO's multi-token modules cost against its backbone form: parameters, and time of one forward and backward pass.

    python bench/mtp_cost.py [--modules 4] [--rounds 20]

The tiny model of the quick profile, 256 responses of 8 to 48 tokens. Both forms alternate; processor time, so that other work
on the machine does not count. Run by hand, prints ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from tepo_core.config import Policy
from tepo_core.model.logprobs import sequence_logprobs
from tepo_core.model.mtp import add_modules, logprobs_and_ahead
from tepo_core.model.policy import build_tiny
from tepo_core.objectives.methods import MiniBatchTotals, TokenBatch, resolve
from tepo_core.seeding import numpy_generator
from tepo_core.tasks.tokenizer import build_tokenizer


def step(model: torch.nn.Module, name: str, modules: int, rows: tuple[list, list], pad_id: int) -> Callable[[], None]:
    """One forward and backward pass of MPO: forward of the policy, log-probs (of the modules too), objective, backward."""
    variants = {
        "backbone": {"preset": "mpo", "block": {"size": modules + 1}},
        "modules": {"preset": "mpo", "block": {"size": modules + 1, "logprobs": "mtp"}},
    }
    method = resolve(name, variants)

    def run() -> None:
        settings, extra = {"pad_id": pad_id, "temperature": 1.0}, {}
        if method.needs_mtp:
            logprobs_BT, entropy_BT, mask_BT, ahead_BTK = logprobs_and_ahead(model, *rows, modules, **settings)
            extra = {"mtp_logprobs_BTK": ahead_BTK, "old_mtp_logprobs_BTK": ahead_BTK.detach()}
        else:
            logprobs_BT, entropy_BT, mask_BT = sequence_logprobs(model, *rows, **settings)
        advantages_BT = torch.ones_like(logprobs_BT).detach()
        batch = TokenBatch(logprobs_BT, logprobs_BT.detach(), mask_BT, advantages_BT, entropy_BT=entropy_BT.detach(), **extra)
        method.loss(batch, MiniBatchTotals.from_mask(mask_BT)).loss.backward()

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    tokenizer = build_tokenizer()
    policy = build_tiny(Policy(), tokenizer, seed=0)
    bare = policy.parameters
    add_modules(policy.model, options.modules, seed=0)
    print(
        f"parameters: {bare:,} without, {policy.parameters:,} with {options.modules} modules ({policy.parameters / bare:.2f}x)"
    )
    random = numpy_generator("bench")
    prompts = [random.integers(3, len(tokenizer), 12).tolist() for _ in range(256)]
    responses = [random.integers(3, len(tokenizer), random.integers(8, 49)).tolist() for _ in range(256)]
    runs = [step(policy.model, name, options.modules, (prompts, responses), policy.pad_id) for name in ("backbone", "modules")]
    for run in runs * 2:
        seconds(run)
    pairs = [[seconds(run) for run in runs] for _ in range(options.rounds)]
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    backbone = statistics.median(a for a, _ in pairs)
    print(f"processor time of a pass: backbone {1e3 * backbone:.0f} ms, modules {middle:.2f}x ({low:.2f} .. {high:.2f})")


if __name__ == "__main__":
    main()
