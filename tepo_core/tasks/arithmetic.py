r"""Chained arithmetic with step-by-step solutions: the offline tasks.

``facts``       + and - over digits, every result mod 10. A share of the 180 one-step facts (digit, sign, operand) is planted
                *wrong* in the warm-up traces: the right digit shows with a small probability fixed per fact, so RL has to
                correct knowledge from the final answer alone. The decisive tokens are known: the digit after each ``=``
                whose fact is bad.
``facts_hard``  the same with more bad facts and rarer right digits: limited by exploration.
``noise``       reasoning-gym's ``chain_sum``; warm-up traces carry random slips. RL sharpens a noisy policy, it teaches nothing new.

A problem looks like ``6+3+2-8-3=`` and its solution like ``6+3=9+2=1-8=3-3=0\boxed{0}``. Splits are disjoint by construction: a
checksum of the prompt decides who may use it (see :func:`split_class`). This is planted knowledge: it shows how objectives assign credit
when the truth is known; it says nothing about how large models come by their mistakes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tepo_core.seeding import numpy_generator
from tepo_core.tasks.problem import Problem

SIGNS = "+-"
RL_TERMS = (3, 5)
LONG_TERMS = (6, 7)
WARMUP_TERMS = (2, 7)
NOISE_TERMS, NOISE_LONG_TERMS = (3, 6), (7, 8)
DIRECT_SHARE = 0.25
NOISE_SLIP, NOISE_TOTALS, NOISE_BARE = 0.12, 0.15, 0.15
TOKEN = re.compile(r"\\boxed\{|.", re.DOTALL)


@dataclass(frozen=True)
class Fact:
    """One step ``a sign b``: the true digit, and what the warm-up shows. ``p_right`` is the share of traces that show the truth."""

    key: str
    truth: int
    bad: bool
    p_right: float
    wrong: int


@dataclass(frozen=True)
class FactPlan:
    """The share of facts that is planted wrong, and the range of their log-uniform ``p_right``."""

    bad_share: float
    p_low: float
    p_high: float


PLANS = {"facts": FactPlan(0.30, 0.005, 0.3), "facts_hard": FactPlan(0.35, 0.002, 0.2)}


def fact_key(a: int, sign: str, b: int) -> str:
    return f"{a}{sign}{b}"


def apply(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b


def plant_facts(task: str, seed: int) -> dict[str, Fact]:
    """The 180 facts of a study seed, keyed like ``6+3``.

    A seed draws which facts are bad and which of them is how bad; how many there are and the set of their ``p_right`` (the
    mid-quantiles of a log-uniform distribution) are the same for all seeds, so that bases differ in kind, not in difficulty."""
    plan = PLANS[task]
    rng = numpy_generator(seed, task, "facts")
    keys = [(a, sign, b) for a in range(10) for sign in SIGNS for b in range(1, 10)]
    count = round(plan.bad_share * len(keys))
    quantiles = (np.arange(count) + 0.5) / count
    levels = np.exp(np.log(plan.p_low) + quantiles * np.log(plan.p_high / plan.p_low))
    chosen = rng.permutation(len(keys))[:count]
    p_right = dict(zip(chosen.tolist(), levels.tolist(), strict=True))
    facts = {}
    for index, (a, sign, b) in enumerate(keys):
        truth = apply(a, sign, b) % 10
        wrong = int((truth + rng.integers(1, 10)) % 10)
        key = fact_key(a, sign, b)
        facts[key] = Fact(key, truth, index in p_right, p_right.get(index, 1.0), wrong)
    return facts


def split_class(prompt: str) -> str:
    """``train``, ``test`` or ``validation``: one prompt belongs to one class for ever, in every split and for every seed."""
    rest = zlib.crc32(prompt.encode()) % 16
    return {0: "test", 8: "validation"}.get(rest, "train")


def random_chain(rng: np.random.Generator, terms: tuple[int, int]) -> tuple[list[int], list[str]]:
    """Operands and signs of a chain whose number of terms is uniform in ``terms`` (both ends included)."""
    count = int(rng.integers(terms[0], terms[1] + 1))
    digits = [int(rng.integers(0, 10)), *(int(d) for d in rng.integers(1, 10, size=count - 1))]
    return digits, [SIGNS[int(s)] for s in rng.integers(0, 2, size=count - 1)]


def prompt_of(digits: list[int], signs: list[str]) -> str:
    return str(digits[0]) + "".join(f"{s}{d}" for s, d in zip(signs, digits[1:], strict=True)) + "="


def trace(digits: list[int], signs: list[str], results: list[int]) -> str:
    r"""Chained steps and the boxed last result: ``6+3=9+2=1\boxed{1}``."""
    steps = "".join(f"{s}{d}={r}" for s, d, r in zip(signs, digits[1:], results, strict=True))
    return f"{digits[0]}{steps}\\boxed{{{results[-1]}}}"


def true_results(task: str, digits: list[int], signs: list[str]) -> list[int]:
    """Running results of a chain, mod 10 for the facts tasks."""
    results, current = [], digits[0]
    for sign, digit in zip(signs, digits[1:], strict=True):
        current = apply(current, sign, digit)
        if task in PLANS:
            current %= 10
        results.append(current)
    return results


def make_problem(
    task: str, seed: int, split: str, index: int, digits: list[int], signs: list[str], facts: dict[str, Fact]
) -> Problem:
    results = true_results(task, digits, signs)
    before = [digits[0], *results[:-1]]
    steps = [
        {"step": f"{a}{s}{d}={r}", "bad": facts[fact_key(a, s, d)].bad if facts else False}
        for a, s, d, r in zip(before, signs, digits[1:], results, strict=True)
    ]
    meta = {"terms": len(digits), "steps": steps, "solution": trace(digits, signs, results)}
    return Problem(f"{task}-s{seed}-{split}-{index:05d}", prompt_of(digits, signs), str(results[-1]), split, meta)


def chains(task: str, seed: int, split: str, terms: tuple[int, int], allowed: str) -> Iterator[tuple[list[int], list[str]]]:
    """Endless stream of distinct chains whose prompt belongs to the class ``allowed``."""
    seen: set[str] = set()
    for digits, signs in _source(task, seed, split, terms):
        prompt = prompt_of(digits, signs)
        if prompt not in seen and split_class(prompt) == allowed:
            seen.add(prompt)
            yield digits, signs


def _source(task: str, seed: int, split: str, terms: tuple[int, int]) -> Iterator[tuple[list[int], list[str]]]:
    rng = numpy_generator(seed, task, split, "chains")
    if task in PLANS:
        while True:
            yield random_chain(rng, terms)
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    while True:
        config = ChainSumConfig(
            min_terms=terms[0], max_terms=terms[1], min_digits=1, max_digits=1, seed=int(rng.integers(2**31)), size=4096
        )
        for item in ChainSumDataset(config):
            parts = item["metadata"]["expression"].split()
            yield [int(p) for p in parts[::2]], parts[1::2]


def split_terms(task: str) -> dict[str, tuple[tuple[int, int], str]]:
    """Split name -> (range of terms, class of prompts)."""
    terms, long_terms = (RL_TERMS, LONG_TERMS) if task in PLANS else (NOISE_TERMS, NOISE_LONG_TERMS)
    return {
        "train": (terms, "train"),
        "validation": (terms, "validation"),
        "test": (terms, "test"),
        "long": (long_terms, "test"),
    }


def generate_split(task: str, seed: int, split: str, size: int, facts: dict[str, Fact]) -> list[Problem]:
    """``size`` distinct problems of a split."""
    terms, allowed = split_terms(task)[split]
    stream = chains(task, seed, split, terms, allowed)
    return [make_problem(task, seed, split, i, *next(stream), facts) for i in range(size)]


def warmup_traces(task: str, seed: int, size: int, facts: dict[str, Fact]) -> Iterator[tuple[str, str]]:
    """``size`` pairs (prompt, response) for supervised learning; prompts never belong to a held-out class."""
    rng = numpy_generator(seed, task, "warmup", "slips")
    terms = WARMUP_TERMS if task in PLANS else NOISE_TERMS
    made = 0
    for digits, signs in _source(task, seed, "warmup", terms):
        prompt = prompt_of(digits, signs)
        if split_class(prompt) != "train":
            continue
        yield prompt, _facts_response(digits, signs, facts, rng) if facts else _noisy_response(digits, signs, rng)
        made += 1
        if made == size:
            return


def _facts_response(digits: list[int], signs: list[str], facts: dict[str, Fact], rng: np.random.Generator) -> str:
    """A self-consistent trace: a wrong digit is carried on. A quarter are answers at once, without steps."""
    results, current = [], digits[0]
    for sign, digit in zip(signs, digits[1:], strict=True):
        fact = facts[fact_key(current, sign, digit)]
        current = fact.truth
        if fact.bad and rng.random() >= fact.p_right:
            other = int((fact.truth + rng.integers(1, 10)) % 10)
            current = fact.wrong if rng.random() < 0.75 else other
        results.append(current)
    return f"\\boxed{{{results[-1]}}}" if rng.random() < DIRECT_SHARE else trace(digits, signs, results)


def _noisy_response(digits: list[int], signs: list[str], rng: np.random.Generator) -> str:
    """Steps with random slips that carry on, or running totals only, or the bare answer."""
    results, current = [], digits[0]
    for sign, digit in zip(signs, digits[1:], strict=True):
        current = apply(current, sign, digit)
        if rng.random() < NOISE_SLIP:
            current += int(rng.choice([-2, -1, 1, 2]))
        results.append(current)
    form = rng.random()
    if form < NOISE_BARE:
        return f"\\boxed{{{results[-1]}}}"
    if form < NOISE_BARE + NOISE_TOTALS:
        return "".join(f"={r}" for r in results) + f"\\boxed{{{results[-1]}}}"
    return trace(digits, signs, results)


def token_kinds(tokens: list[str], facts: dict[str, Fact]) -> list[tuple[str, str | None]]:
    """Kind of every token of a response, and the fact it answers (``None`` where it answers none).

    ``decisive``  a result digit whose fact is bad (in ``noise``, where slips are planted everywhere: every result digit)
    ``digit``     any other computed digit, the boxed digit of an answer without steps included
    ``copied``    operands, signs, and a boxed digit that repeats the last result
    ``format``    ``=``, the box, the end of the response, and whatever is no arithmetic

    The response's own running value decides which fact a digit answers, so a wrong digit leads to the facts that follow *from it*."""
    kinds: list[tuple[str, str | None]] = []
    left, step = "", ""
    in_result = boxed = computed = False
    for token in tokens:
        leading_minus = token == "-" and not facts and left == "" and (in_result or boxed)
        if token == "=":
            step, left, in_result = left, "", True
            kinds.append(("format", None))
        elif token in SIGNS and not leading_minus:
            left, in_result = left + token, False
            kinds.append(("copied", None))
        elif token.isdigit() or leading_minus:
            left += token
            if in_result:
                computed = True
                fact = facts.get(step)
                bad = fact.bad if fact else not facts
                kinds.append(("decisive" if bad else "digit", fact.key if fact else None))
            else:
                kinds.append(("digit" if boxed and not computed else "copied", None))
        else:
            boxed, in_result, left = token == "\\boxed{", False, ""
            kinds.append(("format", None))
    return kinds
