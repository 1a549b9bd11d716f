"""Sampling with the model's own forward pass and cache: no second copy of any model, no server.

Responses of a prompt that are the same so far are one row of the cache, and part where they differ.

Every response has its own stream of uniform numbers, derived from (seed of the prompt, sample): a token is drawn by inverting the
cumulative distribution at one uniform. So the batch, its order and the rows dropped on the way change nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tepo_core.model.logprobs import causal_model, exact_entropy, sampling_head
from tepo_core.rollout.decoding import decoding_attention, is_plain, roomy
from tepo_core.rollout.types import Rollouts, SamplingParams
from tepo_core.seeding import numpy_generator


class TransformersEngine:
    """Samples from a causal LM that lives in this process; weight updates are seen at once."""

    def __init__(self, model: Any, *, pad_id: int, eos_ids: list[int], batch_size: int = 1024) -> None:
        self.model, self.pad_id, self.eos_ids, self.batch_size = model, pad_id, eos_ids, batch_size
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None

    def update_weights(self, model: Any) -> None:
        self.model = model

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], n: int, params: SamplingParams, seeds: list[int]) -> Rollouts:
        """n responses for each prompt. ``seeds`` has one entry a prompt. At most ``batch_size`` rows are alive at once."""
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one seed a prompt")
        was_training = self.model.training
        self.model.eval()
        self._head = sampling_head(self.model)
        result = Rollouts()
        step = max(1, self.batch_size // n)
        try:
            with decoding_attention(causal_model(self.model)):
                for start in range(0, len(prompts), step):
                    chunk = prompts[start : start + step]
                    result.extend(self._generate_chunk(chunk, n, params, seeds[start : start + step]), start)
        finally:
            self._head = None
            self.model.train(was_training)
        return result

    def _logits(self, **inputs: Any) -> torch.Tensor:
        """Logits of the next token in float32, [rows, V]. The head of a half-precision model is that of the trainer."""
        if self._head is None:
            return self.model(**inputs, logits_to_keep=1).logits[:, -1].float()
        return self._head(causal_model(self.model).base_model(**inputs).last_hidden_state[:, -1])

    def _generate_chunk(self, prompts: list[list[int]], n: int, params: SamplingParams, seeds: list[int]) -> Rollouts:
        device = next(self.model.parameters()).device
        rows, steps = len(prompts) * n, params.max_new_tokens
        uniforms_BT = _uniforms(seeds, n, steps).to(device) if not params.greedy else None
        logits_CV, cache, mask_CS = self._prefill(prompts, device)
        position_C, seen = mask_CS.sum(-1), mask_CS.shape[-1]
        # A mask that is given ready-made is not built at every step, and without padding none is needed.
        plain, padded = is_plain(causal_model(self.model), cache), bool((mask_CS == 0).any())
        mask_CS = torch.cat([mask_CS, mask_CS.new_ones(len(prompts), steps)], dim=-1)
        if plain:
            mask_CS = mask_CS.bool()[:, None, None]
        tokens_BT = torch.full((rows, steps), self.pad_id, dtype=torch.long, device=device)
        logprobs_BT = torch.zeros(rows, steps, device=device)
        entropies_BT = torch.zeros(rows, steps, device=device)
        lengths_B = torch.full((rows,), steps, device=device)
        finished_B = torch.zeros(rows, dtype=torch.bool, device=device)
        eos_E = torch.tensor(self.eos_ids, device=device)
        alive = torch.arange(rows, device=device)  # responses that go on
        row_A = alive // n  # of the cache: responses that are the same so far share one
        for t in range(steps):
            uniform_A = uniforms_BT[alive, t] if uniforms_BT is not None else None
            token_A, logprobs_BT[alive, t], entropies_BT[alive, t] = choose(logits_CV[row_A], params, uniform_A)
            tokens_BT[alive, t] = token_A
            ends_A = torch.isin(token_A, eos_E)
            lengths_B[alive[ends_A]], finished_B[alive[ends_A]] = t + 1, True
            alive, row_A, token_A = alive[~ends_A], row_A[~ends_A], token_A[~ends_A]
            if len(alive) == 0 or t + 1 == steps:
                break
            parents, token_C, row_A = _next_rows(row_A, token_A, *logits_CV.shape)
            if parents is not None:
                cache.batch_select_indices(parents)
                mask_CS, position_C = mask_CS[parents], position_C[parents]
            seen += 1
            logits_CV = self._logits(
                input_ids=token_C[:, None],
                attention_mask=mask_CS[..., :seen] if padded or not plain else None,
                position_ids=position_C[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            position_C = position_C + 1
        lengths = lengths_B.tolist()
        tokens, logprobs, entropies = tokens_BT.tolist(), logprobs_BT.cpu().numpy(), entropies_BT.cpu().numpy()
        return Rollouts(
            prompt_ids=[prompt for prompt in prompts for _ in range(n)],
            response_ids=[row[:length] for row, length in zip(tokens, lengths, strict=True)],
            logprobs=[row[:length].copy() for row, length in zip(logprobs, lengths, strict=True)],
            entropies=[row[:length].copy() for row, length in zip(entropies, lengths, strict=True)],
            finished=finished_B.tolist(),
            prompt_index=[p for p in range(len(prompts)) for _ in range(n)],
            sample_index=list(range(n)) * len(prompts),
        )

    def _prefill(self, prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """One forward over the prompts, left-padded: logits of the next token, cache, mask. A row of the cache a prompt."""
        width = max(len(prompt) for prompt in prompts)
        ids_PS = torch.full((len(prompts), width), self.pad_id, dtype=torch.long)
        mask_PS = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids_PS[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_PS[row, width - len(prompt) :] = 1
        ids_PS, mask_PS = ids_PS.to(device), mask_PS.to(device)
        cache = DynamicCache(config=self.model.config)
        logits_PV = self._logits(
            input_ids=ids_PS,
            attention_mask=mask_PS,
            position_ids=(mask_PS.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        )
        return logits_PV, roomy(cache), mask_PS


def _next_rows(
    row_A: torch.Tensor, token_A: torch.Tensor, rows: int, vocabulary: int
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Rows of the cache for the next token, one for each different (row so far, token).

    Returns (parents, token_C, row_A): the old row of each new one, or None when the cache serves as it is; the token that
    each row takes in; the row of each response. Selecting copies the cache, so rows that nobody needs any more stay until
    a quarter of them is such."""
    pair_U, place_A = (row_A * vocabulary + token_A).unique(return_inverse=True)
    parent_U, token_U = pair_U // vocabulary, pair_U % vocabulary
    branches = bool((parent_U[1:] == parent_U[:-1]).any())  # pairs are sorted
    if branches or len(parent_U) < 0.75 * rows:
        return parent_U, token_U, place_A
    token_C = token_U.new_zeros(rows).index_copy(0, parent_U, token_U)
    return None, token_C, row_A


def _uniforms(seeds: list[int], n: int, steps: int) -> torch.Tensor:
    """One row of uniform numbers a response, from (seed of its prompt, index of the sample)."""
    rows = [numpy_generator(seed, sample).random(steps) for seed in seeds for sample in range(n)]
    return torch.from_numpy(np.stack(rows))


def choose(
    logits_BV: torch.Tensor, params: SamplingParams, uniform_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a token a row. Returns ids, their log-probs, and exact entropies (nats) of the tempered distribution.

    Log-probs and entropies belong to the distribution before top-p, which is the one the trainer differentiates."""
    logprobs_BV = torch.log_softmax(logits_BV / params.temperature, dim=-1)
    probs_BV = logprobs_BV.exp()
    entropy_B = exact_entropy(logprobs_BV)
    if params.greedy:
        token_B = logits_BV.argmax(-1)
    else:
        weights_BV = (probs_BV if params.top_p == 1 else _nucleus(probs_BV, params.top_p)).double()
        cumulative_BV = weights_BV.cumsum(-1)
        threshold_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
        token_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1).clamp(max=logits_BV.shape[-1] - 1)
    return token_B, logprobs_BV.gather(-1, token_B[:, None]).squeeze(-1), entropy_B


def _nucleus(probs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the most likely tokens whose mass before them is below top_p; the rest get weight 0."""
    ordered_BV, index_BV = probs_BV.sort(dim=-1, descending=True)
    kept_BV = ordered_BV.cumsum(-1) - ordered_BV < top_p
    return torch.zeros_like(probs_BV).scatter(-1, index_BV, ordered_BV * kept_BV)
