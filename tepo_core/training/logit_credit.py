"""Where the gradient falls, in the space of the logits, with what cancels cancelled.

|dJ/dlog pi| is |A| / N for every token of a response and says nothing. The derivative in the logits z of a state is
sum over the tokens a drawn there of g_a (e_a - p), g_a = sum of dJ/dlog pi over the responses that drew a:
responses of one prompt share the states of their common prefix, and there right and wrong ones cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def states(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """A number for the state before each response token, [T_i] a response: equal exactly where prompt and prefix are equal."""
    roots: dict[tuple[int, ...], int] = {}
    steps: dict[tuple[int, int], int] = {}
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        state = roots.setdefault(tuple(prompt), -1 - len(roots))
        row = np.empty(len(response), dtype=np.int64)
        for t, token in enumerate(response):
            row[t] = state
            state = steps.setdefault((state, token), len(steps))
        found.append(row)
    return found


def state_credit(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    signed: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    collision: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """|dJ/dz| of the state before each token, shared equally by the tokens drawn there, [T_i] a response.

    signed: dJ/dlog pi(token); collision: sum_v p_v^2 of the state. With G = sum_a g_a,
    |sum_a g_a (e_a - p)|^2 = sum_a g_a^2 - 2 G sum_a g_a p_a + G^2 sum_v p_v^2. For a token alone: |g| sqrt(1 - 2 p + sum p^2).
    Rows that a mini-batch left out (A = 0) have no gradient and need not be given."""
    if not len(responses):
        return []
    lengths = [len(response) for response in responses]
    state_N = np.unique(np.concatenate(states(prompts, responses)), return_inverse=True)[1]
    token_N = np.concatenate([np.asarray(response, dtype=np.int64) for response in responses])
    signed_N, logprob_N, collision_N = (
        np.concatenate([np.asarray(x, dtype=np.float64) for x in part]) for part in (signed, logprobs, collision)
    )
    pair_N = np.unique(np.stack([state_N, token_N]), axis=1, return_inverse=True)[1].reshape(-1)
    count, pairs = state_N.max() + 1, pair_N.max() + 1
    pull_P = np.bincount(pair_N, signed_N, pairs)  # g_a of every state and token drawn there
    of_P, probability_P = np.zeros(pairs, dtype=np.int64), np.zeros(pairs)
    of_P[pair_N], probability_P[pair_N] = state_N, np.exp(logprob_N)
    collision_S = np.zeros(count)
    collision_S[state_N] = collision_N
    total_S = np.bincount(state_N, signed_N, count)
    square_S = np.bincount(of_P, pull_P**2, count) - 2 * total_S * np.bincount(of_P, pull_P * probability_P, count)
    norm_S = np.sqrt(np.maximum(square_S + total_S**2 * collision_S, 0.0))
    shared_N = norm_S[state_N] / np.bincount(state_N, minlength=count)[state_N]
    return np.split(shared_N, np.cumsum(lengths)[:-1])
