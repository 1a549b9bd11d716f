"""What every rollout engine takes and returns. Prompts and responses are token ids from here to the loss, never text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """``temperature`` > 0 scales the logits; ``top_p`` in (0, 1]; ``greedy`` takes the most likely token instead."""

    temperature: float
    top_p: float
    max_new_tokens: int
    greedy: bool = False


@dataclass
class Rollouts:
    """B responses, ordered by prompt, then by sample.

    ``response_ids`` holds EOS where the model produced it. ``logprobs`` are natural-log probabilities of the chosen tokens under the
    tempered distribution (before top-p), ``entropies`` the exact entropy in nats of that distribution over the whole
    vocabulary, or ``None`` for an engine that cannot give it (the trainer then computes it). ``finished`` is False for a response cut at
    ``max_new_tokens``."""

    prompt_ids: list[list[int]] = field(default_factory=list)
    response_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray | None] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    prompt_index: list[int] = field(default_factory=list)
    sample_index: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.response_ids)

    def extend(self, other: Rollouts, prompt_offset: int) -> None:
        """Append another batch whose prompts count on from ``prompt_offset``."""
        for name in ("prompt_ids", "response_ids", "logprobs", "entropies", "finished", "sample_index"):
            getattr(self, name).extend(getattr(other, name))
        self.prompt_index.extend(index + prompt_offset for index in other.prompt_index)

    def select(self, rows: list[int]) -> Rollouts:
        """The given rows, in that order."""
        return Rollouts(**{name: [getattr(self, name)[row] for row in rows] for name in self.__dataclass_fields__})


class Engine(Protocol):
    """A sampler. Results depend on (weights, prompts, params, seeds) only, never on how rows are batched."""

    def generate(self, prompts: list[list[int]], n: int, params: SamplingParams, seeds: list[int]) -> Rollouts: ...

    def update_weights(self, model: Any) -> None: ...

    def close(self) -> None: ...
