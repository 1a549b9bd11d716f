"""One RL step, sampling and updates, against TRL's GRPOTrainer on the same model, prompts, settings and updates. By hand.

    tests/peers/run.sh trl                       # builds .venv-trl, once
    python bench/rl_step.py --case forced        # 256 completions of exactly 64 tokens, 0.79 M parameters, one update
    python bench/rl_step.py --case natural       # the quick profile's base policy, 32 x 8, 8 updates a rollout

Both sides sample with transformers, in float32, with the grpo objective, no KL, and AdamW at a learning rate so small that
the lengths stay what they are. A repetition is one rollout step; the two processes take turns, so that whatever else the
machine does falls on both. TRL runs without gradient checkpointing and without logging, which is its fastest setting here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from pathlib import Path

from harness import ROOT, Contender, alternate, machine, measured, median, memory, serve, spread, table, versions

ENVIRONMENTS = {"ours": "", "trl": "trl"}
LIMITS = {"forced": 1.3, "natural": 2.5}  # ours at least so many times as fast
FOLDER = ROOT / ".tepo" / "bench"
LENGTH = {"forced": 64, "natural": 48}
PROMPTS, GROUP = 32, 8
UPDATES = {"forced": (1, 1), "natural": (4, 2)}  # mini-batches x epochs
LEARNING_RATE = 1e-6


def study(case: str):
    """The quick profile, cut down to sampling and learning."""
    from tepo_core.commands.profiles import load_profile
    from tepo_core.config import parse_study

    values = load_profile(ROOT, "quick").model_dump()
    minibatches, epochs = UPDATES[case]
    values |= {"profile": f"bench-{case}", "tasks": ["facts"], "methods": ["grpo"], "seeds": [0]}
    values["train"] |= {
        "rollouts": 10**6,
        "prompts_per_rollout": PROMPTS,
        "group_size": GROUP,
        "minibatches": minibatches,
        "epochs": epochs,
        "lr": LEARNING_RATE,
        "lr_warmup_rollouts": 0,
        "validate_every": 0,
        "record_every": 0,
        "checkpoint_every": 0,
        "max_new_tokens": LENGTH[case],
        "micro_batch_tokens": 32768,
    }
    if case == "forced":
        values["policy"]["tiny"]["layers"] = 4
        values["warmup"]["steps"] = 0
    return parse_study(values)


def base_policy(case: str, threads: int) -> Path:
    """Root of a small study with data and base policy, made once."""
    import torch

    from tepo_core.config import digest
    from tepo_core.tasks.prepare import prepare
    from tepo_core.training.warmup import warmup

    settings = study(case)
    parts = [part.model_dump() for part in (settings.policy, settings.warmup, settings.data)]
    root = FOLDER / f"{case}-{digest(parts)}"
    if not (root / "runs" / "warmup" / "facts-s0" / "done.json").is_file():
        torch.set_num_threads(threads)
        prepare(settings, root)
        warmup(settings, "facts", 0, root)
    return root


def coin(text: str) -> float:
    """A reward that any text has: the random policy of the forced case solves nothing, and equal rewards teach nothing."""
    return float(zlib.crc32(text.encode()) & 1)


def ours(options: argparse.Namespace) -> None:
    import torch

    from tepo_core.grading.types import Grade, Outcome
    from tepo_core.training.trainer import Trainer

    class CoinGrader:
        def grade(self, *, golds, responses, truncated):
            return [Grade(Outcome.CORRECT if coin(r) else Outcome.WRONG, None) for r in responses]

        def close(self) -> None:
            pass

    torch.set_num_threads(options.threads)
    settings = study(options.case)
    settings = settings.model_copy(update={"compute": settings.compute.model_copy(update={"threads": options.threads})})
    with Trainer(settings, "facts", "grpo", 0, Path(options.root)) as run:
        if options.case == "forced":
            run.engine.eos_ids = []
            run.sampler.grader = CoinGrader()

        def repetition() -> dict:
            tokens = []
            result = measured(lambda: tokens.append(run._rollout_step()[0]))
            return result | {"tokens": tokens[0], "peak_mib": memory("VmHWM")}

        about = {"versions": versions("torch", "transformers"), "parameters": run.policy.parameters}
        serve(about, repetition)


def trl(options: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    root, (minibatches, epochs), length = Path(options.root), UPDATES[options.case], LENGTH[options.case]
    policy = root / "runs" / "warmup" / "facts-s0" / "policy"
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    lines = (root / "data" / "prepared" / "facts-s0" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines]
    seen = {"tokens": 0}

    def reward(completions, answer, completion_ids, **_):
        seen["tokens"] += sum(len(ids) for ids in completion_ids)
        if options.case == "forced":
            return [coin(text) for text in completions]
        return [float(text.endswith(f"\\boxed{{{gold}}}")) for text, gold in zip(completions, answer, strict=True)]

    class TakeTurns(TrainerCallback):
        """A rollout step starts when asked for, and its time ends with its last update."""

        def on_step_begin(self, args, state, control, **_):
            if state.global_step % (minibatches * epochs) == 0:
                line = sys.stdin.readline()
                if not line:
                    sys.exit(0)
                seen["tokens"] = 0
                self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % (minibatches * epochs) == 0:
                seconds = time.perf_counter() - self.start
                print(json.dumps({"seconds": seconds, "peak_mib": memory("VmHWM"), **seen}), flush=True)

    config = GRPOConfig(
        output_dir=str(root / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP // minibatches,
        steps_per_generation=minibatches,
        num_iterations=epochs,
        num_generations=GROUP,
        max_completion_length=length,
        temperature=1.0,
        top_p=1.0,
        beta=0.0,
        loss_type="grpo",
        epsilon=0.2,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.99,
        max_grad_norm=1.0,
        max_steps=10**6,
        generation_kwargs={"min_new_tokens": length} if options.case == "forced" else None,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    data = Dataset.from_list([{"prompt": p["prompt"], "answer": p["answer"]} for p in problems])
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[TakeTurns()]
    )
    about = {"versions": versions("torch", "transformers", "trl"), "parameters": sum(p.numel() for p in model.parameters())}
    print(json.dumps(about), flush=True)
    trainer.train()


def flops_floor(case: str, parameters: int, tokens: float, threads: int) -> float:
    """Seconds of the step's matrix products alone at this machine's measured speed: 2 P a sampled, 6 P a trained token."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = min(measured(lambda: a @ b)["seconds"] for _ in range(5))
    prompt_tokens = 10 * PROMPTS * GROUP
    trained = (tokens + prompt_tokens) * UPDATES[case][1]
    return (2 * parameters * (tokens + 10 * PROMPTS) + 6 * parameters * trained) / (2 * 2048**3 / best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", choices=list(ENVIRONMENTS), help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=list(LIMITS), default="forced")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--warm", type=int, default=3, help="rounds before the ones that count")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        return {"ours": ours, "trl": trl}[options.worker](options)
    root = base_policy(options.case, options.threads)
    arguments = ["--case", options.case, "--root", str(root), "--threads", str(options.threads)]
    script = str(Path(__file__).relative_to(ROOT))
    contenders = [Contender(script, name, env, arguments, options.threads) for name, env in ENVIRONMENTS.items()]
    alternate(contenders, options.repetitions, options.warm)
    for contender in contenders:
        contender.close()
    first = contenders[0]
    base = median([r["seconds"] for r in first.results])
    rows = []
    for c in contenders:
        seconds, tokens = ([r[key] for r in c.results] for key in ("seconds", "tokens"))
        about = " ".join(f"{name} {version}" for name, version in c.about["versions"].items())
        peak = max(r["peak_mib"] for r in c.results)
        rows.append([c.name, spread(seconds), f"{median(seconds) / base:.2f}", f"{median(tokens):.0f}", f"{peak:.0f}", about])
    minibatches, epochs = UPDATES[options.case]
    print(
        f"{options.case}: {PROMPTS} prompts x {GROUP}, {minibatches * epochs} updates, {first.about['parameters']:,} "
        f"parameters, {options.threads} threads, {options.repetitions} alternating repetitions"
    )
    print(table(["contender", "seconds a step", "/ ours", "tokens", "peak MiB", "versions"], rows))
    floor = flops_floor(options.case, first.about["parameters"], median([r["tokens"] for r in first.results]), options.threads)
    print(f"floor by FLOPs at the measured speed of a matrix product: {floor:.3g} s; ours takes {base / floor:.2f} times that")
    print(machine())
    print(f"wanted: TRL takes at least {LIMITS[options.case]} times as long as ours, and ours no more memory")


if __name__ == "__main__":
    main()
