"""One update: a mini-batch through an objective, over micro-batches, into one optimiser step.

The gradient is that of the whole mini-batch however it is cut: denominators and covariance populations belong to the
mini-batch, and the shares of micro-batches add."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tepo_core.model.batching import micro_batches
from tepo_core.model.logprobs import ResponseStates, exact_kl, response_logits, response_states, state_logprobs
from tepo_core.model.mtp import ahead_logprobs
from tepo_core.model.policy import Policy
from tepo_core.objectives.methods import LossOutput, Method, MiniBatchTotals, TokenBatch
from tepo_core.objectives.metrics import merge
from tepo_core.objectives.population import identities
from tepo_core.objectives.types import NonFiniteError
from tepo_core.seeding import torch_generator
from tepo_core.tasks.problem import TOKEN_KINDS
from tepo_core.training.experience import Experience, pad_grid
from tepo_core.training.logit_credit import state_credit
from tepo_core.training.optimizers import HALF, MasterOptimizer


class DivergenceError(RuntimeError):
    """Loss or gradient is not finite. ``rows`` are the rows of the experience that were in the mini-batch."""

    def __init__(self, message: str, rows: list[int]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass
class UpdateResult:
    """Metrics of one update, and per-token results of its rows when they were asked for."""

    sums: dict[str, list[float]]
    values: dict[str, float]
    tokens: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


@dataclass
class Learner:
    """Policy, objective and optimiser. ``old_model`` (the sampling policy) and ``reference_model`` are copies that an exact KL
    needs, else None."""

    policy: Policy
    method: Method
    optimizer: MasterOptimizer
    temperature: float
    grad_clip: float
    micro_batch_tokens: int
    constant: float
    old_model: Any = None
    reference_model: Any = None

    def update(self, experience: Experience, rows: list[int], seed_labels: tuple, keep_tokens: bool = False) -> UpdateResult:
        """Accumulate the gradient of ``rows``, clip it, step; a gradient of exactly 0 makes no step (value ``skipped``).

        The metrics are over all tokens of ``rows`` for every method. Raises :class:`DivergenceError` before a step that is not
        finite."""
        totals = MiniBatchTotals(float(sum(experience.length(r) for r in rows)), float(len(rows)), self.constant)
        groups, silent = self._groups(experience, rows)
        self.optimizer.zero_grad()
        outputs, batches = [], []
        credited = keep_tokens or experience.kinds is not None
        for group, batch in zip(groups, self._micro_batches(experience, groups, seed_labels, credited), strict=True):
            output = self._loss(batch, totals, group, rows)
            output.loss.backward()
            outputs.append(output)
            batches.append(batch)
        for group in silent:  # before the step: metrics cover all tokens of the mini-batch, under the same policy
            batches.append(self._forward(experience, group, gradient=False, collision=credited))
            outputs.append(self._loss(batches[-1], totals, group, rows))
        norm = torch.nn.utils.clip_grad_norm_([t for t in self.optimizer.tensors if t.grad is not None], self.grad_clip)
        sums, values = merge(outputs)
        sums["computed"] = [float(sum(experience.length(row) for group in groups for row in group)), totals.tokens]
        values["grad_norm"] = float(norm)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            raise DivergenceError(f"loss = {values['loss']}, gradient norm = {values['grad_norm']}", rows)
        values["skipped"] = float(values["grad_norm"] == 0.0)
        if not values["skipped"]:  # without a signal Adam would move on by momentum
            self.optimizer.step()
        if experience.kinds is not None:
            sums |= _credit_sums(experience, [*groups, *silent], batches, outputs)
        tokens = _token_results([*groups, *silent], batches, outputs) if keep_tokens else {}
        return UpdateResult(sums, values, tokens)

    def _loss(self, batch: TokenBatch, totals: MiniBatchTotals, group: list[int], rows: list[int]) -> LossOutput:
        try:
            self.method.validate(batch)  # reads values: one wait for the device a micro-batch, and NaN is named
        except NonFiniteError as error:
            raise DivergenceError(f"{error} (rows of a micro-batch: {group})", rows) from None
        return self.method.loss(batch, totals)

    def _groups(self, experience: Experience, rows: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Micro-batches of the rows that are learned from, and of those that are only measured: rows whose advantage is 0, where
        they cannot change the gradient (they stay in N)."""
        inert = self.method.inert_without_advantage
        silent = [row for row in rows if inert and experience.advantage(row) == 0.0]
        return self._cut(experience, [row for row in rows if row not in set(silent)]), self._cut(experience, silent)

    def _cut(self, experience: Experience, rows: list[int]) -> list[list[int]]:
        lengths = [len(experience.rollouts.prompt_ids[row]) + experience.length(row) for row in rows]
        return [[rows[i] for i in part] for part in micro_batches(lengths, self.micro_batch_tokens)]

    def _micro_batches(
        self, experience: Experience, groups: list[list[int]], seed_labels: tuple, collision: bool
    ) -> Iterator[TokenBatch]:
        """The forward passes of the micro-batches, one at a time, with the tokens that the method selects.

        A choice is over the whole mini-batch, so it needs every micro-batch's log-probs first: one pass without gradient over
        each, or, of a single micro-batch, the pass that is there anyway."""
        if not self.method.needs_population:
            yield from (self._forward(experience, group, collision=collision) for group in groups)
            return
        single = len(groups) == 1
        seen = [self._forward(experience, group, gradient=single, collision=collision and single) for group in groups]
        chosen = self._select(seen, torch_generator(*seed_labels, "select"))
        for group, batch, selected_BT in zip(groups, seen, chosen, strict=True):
            full = batch if single else self._forward(experience, group, collision=collision)
            yield replace(full, selected_BT=selected_BT)

    def _select(self, batches: list[TokenBatch], generator: torch.Generator) -> list[Tensor]:
        """The method's choice over all tokens of the mini-batch, one mask a micro-batch."""
        logprobs_N, advantages_N = (
            torch.cat([getattr(batch, name)[batch.mask_BT] for batch in batches]) for name in ("logprobs_BT", "advantages_BT")
        )
        keys_N = torch.cat([identities(b.logprobs_BT, b.advantages_BT, b.mask_BT)[b.mask_BT] for b in batches])
        everything_1N = torch.ones(1, logprobs_N.numel(), dtype=torch.bool, device=logprobs_N.device)
        chosen_N = self.method.select(
            logprobs_N[None], advantages_N[None], everything_1N, generator, identities_BT=keys_N[None]
        )[0]
        parts = chosen_N.split([int(batch.mask_BT.sum()) for batch in batches])
        return [
            torch.zeros_like(batch.mask_BT).masked_scatter(batch.mask_BT, part)
            for batch, part in zip(batches, parts, strict=True)
        ]

    def _forward(self, experience: Experience, rows: list[int], gradient: bool = True, collision: bool = False) -> TokenBatch:
        prompts = [experience.rollouts.prompt_ids[row] for row in rows]
        responses = [experience.rollouts.response_ids[row] for row in rows]
        with torch.set_grad_enabled(gradient):
            states = response_states(self.policy.model, prompts, responses, pad_id=self.policy.pad_id)
            logprobs_BT, entropy_BT, *squares = state_logprobs(
                self.policy.model, states, temperature=self.temperature, collision=collision
            )
            ahead_BTK = self._ahead(states)
            exact_kl_BT = self._exact_kl(prompts, responses, states, gradient) if self.method.needs_exact_kl else None
        grid = {"dtype": logprobs_BT.dtype, "device": logprobs_BT.device}
        mask_BT = states.mask_BT
        advantages_B = torch.tensor([experience.advantage(row) for row in rows], **grid)
        optional = {
            "ref_logprobs_BT": experience.reference,
            "weights_BT": experience.weights,
        }
        return TokenBatch(
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=pad_grid([experience.old_logprobs[row] for row in rows], **grid),
            mask_BT=mask_BT,
            advantages_BT=advantages_B[:, None] * mask_BT,
            entropy_BT=entropy_BT if self.method.needs_entropy_grad else entropy_BT.detach(),
            old_entropy_BT=pad_grid([experience.old_entropies[row] for row in rows], **grid),
            collision_BT=squares[0] if squares else None,
            exact_kl_BT=exact_kl_BT,
            mtp_logprobs_BTK=ahead_BTK,
            old_mtp_logprobs_BTK=self._old_ahead(experience, rows, ahead_BTK),
            **{
                name: pad_grid([values[row] for row in rows], **grid) for name, values in optional.items() if values is not None
            },
        )

    def _ahead(self, states: ResponseStates) -> Tensor | None:
        """Log-probs of the multi-token modules, [B, T, K - 1]; None for methods that do not use them."""
        if not self.method.needs_mtp:
            return None
        return ahead_logprobs(self.policy.model, states, self.method.mtp_modules, temperature=self.temperature)

    def _old_ahead(self, experience: Experience, rows: list[int], like_BTK: Tensor | None) -> Tensor | None:
        if like_BTK is None or experience.old_ahead is None:
            return None
        grid_BTK = torch.zeros_like(like_BTK)
        for b, row in enumerate(rows):
            values = torch.from_numpy(experience.old_ahead[row])
            grid_BTK[b, : len(values)] = values.to(grid_BTK)
        return grid_BTK

    @torch.no_grad()
    def remember(self, experience: Experience, parts: list[list[int]]) -> None:
        """Before the first update of a rollout: what the policy says of its own responses, where sampling could not tell.

        That is the multi-token modules' log-probs, and in half precision log-probs and entropies: hidden states of another batch
        or with a cache are rounded otherwise, by more than some clip ranges. ``parts`` are the rows of the coming updates of one
        epoch; they pass in the very micro-batches of those updates, so the ratio is exactly 1 before the first step."""
        half = next(self.policy.model.parameters()).dtype in HALF
        if not (half or self.method.needs_mtp):
            return
        kept: dict[int, TokenBatch] = {}
        count = range(len(experience.rollouts))
        experience.old_ahead = None
        for group in (group for rows in parts for cut in self._groups(experience, rows) for group in cut):
            batch = self._forward(experience, group, gradient=False)
            kept |= {row: batch.rows(slice(b, b + 1)) for b, row in enumerate(group)}

        def values(name: str) -> list[np.ndarray]:
            return [getattr(kept[row], name)[0, : experience.length(row)].float().cpu().numpy() for row in count]

        if half:
            experience.old_logprobs, experience.old_entropies = values("logprobs_BT"), values("entropy_BT")
        if self.method.needs_mtp:
            experience.old_ahead = values("mtp_logprobs_BTK")

    def _exact_kl(
        self, prompts: list[list[int]], responses: list[list[int]], states: ResponseStates, gradient: bool = True
    ) -> Tensor:
        """KL over the whole vocabulary in the method's direction, with the policy's gradient; ``states`` are the policy's.

        Where it is charged on positive advantages alone, rows that are only measured do not pay it and hold 0."""
        kl = self.method.settings.kl
        if not gradient and kl.mask in ("tepo", "positive"):
            return states.grid(torch.zeros_like(states.targets_N, dtype=torch.float32))
        other = self.old_model if kl.reference == "old" else self.reference_model
        mine_NV = self._distribution(self.policy.model, states)
        with torch.no_grad():
            other_NV = self._distribution(other, response_states(other, prompts, responses, pad_id=self.policy.pad_id))
        first, second = (mine_NV, other_NV) if kl.direction == "policy_reference" else (other_NV, mine_NV)
        return states.grid(exact_kl(first, second))

    def _distribution(self, model: Any, states: ResponseStates) -> Tensor:
        return torch.log_softmax(response_logits(model, states) / self.temperature, dim=-1)


def _or_zeros(values_BT: Tensor | None, output: LossOutput) -> Tensor:
    """A gradient by token; 0 on rows that were only measured."""
    return torch.zeros_like(output.token.ratio_BT) if values_BT is None else values_BT


def _kind_grid(experience: Experience, rows: list[int], mask_BT: Tensor) -> Tensor:
    kinds_BT = pad_grid([experience.kinds[row] for row in rows], dtype=torch.long, device=mask_BT.device)
    return torch.where(mask_BT, kinds_BT, -1)


def _credit_sums(
    experience: Experience, groups: list[list[int]], batches: list[TokenBatch], outputs: list[LossOutput]
) -> dict[str, list[float]]:
    """Where gradient, clipping, mask and entropy change fall, by kind of token (the tasks that know the truth).

    The gradient is that of the logits of each state, summed over the responses that pass through it
    (:mod:`tepo_core.training.logit_credit`)."""
    names = ("gradient", "clip", "mask", "entropy_change", "tokens")
    columns = []
    for rows, batch, output, credit_BT in zip(
        groups, batches, outputs, _state_grids(experience, groups, batches, outputs), strict=True
    ):
        kinds_BT = _kind_grid(experience, rows, batch.mask_BT)
        token = output.token
        change_BT = (batch.entropy_BT.detach() - batch.old_entropy_BT) * batch.mask_BT
        fields_FBT = torch.stack(
            [
                credit_BT * batch.mask_BT,
                token.clipped_BT,
                token.mask_BT,
                change_BT,
                batch.mask_BT,
            ]
        )
        columns.append(torch.stack([(fields_FBT * (kinds_BT == k)).sum((1, 2)) for k in range(len(TOKEN_KINDS))], dim=1))
    table = torch.stack(columns).double().sum(0).tolist()  # fields x kinds
    by_name = dict(zip(names, table, strict=True))
    everything = sum(by_name["tokens"])
    sums: dict[str, list[float]] = {}
    for k, kind in enumerate(TOKEN_KINDS):
        tokens = by_name["tokens"][k]
        sums[f"gradient@{kind}"] = [by_name["gradient"][k], sum(by_name["gradient"])]
        sums[f"tokens@{kind}"] = [tokens, everything]
        for name in ("clip", "mask", "entropy_change"):
            sums[f"{name}@{kind}"] = [by_name[name][k], tokens]
    return sums


def _state_grids(
    experience: Experience, groups: list[list[int]], batches: list[TokenBatch], outputs: list[LossOutput]
) -> list[Tensor]:
    """The credit of every state shared by its tokens, [B, T] a micro-batch. Prefixes are shared over all micro-batches."""
    rows = [row for group in groups for row in group]
    columns: list[list[np.ndarray]] = [[], [], []]
    for group, batch, output in zip(groups, batches, outputs, strict=True):
        grids = (_or_zeros(output.token.signed_BT, output), batch.logprobs_BT.detach(), batch.collision_BT)
        for column, grid in zip(columns, [grid.cpu().numpy() for grid in grids], strict=True):
            column += [grid[i, : experience.length(row)] for i, row in enumerate(group)]
    rollouts = experience.rollouts
    shares = iter(state_credit([rollouts.prompt_ids[r] for r in rows], [rollouts.response_ids[r] for r in rows], *columns))
    return [
        pad_grid([next(shares) for _ in group], dtype=batch.logprobs_BT.dtype, device=batch.mask_BT.device)
        for group, batch in zip(groups, batches, strict=True)
    ]


def _token_results(
    groups: list[list[int]], batches: list[TokenBatch], outputs: list[LossOutput]
) -> dict[int, dict[str, np.ndarray]]:
    results: dict[int, dict[str, np.ndarray]] = {}
    for rows, batch, output in zip(groups, batches, outputs, strict=True):
        token = output.token
        columns = {
            "logprob": batch.logprobs_BT.detach(),
            "entropy": batch.entropy_BT.detach(),
            "ratio": token.ratio_BT,
            "mask": token.mask_BT,
            "clipped": token.clipped_BT,
            "gradient": _or_zeros(token.credit_BT, output),
        }
        arrays = {name: tensor.cpu().numpy() for name, tensor in columns.items()}
        lengths = batch.mask_BT.sum(-1).tolist()
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            results[row] = {name: array[i, :length] for name, array in arrays.items()}
    return results
