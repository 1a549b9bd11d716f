"""Time and peak memory of log-probs and entropies at a large vocabulary, forward and backward. Run by hand, prints ratios.

    tests/peers/run.sh trl verl                            # builds the peers' environments, once
    python bench/logprob_memory.py                         # CPU: 4,096 tokens, D = 896, V = 151,936, float32
    python bench/logprob_memory.py --device cuda --dtype bfloat16 --tokens 16384

Contenders: ours; plain (all logits, log_softmax, gather); trl and trl_plain (TRL's chunked function, and its functions on
all logits); verl (its chunked function); matmul (the bare product with the output matrix, forward only).
Extra memory is the peak above the inputs; it includes the gradients of hidden states and output matrix, the same for all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import ROOT, Contender, alternate, machine, measured, median, serve, spread, table, versions

ENVIRONMENTS = {"ours": "", "plain": "", "trl": "trl", "trl_plain": "trl", "verl": "verl", "matmul": ""}
LIMIT_MEMORY, LIMIT_TIME = 1 / 8, 1.15  # of plain, on the CPU in float32


def forward(name: str, options: argparse.Namespace):
    """(hidden, weight, targets) -> (log-probs, entropies)."""
    if name == "ours":
        from tepo_core.model.logprobs import chosen_logprobs

        return lambda h, w, t: chosen_logprobs(h, w, t, temperature=0.9, chunk=options.chunk)
    if name == "plain":
        from tepo_core.model.logprobs import plain_logprobs

        return lambda h, w, t: plain_logprobs(h, w, t, temperature=0.9)
    if name == "trl":
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        def chunked(h, w, t):
            out = ChunkedLogProbFunction.apply(h, w, None, t, 0.9, 8192, None, 1.0, ("entropy",))
            return out[0], out[1]

        return chunked
    if name == "trl_plain":
        from trl.trainer.utils import selective_log_softmax_and_entropy

        return lambda h, w, t: selective_log_softmax_and_entropy((h @ w.T)[None], t[None], temperature=0.9)
    if name == "verl":
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        fused = FusedLinearForPPO()
        return lambda h, w, t: fused(h, w, t, 0.9)
    return lambda h, w, t: (h @ w.T, None)


def worker(options: argparse.Namespace) -> None:
    import torch

    device, dtype = options.device, getattr(torch, options.dtype)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.hidden, generator=g) * 0.05).to(device, dtype).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,), generator=g).to(device)
    up = torch.randn(2, options.tokens, generator=g).to(device)
    call = forward(options.worker, options)
    outcome = {}

    def step() -> None:
        hidden.grad = weight.grad = None
        if options.worker == "matmul":
            with torch.no_grad():
                call(hidden, weight, targets)
        else:
            logprobs, entropy = call(hidden, weight, targets)
            (logprobs.flatten() * up[0] + entropy.flatten() * up[1]).sum().backward()
            outcome.update(logprob=float(logprobs.detach().sum()), entropy=float(entropy.detach().sum()))
            outcome["gradient"] = float(weight.grad.norm())
        if device == "cuda":
            torch.cuda.synchronize()

    def repetition() -> dict:
        hidden.grad = weight.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        result = measured(step)
        if device == "cuda":
            result["extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        return result | outcome

    serve({"versions": versions("torch", "trl", "verl")}, repetition)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--contenders", nargs="+", choices=list(ENVIRONMENTS), default=["ours", "plain", "trl", "verl"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--chunk", type=int, help="logits our form holds at once (default: its own choice)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1, help="rounds before the ones that count")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    shared = []
    for name in ("tokens", "hidden", "vocabulary", "dtype", "device", "chunk"):
        if getattr(options, name) is not None:
            shared += [f"--{name}", str(getattr(options, name))]
    script = str(Path(__file__).relative_to(ROOT))
    contenders = [Contender(script, name, ENVIRONMENTS[name], shared, options.threads) for name in options.contenders]
    alternate(contenders, options.repetitions, options.warm)
    for contender in contenders:
        contender.close()
    base = next((c for c in contenders if c.name == "plain"), contenders[0])
    time0, memory0 = (median([r[key] for r in base.results]) for key in ("seconds", "extra_mib"))
    rows = []
    for contender in contenders:
        seconds, extra = ([r[key] for r in contender.results] for key in ("seconds", "extra_mib"))
        checks = [f"{contender.results[-1].get(key, float('nan')):.6g}" for key in ("logprob", "entropy", "gradient")]
        about = " ".join(f"{k} {v}" for k, v in contender.about["versions"].items())
        ratios = [f"{median(seconds) / time0:.2f}", f"{median(extra) / memory0:.3f}"]
        rows.append([contender.name, spread(seconds), ratios[0], f"{median(extra):.0f}", ratios[1], *checks, about])
    print(
        f"{options.tokens} tokens, D = {options.hidden}, V = {options.vocabulary}, {options.dtype}, {options.device}, "
        f"{options.threads} threads, {options.repetitions} alternating repetitions, forward and backward of both outputs"
    )
    ratio = f"/ {base.name}"
    checks = ["sum logprob", "sum entropy", "norm dW"]
    print(table(["contender", "seconds", ratio, "extra MiB", ratio, *checks, "versions"], rows))
    print(machine())
    if base.name == "plain" and options.device == "cpu":
        print(f"wanted of ours: memory at most {LIMIT_MEMORY:.3f}, time at most {LIMIT_TIME}")


if __name__ == "__main__":
    main()
