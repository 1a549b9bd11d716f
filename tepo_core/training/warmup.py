"""The ``warmup`` stage: supervised learning of the base policy on the task's traces. All methods of a seed start from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from tepo_core.config import Study
from tepo_core.files import source_path, write_json
from tepo_core.model.batching import length_parts
from tepo_core.model.logprobs import response_states, state_logprobs
from tepo_core.model.mtp import ahead_loss, modules_of
from tepo_core.model.policy import Policy, build_tiny, load_policy, resolve_device, save_policy, set_threads, with_adapters
from tepo_core.progress import Progress
from tepo_core.runs.config import run_config
from tepo_core.runs.folder import finish, run_folder, run_name
from tepo_core.runs.metrics import METRICS_FILE, Metrics, metric_line, read_metrics
from tepo_core.seeding import epoch_rows
from tepo_core.tasks.data import data_folder, load_split
from tepo_core.tasks.tokenizer import build_tokenizer
from tepo_core.training.checkpoint import Workspace
from tepo_core.training.optimizers import WarmupOptimizer

PARTS = 3  # of a batch, each of rows of like length: half of a whole batch would be padding
LOG_EVERY = 20
SAVE_EVERY = 200


@dataclass(frozen=True)
class WarmupResult:
    """The warmed-up policy's run folder."""

    folder: Path
    parameters: int

    @cached_property
    def metrics(self) -> Metrics:
        """The run's metrics, read once."""
        return read_metrics(self.folder)

    def table(self) -> pd.DataFrame:
        """Loss (nats a token) and token accuracy along the warm-up; empty when there was none."""
        frame = self.metrics.frame("warmup").reindex(columns=["step", "loss", "token_correct", "lr"])
        return frame.iloc[:: max(1, len(frame) // 10)].set_index("step")


def initial_policy(study: Study, seed: int, root: Path) -> Policy:
    """The policy before the warm-up: the built-in tiny model, or the one that ``policy.source`` names (a path from ``root``)."""
    if study.policy.source == "tiny":
        return build_tiny(study.policy, build_tokenizer(), seed)
    source = study.policy.source
    return load_policy(source_path(source, root) or source, study.policy)


def cosine_lr(peak: float, step: int, steps: int) -> float:
    """Cosine from ``peak`` at step 0 to 0 at ``steps``, after a linear ramp over the first 3 %."""
    ramp = max(1, round(0.03 * steps))
    if step < ramp:
        return peak * (step + 1) / ramp
    return peak * 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp)))


def warmup(study: Study, task: str, seed: int, root: Path, out: Path | None = None) -> WarmupResult:
    """Train the base policy of (task, seed) and write its run folder. Continues where a killed one stopped.

    Multi-token modules, where ``policy.mtp_modules`` asks for them, learn beside it and leave the backbone as it would be
    without them."""
    cfg, out = study.warmup, out or run_folder(root, "warmup", task, seed)
    set_threads(study)
    device = resolve_device(study.compute)
    traces = load_split(data_folder(root, task, seed), "warmup") if cfg.steps else []
    policy = initial_policy(study, seed, root)
    if cfg.steps:
        policy = with_adapters(policy, study.policy, seed)
    policy.model.to(device)
    key = [cfg.model_dump(), study.policy.model_dump(), study.data.model_dump(), task, seed]
    work = Workspace(root, f"warmup-{run_name(task, seed)}", key)
    try:
        _train(policy, traces, study, seed, work, label=f"warmup {task} s{seed}")
        out.mkdir(parents=True, exist_ok=True)
        save_policy(policy, out / "policy")
        metrics = work.folder / METRICS_FILE
        (out / METRICS_FILE).write_bytes(metrics.read_bytes() if metrics.exists() else b"")
        write_json(out / "config.json", run_config(study, "warmup", task, seed, warmup=cfg.model_dump()))
        finish(out)
    except BaseException:
        work.release(remove=False)
        raise
    work.release(remove=True)
    return WarmupResult(out, policy.parameters)


def _train(policy: Policy, traces: list, study: Study, seed: int, work: Workspace, *, label: str) -> None:
    cfg = study.warmup
    prompts = [policy.encode(trace.prompt) for trace in traces]
    eos = policy.tokenizer.eos_token_id
    responses = [policy.tokenizer(t.answer, add_special_tokens=False)["input_ids"] + [eos] for t in traces]
    optimizer = WarmupOptimizer(policy.model, cfg)
    start = 0
    if state := work.load():
        policy.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    named = list(policy.model.named_parameters())
    backbone = optimizer.tensors(p for name, p in named if not name.startswith("mtp."))
    ahead_tensors = optimizer.tensors(p for name, p in named if name.startswith("mtp."))
    modules = 0 if modules_of(policy.model) is None else len(modules_of(policy.model))
    progress = Progress(cfg.steps, label)
    policy.model.train()
    for step in range(start, cfg.steps):
        rows = epoch_rows(step * cfg.batch_size, cfg.batch_size, len(traces), seed, "warmup")
        parts = length_parts(rows, [len(prompts[r]) + len(responses[r]) for r in rows], PARTS)
        tokens = sum(len(responses[r]) for r in rows)
        ahead_tokens = sum(max(0, len(responses[r]) - n) for r in rows for n in range(1, modules + 1))
        logged = (step + 1) % LOG_EVERY == 0 or step + 1 == cfg.steps
        optimizer.zero_grad()
        sums_3 = torch.zeros(3, dtype=torch.float64)  # loss, entropy, likely tokens
        for part in parts:
            states = response_states(
                policy.model, [prompts[r] for r in part], [responses[r] for r in part], pad_id=policy.pad_id
            )
            logprobs_BT, entropy_BT = state_logprobs(policy.model, states, temperature=1.0, entropy=logged)
            objective = -logprobs_BT.sum() / tokens
            if modules:
                ahead, count = ahead_loss(policy.model, states)
                objective = objective + ahead * count / max(ahead_tokens, 1)
            objective.backward()
            sums_3 += _sums(logprobs_BT.detach(), entropy_BT, states.mask_BT)
        norm = torch.nn.utils.clip_grad_norm_(backbone, cfg.grad_clip)
        if modules:  # clipped apart, or the modules would slow the backbone down
            torch.nn.utils.clip_grad_norm_(ahead_tensors, cfg.grad_clip)
        lr = cosine_lr(cfg.lr, step, cfg.steps)
        optimizer.step(lr)
        if logged:
            sums = {
                name: (value, tokens) for name, value in zip(("loss", "entropy", "token_correct"), sums_3.tolist(), strict=True)
            }
            work.append(METRICS_FILE, metric_line("warmup", step + 1, sums, {"lr": lr, "grad_norm": norm}))
        progress.update(step + 1, tokens=tokens, loss=float(sums_3[0]) / tokens)
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < cfg.steps:
            work.save({"model": policy.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
    policy.model.eval()


def _sums(logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor | None, mask_BT: torch.Tensor) -> torch.Tensor:
    """Over the tokens: -log pi, entropy (0 where it was not asked for), and how many have more than half of the mass."""
    likely = ((logprobs_BT > math.log(0.5)) & mask_BT).sum()
    entropy = torch.zeros(()) if entropy_BT is None else entropy_BT.detach().sum().cpu()
    return torch.stack([-logprobs_BT.sum().cpu().double(), entropy.double(), likely.cpu().double()])
