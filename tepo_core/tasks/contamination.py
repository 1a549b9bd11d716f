"""Overlap between a training set and evaluation sets, and its removal before training.

Two checks. *Exact*: equal after lower-casing and removing everything but letters and digits. *13-gram*: 13 consecutive words in
common, as for GPT-3 (Brown et al., arXiv 2005.14165, appendix C); like there, 13-grams that occur in more than ten training
problems are taken for turns of phrase and ignored. Words are runs of letters or digits; a Chinese character is a word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tepo_core.tasks.math_benchmarks import letters_and_digits
from tepo_core.tasks.problem import Problem

GRAM = 13
COMMON = 10  # a 13-gram in more training problems than this is a turn of phrase
_WORD = re.compile(r"[^\W_\u3400-\u9fff]+|[\u3400-\u9fff]")


@dataclass(frozen=True)
class Overlap:
    """One evaluation problem found in the training set. ``how``: ``exact`` or ``13-gram``."""

    evaluation_set: str
    evaluation_id: str
    training_id: str
    how: str


@dataclass(frozen=True)
class Contamination:
    """Result of the check: every overlap found, and the ids to remove from training."""

    overlaps: tuple[Overlap, ...]
    sizes: Mapping[str, int]
    training_size: int

    @property
    def training_ids(self) -> set[str]:
        """Training problems that share something with an evaluation set."""
        return {overlap.training_id for overlap in self.overlaps}

    def counts(self) -> dict[str, dict[str, int]]:
        """Per evaluation set: its size, its problems found exactly, found by either check, and training problems concerned."""
        result = {}
        for name, size in self.sizes.items():
            mine = [overlap for overlap in self.overlaps if overlap.evaluation_set == name]
            result[name] = {
                "problems": size,
                "exact": len({o.evaluation_id for o in mine if o.how == "exact"}),
                "exact_or_13gram": len({o.evaluation_id for o in mine}),
                "training_problems": len({o.training_id for o in mine}),
            }
        return result

    def table(self) -> pd.DataFrame:
        """:meth:`counts` as a table, with a last row for the training set as a whole."""
        frame = pd.DataFrame.from_dict(self.counts(), orient="index")
        frame.index.name = "evaluation set"
        return frame

    def to_json(self) -> dict[str, Any]:
        """For the manifest of the prepared data."""
        return {"counts": self.counts(), "training_problems": self.training_size, "removed": len(self.training_ids)}


def text_of(problem: Problem) -> str:
    """The text of a problem without the prompt template."""
    return str(problem.meta.get("problem", problem.prompt))


def find_overlap(training: Sequence[Problem], evaluation: Mapping[str, Sequence[Problem]]) -> Contamination:
    """Every evaluation problem that occurs in the training set. Linear in the words of both."""
    keys = {name: [letters_and_digits(text_of(p)) for p in problems] for name, problems in evaluation.items()}
    grams = {name: [_grams(text_of(p)) for p in problems] for name, problems in evaluation.items()}
    wanted = {gram for sets in grams.values() for one in sets for gram in one}
    exact: dict[str, list[str]] = defaultdict(list)
    holders: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for problem in training:
        exact[letters_and_digits(text_of(problem))].append(problem.id)
        for gram in _grams(text_of(problem)) & wanted:
            holders[gram].append(problem.id)
    overlaps = []
    for name, problems in evaluation.items():
        for problem, key, own in zip(problems, keys[name], grams[name], strict=True):
            same = exact.get(key, [])
            overlaps += [Overlap(name, problem.id, training_id, "exact") for training_id in same]
            rare = (holders[gram] for gram in own if 0 < len(holders.get(gram, ())) <= COMMON)
            near = {training_id for ids in rare for training_id in ids} - set(same)
            overlaps += [Overlap(name, problem.id, training_id, "13-gram") for training_id in sorted(near)]
    return Contamination(tuple(overlaps), {name: len(problems) for name, problems in evaluation.items()}, len(training))


def remove_overlap(
    training: Sequence[Problem], evaluation: Mapping[str, Sequence[Problem]]
) -> tuple[list[Problem], Contamination]:
    """The training problems without any overlap, in their order, and what was found.

    Idempotent: removal makes 13-grams rarer, so one that was a turn of phrase may count afterwards; the check is repeated until
    it finds nothing."""
    kept, first, found = list(training), None, []
    while True:
        result = find_overlap(kept, evaluation)
        first = first or result
        found += result.overlaps
        if not result.overlaps:
            return kept, Contamination(tuple(found), first.sizes, first.training_size)
        kept = [problem for problem in kept if problem.id not in result.training_ids]


def _grams(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(text.casefold())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}
