"""The process that holds vLLM. Started by :class:`tepo_core.rollout.vllm_engine.VllmEngine`, never imported by the trainer.

It imports nothing of the project, so it may run on another Python environment than the trainer. It speaks over one
inherited socket: a request is ``(name, arguments)``, an answer ``("ok", value)`` or ``("error", traceback)``.
The engine core runs in this very process (no grandchildren), and the process ends when the trainer does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

MISSING_VLLM = 3


def watch_parent(parent: int, folder: str) -> None:
    """End this process as soon as the trainer is gone, also in the middle of a generation, and remove its weights."""
    while True:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        time.sleep(0.5)


class Worker:
    """Requests are the public methods."""

    def __init__(self, settings: dict) -> None:
        from vllm import LLM

        self.repack = settings["repack"]
        self.llm = LLM(**settings["llm"])

    def hello(self) -> dict:
        """What the trainer checks before work starts."""
        import torch
        import vllm

        config = self.llm.llm_engine.model_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "vocabulary": int(config.get_vocab_size()),
            "context": int(config.max_model_len),
        }

    def generate(self, prompts, seeds, temperature, top_p, greedy, max_new_tokens, stop_ids) -> dict:
        """One response a (prompt, seed) pair. Requests that share a prompt share its cached prefix."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = [
            SamplingParams(
                n=1,
                temperature=0.0 if greedy else temperature,
                top_p=1.0 if greedy else top_p,
                seed=None if greedy else seed,
                max_tokens=max_new_tokens,
                stop_token_ids=stop_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for seed in seeds
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        tokens, logprobs = [], []
        for output in outputs:
            best = output.outputs[0]
            ids = list(best.token_ids)
            tokens.append(ids)
            logprobs.append([float(x) for x in best.logprobs.logprobs[: len(ids)]])
        return {"tokens": tokens, "logprobs": logprobs}

    def update(self, folder: str) -> None:
        """Read new weights from ``folder`` and forget every cached prefix, which belongs to the old ones."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if self.repack:
            self.llm.apply_model(repack_linear_layers)
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Free the GPU: weights to host memory, cache dropped."""
        self.llm.sleep(level=1)

    def wake(self) -> None:
        self.llm.wake_up()

    def memory(self) -> int:
        """Resident memory of this process, bytes."""
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def repack_linear_layers(model) -> int:
    """Build again what the CPU build packs from weights that are still there. Returns how many layers were packed.

    The CPU build multiplies with a packed copy of each matrix. A reload packs the layers it loads; an output layer tied to
    the embedding loads nothing itself and would keep the packed copy of the old weights, without a warning."""
    count = 0
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and weight is not None and weight.ndim == 2 and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)
            count += 1
    return count


def main() -> None:
    settings = json.loads(sys.argv[1])
    connection = Connection(settings["socket"])
    threading.Thread(target=watch_parent, args=(settings["parent"], settings["folder"]), daemon=True).start()
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        sys.exit(MISSING_VLLM)
    worker = Worker(settings)
    connection.send(("ok", worker.hello()))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            break
        if name == "close":
            connection.send(("ok", None))
            break
        try:
            connection.send(("ok", getattr(worker, name)(**arguments)))
        except Exception:
            connection.send(("error", traceback.format_exc()))
    connection.close()
    # vLLM's own shutdown can wait on helper threads for ever; nothing here is left to save.
    os._exit(0)


if __name__ == "__main__":
    main()
