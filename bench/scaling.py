"""Seconds and peak memory of sampling and of an update as completions, length and vocabulary grow x2, x4, x8. By hand.

    python bench/scaling.py [--axis completions length vocabulary]

Every point runs in a process of its own on a random model of the quick profile's shape; the growth column is cost divided
by size, relative to the first point, so 1 is linear and below 1 is better. Attention alone is quadratic in the length.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import ROOT, Contender, machine, measured, median, serve, table

START = {"completions": 128, "length": 32, "vocabulary": 4096}
SMALL = {"completions": 64, "length": 32, "vocabulary": 32}  # the sizes of the axes that stand still
LIMIT = 1.1  # growth at most linear, with room for noise


def worker(options: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tepo_core.model.batching import micro_batches
    from tepo_core.model.logprobs import sequence_logprobs
    from tepo_core.rollout.transformers_engine import TransformersEngine
    from tepo_core.rollout.types import SamplingParams

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    engine = TransformersEngine(model, pad_id=0, eos_ids=[])
    prompts = [[1 + (i + j) % 30 for j in range(8)] for i in range(options.completions // 8)]
    params = SamplingParams(1.0, 1.0, options.length)
    kept = {}

    def sample() -> None:
        kept["rollouts"] = engine.generate(prompts, 8, params, list(range(len(prompts))))

    def update() -> None:
        rollouts = kept["rollouts"]
        model.zero_grad(set_to_none=True)
        sizes = [len(p) + len(r) for p, r in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)]
        for rows in micro_batches(sizes, 8192):
            prompts_B, responses_B = ([part[i] for i in rows] for part in (rollouts.prompt_ids, rollouts.response_ids))
            logprobs_BT, entropy_BT, _ = sequence_logprobs(model, prompts_B, responses_B, pad_id=0, temperature=1.0)
            (logprobs_BT.sum() + entropy_BT.sum()).backward()

    def repetition() -> dict:
        sampled, updated = measured(sample), measured(update)
        return {
            "sample_seconds": sampled["seconds"],
            "update_seconds": updated["seconds"],
            "extra_mib": max(sampled["extra_mib"], updated["extra_mib"]),
        }

    serve({}, repetition)


def point(axis: str, value: int, options: argparse.Namespace) -> dict[str, float]:
    sizes = SMALL | {axis: value}
    arguments = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    script = str(Path(__file__).relative_to(ROOT))
    contender = Contender(script, f"{axis}={value}", "", [*arguments, "--threads", str(options.threads)], options.threads)
    # Memory is that of the first round: later ones reuse what the allocator kept.
    first = contender.run()
    results = [contender.run() for _ in range(options.repetitions)]
    contender.close()
    found = {key: median([r[key] for r in results]) for key in ("sample_seconds", "update_seconds")}
    return found | {"extra_mib": first["extra_mib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    for name in START:
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--axis", nargs="+", choices=list(START), default=list(START))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    rows = []
    for axis in options.axis:
        base: dict[str, float] = {}
        for factor in (1, 2, 4, 8):
            found = point(axis, START[axis] * factor, options)
            base = base or found
            cells = [f"{value:.3g} ({value / base[key] / factor:.2f})" for key, value in found.items()]
            rows.append([axis, START[axis] * factor, *cells])
    print(f"{options.threads} threads, medians of {options.repetitions}; in brackets: growth of the cost / growth of the size")
    print(table(["axis", "size", "seconds to sample", "seconds of an update", "extra MiB"], rows))
    print(machine())
    print(f"wanted: at most linear, brackets at most {LIMIT}")


if __name__ == "__main__":
    main()
