"""Tokens per second of sampling: the transformers engine, vLLM, and plain ``generate``, on the same prompts. By hand.

    tests/vllm/run.sh                      # builds .venv-vllm, once
    python bench/rollout.py                # the quick profile's base policy, 64 prompts x 8, natural lengths

All sample at temperature 1 with a seed; the number of tokens differs a little between them, so the ratio is that of tokens
a second. vLLM's time to start and the time of a weight update (with its check by log-probs) are given apart.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from harness import ROOT, Contender, alternate, machine, measured, median, memory, python_of, serve, spread, table, versions
from rl_step import base_policy, study

CONTENDERS = ("engine", "vllm", "generate")
GROUP, LENGTH = 8, 48


def worker(options: argparse.Namespace) -> None:
    import torch

    from tepo_core.model.policy import load_policy
    from tepo_core.rollout.transformers_engine import TransformersEngine
    from tepo_core.rollout.types import SamplingParams
    from tepo_core.tasks.problem import read_problems

    torch.set_num_threads(options.threads)
    root = Path(options.root)
    policy = load_policy(root / "runs" / "warmup" / "facts-s0" / "policy", study("natural").policy)
    problems = read_problems(root / "data" / "prepared" / "facts-s0" / "train.jsonl")[: options.prompts]
    prompts = [policy.encode(p.prompt) for p in problems]
    params = SamplingParams(1.0, 1.0, LENGTH)
    about = {"versions": versions("torch", "transformers"), "start": 0.0, "update": 0.0}
    if options.worker == "generate":
        width = max(map(len, prompts))
        ids = torch.tensor([[policy.pad_id] * (width - len(p)) + p for p in prompts]).repeat_interleave(GROUP, 0)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]).repeat_interleave(GROUP, 0)
        policy.model.eval()

        def sample() -> int:
            output = policy.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=LENGTH,
                eos_token_id=policy.eos_ids,
                pad_token_id=policy.pad_id,
            )[:, width:]
            ended = (output == policy.tokenizer.eos_token_id).long()
            return int((ended.cumsum(1) - ended == 0).sum())
    else:
        if options.worker == "vllm":
            from tepo_core.rollout.vllm_engine import VllmEngine

            start = time.perf_counter()
            engine = VllmEngine(
                policy.model, eos_ids=policy.eos_ids, pad_id=policy.pad_id, context=policy.context, python=python_of("vllm")
            )
            about["start"] = time.perf_counter() - start
            engine.update_weights(policy.model)  # the first one tests itself and takes longer
            about["update"] = measured(lambda: engine.update_weights(policy.model))["seconds"]
        else:
            engine = TransformersEngine(policy.model, pad_id=policy.pad_id, eos_ids=policy.eos_ids)

        def sample() -> int:
            rollouts = engine.generate(prompts, GROUP, params, list(range(len(prompts))))
            return sum(map(len, rollouts.response_ids))

    def repetition() -> dict:
        tokens = []
        result = measured(lambda: tokens.append(sample()))
        extra = engine._call("memory") / 2**20 if options.worker == "vllm" else 0.0
        return result | {"tokens": tokens[0], "rate": tokens[0] / result["seconds"], "peak_mib": memory("VmHWM") + extra}

    serve(about, repetition)
    if options.worker != "generate":
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    if "vllm" in options.contenders:
        os.environ["TEPO_VLLM_PYTHON"] = python_of("vllm")
    root = base_policy("natural", options.threads)
    arguments = ["--root", str(root), "--prompts", str(options.prompts), "--threads", str(options.threads)]
    script = str(Path(__file__).relative_to(ROOT))
    contenders = [Contender(script, name, "", arguments, options.threads) for name in options.contenders]
    alternate(contenders, options.repetitions, warm=2)
    for contender in contenders:
        contender.close()
    base = median([r["rate"] for r in contenders[0].results])
    rows = []
    for c in contenders:
        rates, tokens = ([r[key] for r in c.results] for key in ("rate", "tokens"))
        peak = max(r["peak_mib"] for r in c.results)
        apart = f"start {c.about['start']:.0f} s, update {c.about['update']:.2f} s" if c.name == "vllm" else ""
        about = " ".join(f"{name} {version}" for name, version in c.about["versions"].items())
        row = [c.name, spread(rates), f"{median(rates) / base:.2f}", f"{median(tokens):.0f}", f"{peak:.0f}"]
        rows.append([*row, apart, about])
    print(f"{options.prompts} prompts x {GROUP}, at most {LENGTH} tokens, {options.threads} threads, alternating repetitions")
    print(table(["contender", "tokens/s", f"/ {contenders[0].name}", "tokens", "peak MiB", "apart", "versions"], rows))
    print(machine())


if __name__ == "__main__":
    main()
