"""The RL loop: sample groups, grade, learn in several updates, measure, repeat.

One rollout step samples ``prompts_per_rollout`` x ``group_size`` responses and makes ``minibatches`` x ``epochs`` updates. A run can be
killed at any moment: called again with the same parameters it continues from the last checkpoint and ends with the same bytes
(on a CPU) as a run that was never stopped.
"""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tepo_core.config import ARITHMETIC_TASKS, ConfigError, Study
from tepo_core.files import write_json
from tepo_core.grading.graders import make_grader
from tepo_core.model.policy import load_policy, resolve_device, save_policy, set_threads, with_adapters
from tepo_core.objectives.methods import resolve
from tepo_core.progress import Progress
from tepo_core.rollout.engines import make_engine
from tepo_core.rollout.rescore import rescore
from tepo_core.rollout.types import SamplingParams
from tepo_core.runs.config import run_config
from tepo_core.runs.folder import finish, run_folder, run_name
from tepo_core.runs.metrics import METRICS_FILE, metric_line
from tepo_core.runs.tables import write_tables
from tepo_core.tasks.arithmetic import Fact
from tepo_core.tasks.data import data_folder, grader_kind, knows_tokens, load_facts, load_split
from tepo_core.tasks.problem import Problem
from tepo_core.training import records
from tepo_core.training.checkpoint import Workspace
from tepo_core.training.experience import Experience, mini_batches, reward_sums
from tepo_core.training.optimizers import rl_optimizer
from tepo_core.training.result import TrainResult
from tepo_core.training.sampler import Sampler
from tepo_core.training.update import DivergenceError, Learner, UpdateResult
from tepo_core.training.validation import Validator

REWARD_WINDOW = 10  # rollouts averaged by the rule that stops a run whose reward has fallen


def train(study: Study, task: str, method: str, seed: int, root: Path, out: Path | None = None) -> TrainResult:
    """Train one method from the base policy of (task, seed) and write its run folder (default ``runs/train/...``).

    Raises :class:`ConfigError` or ``DataError`` before any work when a parameter, the data or the base policy is unusable."""
    out = out or run_folder(root, "train", task, seed, method)
    with Trainer(study, task, method, seed, root) as trainer:
        trainer.run()
        trainer.write(out)
    return TrainResult(out)


@dataclass
class Trainer:
    """State of one run. Use as a context manager: leaving it frees the engine, the grader and the lock."""

    study: Study
    task: str
    name: str
    seed: int
    root: Path
    step: int = 0
    updates: int = 0
    stopped: str | None = None
    rewards: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        study, folder = self.study, data_folder(self.root, self.task, self.seed)
        self.method = resolve(self.name, study.variants)
        self.train = study.train_for(self.name)
        base = run_folder(self.root, "warmup", self.task, self.seed) / "policy"
        problems = load_split(folder, "train")
        validation = load_split(folder, "validation") if self.train.validate_every else []
        facts = load_facts(folder)
        set_threads(study)
        self.policy = with_adapters(load_policy(base, study.policy), study.policy, self.seed)
        problems = self._fitting(problems)
        self.work = Workspace(self.root, f"train-{run_name(self.task, self.seed, self.name)}", self._key())
        try:
            self.policy.model.to(resolve_device(study.compute))
            self.reference = self._frozen_copy()
            self.learner = self._learner()
            self.grader = make_grader(grader_kind(self.task))
            self.engine = make_engine(study, self.policy, self.train)
            self._observers(problems, validation, facts)
        except BaseException:
            self.work.release(remove=False)
            raise

    def _key(self) -> list[Any]:
        """What decides the run: a checkpoint belongs to it alone."""
        study = self.study
        groups = [group.model_dump() for group in (study.rollout, study.policy, study.data, study.warmup)]
        return [self.train.model_dump(), self.method.options, self.method.preset, *groups, self.task, self.name, self.seed]

    def _learner(self) -> Learner:
        self.optimizer = rl_optimizer(self.policy.model, self.train)
        return Learner(
            self.policy,
            self.method,
            self.optimizer,
            temperature=self.train.temperature,
            grad_clip=self.train.grad_clip,
            micro_batch_tokens=self.train.micro_batch_tokens,
            constant=float(self.train.max_new_tokens),
            reference_model=self.reference,
        )

    def _observers(self, problems: list[Problem], validation: list[Problem], facts: dict[str, Fact]) -> None:
        """Who samples for learning and who measures."""
        labels = (self.seed, self.task)  # not the method: methods of a seed see the same prompts and the same random numbers
        self.sampler = Sampler(
            problems=problems,
            prompt_ids=[self.policy.encode(p.prompt) for p in problems],
            engine=self.engine,
            grader=self.grader,
            policy=self.policy,
            train=self.train,
            rollout=self.study.rollout,
            advantage=self.method.advantage,
            seed_labels=labels,
            facts=facts if knows_tokens(self.task) else None,
        )
        self.validator = Validator(
            problems=validation,
            policy=self.policy,
            engine=self.engine,
            grader=self.grader,
            params=SamplingParams(self.train.temperature, self.train.top_p, self.train.max_new_tokens),
            seed_labels=labels,
            facts=facts,
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.engine.close()
        self.grader.close()
        self.work.release(remove=kind is None and self.stopped is None)

    def run(self) -> None:
        """All remaining rollout steps."""
        self._restore()
        progress = Progress(self.train.rollouts, f"train {run_name(self.task, self.seed, self.name)}")
        with _termination() as asked:
            if self.step == 0:
                self._validate()
            while self.step < self.train.rollouts and self.stopped is None:
                tokens, shown = self._rollout_step()
                progress.update(self.step, tokens=tokens, **shown)
                due = self.train.checkpoint_every and self.step % self.train.checkpoint_every == 0
                if asked() or (due and self.step < self.train.rollouts):
                    self._save()
                if asked():
                    raise SystemExit(
                        f"{self.name} s{self.seed}: terminated after rollout {self.step}; a checkpoint was written, "
                        "run the same command again to continue"
                    )

    def write(self, out: Path) -> None:
        """Write the run folder."""
        out.mkdir(parents=True, exist_ok=True)
        save_policy(self.policy, out / "policy")
        (out / METRICS_FILE).write_bytes((self.work.folder / METRICS_FILE).read_bytes())
        write_tables(self.work.folder, out)
        write_json(
            out / "config.json",
            run_config(
                self.study,
                "train",
                self.task,
                self.seed,
                self.name,
                preset=self.method.preset,
                objective=self.method.options,
                train=self.train.model_dump(),
                rollout=self.study.rollout.model_dump(),
                prompts_too_long=self.left_out,
            ),
        )
        finish(out, self.stopped)

    # -- one rollout step -------------------------------------------------------------------------------------------------

    def _rollout_step(self) -> tuple[int, dict[str, float]]:
        self.step += 1
        self.policy.model.eval()
        collected = self.sampler.collect(self.step)
        experience, kept = collected.everything, collected.kept
        sums = {**reward_sums(experience), **collected.sums}
        recorded = self.train.record_every and (
            self.step % self.train.record_every == 0 or self.step in (1, self.train.rollouts)
        )
        if recorded:
            sums["kl_base"] = self._kl_to_base(experience)
        self._log("rollout", sums, collected.values)
        if recorded:
            rows = records.chosen_rows(list(range(len(experience.rollouts))), self.train.record_responses, self.seed, self.step)
            self.work.append("responses.jsonl", records.response_lines(experience, rows, self.policy, self.step))
        if kept is not None:
            if self.method.needs_reference:
                kept.reference = self._reference_logprobs(kept)
            self._learn(kept, bool(recorded))
            self.engine.update_weights(self.policy.model)
        if sums["correct"][1]:  # else nothing was graded, and there is no accuracy
            self.rewards.append(sums["correct"][0] / sums["correct"][1])
        self._check_reward()
        if self.train.validate_every and (self.step % self.train.validate_every == 0 or self.step == self.train.rollouts):
            self._validate()
        shown = {name: sums[name][0] / sums[name][1] for name in ("reward", "entropy") if sums[name][1]}
        return collected.values["tokens"], shown

    def _learn(self, experience: Experience, recorded: bool) -> None:
        """All updates of a rollout step. A loss or gradient that is not finite stops the run before it reaches the weights."""
        if self.method.needs_exact_kl and self.method.settings.kl.reference == "old":
            self.learner.old_model = self._frozen_copy()
        # Gradient checkpointing works in training mode only. Without dropout the mode changes nothing else.
        self.policy.model.train(self.policy.model.is_gradient_checkpointing)
        cut = mini_batches(len(experience.problems), self.train.minibatches, self.train.epochs, self.seed, self.step)
        parts = [experience.rows_of(prompts) for prompts in cut]
        self.learner.remember(experience, parts[: len(parts) // self.train.epochs])
        for update, rows in enumerate(parts, start=1):
            last = update == len(parts)
            self._set_lr()
            try:
                result = self.learner.update(experience, rows, (self.seed, self.step, update), keep_tokens=recorded and last)
            except DivergenceError as error:
                self._stop(f"{error} at update {update}", experience, rows)
                return
            self.updates += 1
            values = {**result.values, "lr": self.optimizer.param_groups[0]["lr"]}
            self._log("update", result.sums, values, update=update)
            if recorded and last:
                self._record_tokens(experience, result, rows, update)
            kl, tokens = result.sums["kl_old"]
            if tokens and kl / tokens > self.train.stop_kl:
                self._stop(
                    f"KL to the sampling policy {kl / tokens:.3g} nats a token is above stop_kl = {self.train.stop_kl} "
                    f"at update {update}",
                    experience,
                    rows,
                )
                return

    def _set_lr(self) -> None:
        """Linear ramp over the updates of the first ``lr_warmup_rollouts`` rollouts: a cold Adam can wreck a small policy."""
        ramp = self.train.lr_warmup_rollouts * self.train.minibatches * self.train.epochs
        self.optimizer.param_groups[0]["lr"] = self.train.lr * min(1.0, (self.updates + 1) / ramp if ramp else 1.0)

    def _record_tokens(self, experience: Experience, result: UpdateResult, rows: list[int], update: int) -> None:
        available = [row for row in rows if row in result.tokens]
        chosen = records.chosen_rows(available, self.train.record_responses, self.seed, self.step, "tokens")
        lines = records.token_lines(experience, result, chosen, self.policy, self.step, update)
        self.work.append("tokens.jsonl", lines)

    # -- measures -----------------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        if not self.train.validate_every:
            return
        self.policy.model.eval()
        sums, facts = self.validator.measure(self.step)
        self._log("validation", sums, {})
        self.work.append("facts.jsonl", records.json_lines(facts))

    def _reference_logprobs(self, experience: Experience) -> list:
        return rescore(
            self.reference,
            experience.rollouts,
            pad_id=self.policy.pad_id,
            temperature=self.train.temperature,
            micro_batch_tokens=self.train.micro_batch_tokens,
        )[0]

    def _kl_to_base(self, experience: Experience) -> tuple[float, float]:
        """k1 estimate of KL(policy || base): mean log-ratio on the policy's own samples."""
        base = self._reference_logprobs(experience)
        total = sum(float((new - old).sum(dtype="float64")) for new, old in zip(experience.old_logprobs, base, strict=True))
        return total, float(sum(len(row) for row in base))

    def _log(self, kind: str, sums: dict, values: dict, **extra: Any) -> None:
        self.work.append(METRICS_FILE, metric_line(kind, self.step, sums, values, **extra))

    # -- stopping, saving, restoring --------------------------------------------------------------------------------------

    def _check_reward(self) -> None:
        """Stop when the mean reward of the last rollouts has fallen from its peak by the configured share."""
        drop, n = self.train.stop_reward_drop, REWARD_WINDOW
        if drop == 0 or len(self.rewards) < 2 * n or self.stopped:
            return
        means = [sum(self.rewards[i - n : i]) / n for i in range(n, len(self.rewards) + 1)]
        if means[-1] < (1 - drop) * max(means):
            self._stop(
                f"accuracy fell from {max(means):.3f} to {means[-1]:.3f} (means of {n} rollouts), "
                f"more than stop_reward_drop = {drop}"
            )

    def _stop(self, reason: str, experience: Experience | None = None, rows: list[int] | None = None) -> None:
        self.stopped = f"rollout {self.step}: {reason}"
        self.work.append(METRICS_FILE, metric_line("stop", self.step, {}, {}, reason=self.stopped))
        if experience is not None:
            self.work.append("responses.jsonl", records.response_lines(experience, rows or [], self.policy, self.step))

    def _save(self) -> None:
        self.work.save(
            {
                "model": self.policy.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "updates": self.updates,
                "rewards": self.rewards,
            }
        )

    def _restore(self) -> None:
        if (state := self.work.load()) is None:
            return
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.updates, self.rewards = state["step"], state["updates"], state["rewards"]
        self.engine.update_weights(self.policy.model)

    # -- set-up ---------------------------------------------------------------------------------------------------------------

    def _frozen_copy(self) -> Any:
        model = copy.deepcopy(self.policy.model).eval()
        return model.requires_grad_(False)

    def _fitting(self, problems: list) -> list:
        """The problems whose prompt leaves room for ``max_new_tokens``. Built-in tasks must fit as a whole; of a public set the
        others are left out of training and counted in ``config.json``.

        Raises :class:`ConfigError` when that leaves none."""
        room = self.policy.context - self.train.max_new_tokens
        lengths = [len(self.policy.encode(p.prompt)) for p in problems]
        fitting = [p for p, length in zip(problems, lengths, strict=True) if length <= room]
        self.left_out = len(problems) - len(fitting)
        if not fitting or (self.left_out and self.task in ARITHMETIC_TASKS):
            raise ConfigError(
                f"train.max_new_tokens = {self.train.max_new_tokens}: with prompts of up to {max(lengths)} tokens it exceeds "
                f"the model's context of {self.policy.context}; allowed: at most {self.policy.context - max(lengths)}"
            )
        return fitting


@contextmanager
def _termination() -> Iterator[Any]:
    """Turn SIGTERM into a question that the loop asks between rollouts, so that a checkpoint is written first."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event.is_set
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event.is_set
    finally:
        signal.signal(signal.SIGTERM, previous)
