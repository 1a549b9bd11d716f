"""Sampling with vLLM in a process of its own, behind the same interface as the transformers engine.

The trainer writes its weights to a private folder after each phase of updates; the worker reloads them and both sides score
a probe batch. A checksum of the loaded tensors is not enough: the CPU build multiplies with packed copies, and the copy of
an output matrix tied to the embedding is not renewed by vLLM's reload. The worker packs it again; should the log-probs still
differ, the engine is started afresh from the same folder, and if that does not help either, the run stops.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tepo_core.model.logprobs import LogprobError, causal_model, sequence_logprobs
from tepo_core.rollout.types import Rollouts, SamplingParams
from tepo_core.rollout.vllm_process import ALTERNATIVE, EngineError, WorkerProcess
from tepo_core.seeding import derive_seed, numpy_generator, torch_generator

LOG = logging.getLogger(__name__)
# Largest allowed gap in nats between both sides on the probe batch. float32: of any token. bfloat16: of the mean, because
# single tokens differ by 0.1 and more between kernels.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def export_weights(model: Any) -> dict[str, torch.Tensor]:
    """Weights of a causal LM under their Hugging Face names, on the CPU: adapters merged, tied copies once.

    The model itself is not changed. Tensors are copies or views of CPU parameters: write them before the next update."""
    causal = causal_model(model)
    if causal is not model:
        from peft.tuners.lora import LoraLayer

        merged = {
            f"{name}.base_layer.weight": layer.base_layer.weight + sum(layer.get_delta_weight(a) for a in layer.active_adapters)
            for name, layer in causal.named_modules()
            if isinstance(layer, LoraLayer)
        }
    else:
        merged = {}
    tied = set(getattr(causal, "all_tied_weights_keys", None) or ())
    weights = {}
    for name, tensor in causal.state_dict().items():
        if ".lora_" in name or name.startswith("mtp.") or name in tied:
            continue
        tensor = merged.get(name, tensor)
        weights[name.replace(".base_layer.", ".")] = tensor.detach().to("cpu").contiguous()
    return weights


class VllmEngine:
    """vLLM behind the :class:`~tepo_core.rollout.types.Engine` protocol.

    Args:
        model: the trainer's causal LM (Hugging Face, or a peft LoRA model around one), float32 or bfloat16.
        eos_ids: tokens that end a response.
        pad_id: padding token for the trainer's side of the probe.
        context: longest sequence, prompt and response together, in tokens.
        temperature: the training temperature, at which the probe is scored.
        gpu_memory_share: share of the GPU's memory for weights and cache (GPU only).
        batch_size: most responses decoded at once.
        python: interpreter that has vLLM; default the environment variable TEPO_VLLM_PYTHON, else this interpreter.
        sleep: free the GPU between generations (GPU only).
        self_test: at the first update, load strongly changed weights first and check that they arrive. A real update may
            be smaller than the tolerance, so a sampler that never takes over some part would pass for a long time.
        repack: build packed matrices again after a reload (see the module). False is for tests of the detection.

    Log-probs are those of the tempered distribution over the whole vocabulary. vLLM gives them after top-p, and without
    temperature for greedy answers; there they are NaN (rescore with :mod:`tepo_core.rollout.rescore`). Entropies are
    always None: vLLM does not compute them over the whole vocabulary.

    Raises :class:`EngineError` when vLLM is missing or does not start (its last lines are in the message).
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: list[int],
        pad_id: int,
        context: int,
        temperature: float = 1.0,
        gpu_memory_share: float = 0.5,
        batch_size: int = 256,
        python: str | None = None,
        sleep: bool = False,
        self_test: bool = True,
        repack: bool = True,
    ) -> None:
        causal = causal_model(model)
        self.eos_ids, self.pad_id, self.context, self.temperature = list(eos_ids), pad_id, context, temperature
        self.vocabulary = int(causal.config.get_text_config().vocab_size)
        self.dtype = next(causal.parameters()).dtype
        if self.dtype not in TOLERANCE:
            raise EngineError(f"policy.dtype = {self.dtype}: vLLM is used with float32 or bfloat16; {ALTERNATIVE}")
        self.on_gpu = next(causal.parameters()).is_cuda
        self.sleeps, self._asleep = sleep and self.on_gpu, False
        self._self_test, self._repack, self._batch_size = self_test, repack, batch_size
        self._gpu_memory_share = gpu_memory_share
        self.gap = 0.0  # of the latest probe, nats
        self.restarts = 0
        self.folder = Path(tempfile.mkdtemp(prefix="tepo-vllm-"))
        self.worker = WorkerProcess(python or os.environ.get("TEPO_VLLM_PYTHON") or sys.executable, self.folder)
        self._finalizer = weakref.finalize(self, _stop, self.worker, os.getpid())
        try:
            config = copy.deepcopy(causal.config)
            config.architectures = [type(causal).__name__]  # a model built in code has none, and vLLM would guess
            config.save_pretrained(self.folder)
            self._write(model)
            self._start()
            self._verify(model)
        except BaseException:
            self.close()
            raise

    # -- the Engine protocol ----------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], n: int, params: SamplingParams, seeds: list[int]) -> Rollouts:
        """n responses for each prompt, ordered by prompt, then sample. ``seeds`` has one entry a prompt."""
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one seed a prompt")
        for row, prompt in enumerate(prompts):
            if not prompt or min(prompt) < 0 or max(prompt) >= self.vocabulary:
                raise EngineError(
                    f"prompt {row} is empty or has a token outside the engine's vocabulary of {self.vocabulary}: "
                    "the tokenizer and the model do not belong together"
                )
            if len(prompt) + params.max_new_tokens > self.context:
                raise EngineError(
                    f"prompt {row} has {len(prompt)} tokens and max_new_tokens = {params.max_new_tokens}, more than the "
                    f"context of {self.context}; lower max_new_tokens, raise policy.tiny.context (source: tiny) or drop long prompts"
                )
        self._wake()
        answer = self._call(
            "generate",
            prompts=[prompt for prompt in prompts for _ in range(n)],
            seeds=[derive_seed(seed, "vllm", sample) for seed in seeds for sample in range(n)],
            temperature=params.temperature,
            top_p=params.top_p,
            greedy=params.greedy,
            max_new_tokens=params.max_new_tokens,
            stop_ids=self.eos_ids,
        )
        if self.sleeps:
            self._call("sleep")
            self._asleep = True
        known = not params.greedy and params.top_p == 1 or params.greedy and params.temperature == 1
        logprobs = [np.asarray(row, np.float32) for row in answer["logprobs"]]
        return Rollouts(
            prompt_ids=[list(prompt) for prompt in prompts for _ in range(n)],
            response_ids=answer["tokens"],
            logprobs=logprobs if known else [np.full_like(row, np.nan) for row in logprobs],
            entropies=[None] * len(logprobs),
            finished=[bool(row) and row[-1] in self.eos_ids for row in answer["tokens"]],
            prompt_index=[p for p in range(len(prompts)) for _ in range(n)],
            sample_index=list(range(n)) * len(prompts),
        )

    def update_weights(self, model: Any) -> None:
        """Hand the trainer's weights to vLLM and check by log-probs that it samples from them.

        Raises EngineError when both sides still differ after a restart of vLLM."""
        self._wake()
        if self._self_test:
            changed = _changed_copy(model)
            if self.probe_gap(changed) <= 10 * TOLERANCE[self.dtype]:
                LOG.warning("the probe batch hardly sees a large change of the weights; a stale sampler may pass unseen")
            self._hand_over(changed)
            self._self_test = False
            del changed
        self._hand_over(model)

    def close(self) -> None:
        """End the worker and remove its folder. May be called twice."""
        self._finalizer()

    # -- weights ----------------------------------------------------------------------------------------------------

    def _hand_over(self, model: Any) -> None:
        self._write(model)
        self._call("update", folder=str(self.folder))
        try:
            self._verify(model)
        except EngineError as error:
            LOG.warning("%s; starting vLLM afresh from the same weights", error)
            self.restarts += 1
            self.worker.end()
            self._start()
            self._verify(model)

    def _write(self, model: Any) -> None:
        # Written beside and moved: a reader that still maps the old file keeps it.
        part, path = self.folder / "part", self.folder / "model.safetensors"
        try:
            save_file(export_weights(model), part, metadata={"format": "pt"})
            os.replace(part, path)
        except OSError as error:
            raise EngineError(
                f"weights for vLLM cannot be written to {self.folder} ({error}); free space there, or point TMPDIR elsewhere"
            ) from error

    def probe_gap(self, model: Any) -> float:
        """Sample a few tokens with vLLM, score them with ``model``: the gap in nats (largest; mean for bfloat16).

        Sampled hotter where the logits spread more than 1 (vLLM allows 2): a sharp policy gives its own tokens log-prob 0
        whatever happens to its weights, and such a probe would see nothing."""
        generator = numpy_generator("vllm probe")
        width, steps = min(6, self.context // 2), min(8, self.context // 2)
        prompts = generator.integers(0, self.vocabulary, (8, width)).tolist()
        was_training = model.training
        model.eval()
        with torch.no_grad():
            inputs = torch.tensor(prompts, device=next(model.parameters()).device)
            spread = float(model(input_ids=inputs, use_cache=False).logits[:, -1].float().std(-1).mean())
        temperature = max(self.temperature, min(spread, 2.0)) if math.isfinite(spread) else self.temperature  # vLLM: at most 2
        answer = self._call(
            "generate",
            prompts=prompts,
            seeds=[derive_seed("vllm probe", row) for row in range(len(prompts))],
            temperature=temperature,
            top_p=1.0,
            greedy=False,
            max_new_tokens=steps,
            stop_ids=self.eos_ids,
        )
        try:
            with torch.no_grad():
                scored_BT, _, mask_BT = sequence_logprobs(
                    model, prompts, answer["tokens"], pad_id=self.pad_id, temperature=temperature, entropy=False
                )
        except LogprobError as error:
            raise EngineError(f"vLLM's tokens cannot be scored by the trainer's model: {error}") from error
        finally:
            model.train(was_training)
        sampled_N = torch.tensor([x for row in answer["logprobs"] for x in row], dtype=torch.float64)
        gap_N = (scored_BT[mask_BT].double().cpu() - sampled_N).abs()
        gap = float(gap_N.mean() if self.dtype == torch.bfloat16 else gap_N.max())
        return gap if math.isfinite(gap) else math.inf

    def _verify(self, model: Any) -> None:
        self.gap = self.probe_gap(model)
        if self.gap > TOLERANCE[self.dtype]:
            raise EngineError(
                f"vLLM samples from other weights than the trainer's: log-probs of a probe batch differ by {self.gap:.3g} "
                f"nats, allowed are {TOLERANCE[self.dtype]}; {ALTERNATIVE}"
            )

    # -- the worker process -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        hello = self.worker.start(self._llm_settings(config), self._repack and not self.on_gpu)
        if hello["vocabulary"] != self.vocabulary:
            raise EngineError(
                f"vLLM's vocabulary has {hello['vocabulary']} tokens and the trainer's {self.vocabulary}; {ALTERNATIVE}"
            )

    def _llm_settings(self, config: dict) -> dict:
        settings = {
            "model": str(self.folder),
            "runner": "generate",
            "skip_tokenizer_init": True,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.context,
            "max_num_seqs": self._batch_size,
            "max_num_batched_tokens": max(8192, self._batch_size, self.context),
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
        }
        if self.on_gpu:
            return settings | {"gpu_memory_utilization": self._gpu_memory_share, "enable_sleep_mode": self.sleeps}
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        token = 2 * config["num_hidden_layers"] * heads * head_size * self.dtype.itemsize
        cache = min(max(token * self.context * (self._batch_size + 1), 2**26), 2**31)
        return settings | {"enforce_eager": True, "kv_cache_memory_bytes": cache}

    def _wake(self) -> None:
        if self._asleep:
            self._call("wake")
            self._asleep = False

    def _call(self, name: str, **arguments: Any) -> Any:
        return self.worker.call(name, **arguments)


def _stop(worker: WorkerProcess, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the engine, but neither worker nor folder
        worker.end()
        shutil.rmtree(worker.folder, ignore_errors=True)


def _changed_copy(model: Any) -> Any:
    """A copy of the model with every weight multiplied by 1.5 or 0.5 at random."""
    changed = copy.deepcopy(model)
    generator = torch_generator("vllm self test")
    with torch.no_grad():
        for parameter in changed.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) - 0.5
            parameter.mul_((1 + sign).to(parameter.dtype))
    return changed
