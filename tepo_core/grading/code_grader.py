"""Grades programs by running their tests in the sandbox.

A gold is a JSON object with ``prompt`` (what the model saw as code: imports, signature, docstring; may be empty),
``entry_point`` (name of the function) and ``tests`` (source that fails by raising). The response is a whole answer with a
fenced block, or the continuation of the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tepo_core.grading.code_sandbox import Limits, Result, run_program
from tepo_core.grading.extract import after_reasoning
from tepo_core.grading.fences import SKIPPED, fenced_blocks, is_unfenced, skip_string
from tepo_core.grading.types import Grade, GradingError, Outcome, check_batch
from tepo_core.machine import usable_cores

_FUTURE = re.compile(
    SKIPPED + r"|^(?P<future>from[ \t]+__future__[ \t]+import[ \t]*(?:\([^)]*\)|(?:[^\n;#\\]|\\\n)*))[ \t]*;?[ \t]*",
    re.MULTILINE,
)
# A limit other than time is no verdict of the tests: the sandbox stopped the program.
_OUTCOMES = {"passed": Outcome.CORRECT, "failed": Outcome.WRONG, "timeout": Outcome.TIMEOUT}


class CodeGrader:
    """Runs each program with its tests in a process of its own, ``workers`` at a time (0: one per available core).

    ``limits``, ``isolation`` and ``runner`` are those of :func:`tepo_core.grading.code_sandbox.run_program`.
    """

    def __init__(
        self, *, workers: int = 0, limits: Limits | None = None, isolation: str = "kernel", runner: Sequence[str] = ()
    ) -> None:
        if workers < 0:
            raise GradingError(f"workers = {workers}: must be 0 (one per core) or more")
        cores = usable_cores()
        self.workers, self.limits = workers or cores, limits or Limits()
        self.isolation, self.runner = isolation, tuple(runner)

    def grade(self, *, golds: Sequence[str], responses: Sequence[str], truncated: Sequence[bool]) -> list[Grade]:
        """One grade a response. Raises :class:`GradingError` on lists of different lengths or a gold that is not as above."""
        check_batch(golds, responses, truncated)
        specifications = {gold: read_gold(gold) for gold in dict.fromkeys(golds)}
        codes = [extract_code(text, specifications[gold]) for gold, text in zip(golds, responses, strict=True)]
        programs = {}  # equal programs run once
        for gold, code, cut in zip(golds, codes, truncated, strict=True):
            if code is not None and not cut:
                programs[(gold, code)] = assemble(specifications[gold], code)
        with ThreadPoolExecutor(self.workers) as pool:
            results = dict(zip(programs, pool.map(self.run, programs.values()), strict=True))
        grades = []
        for gold, code, cut in zip(golds, codes, truncated, strict=True):
            if cut:
                grades.append(Grade(Outcome.TRUNCATED, code))
            elif code is None:
                grades.append(Grade(Outcome.NO_ANSWER))
            else:
                result = results[(gold, code)]
                grades.append(Grade(_OUTCOMES.get(result.status, Outcome.ERROR), code, beyond_limits=result.beyond_limits))
        return grades

    def run(self, program: str) -> Result:
        """The result of one program, with its note and output; for a look at a grade that seems wrong."""
        return run_program(program, self.limits, isolation=self.isolation, runner=self.runner)

    def close(self) -> None:
        """Nothing to end: every process ends with its program."""


def read_gold(gold: str) -> dict[str, Any]:
    """The specification of a gold. Raises :class:`GradingError` naming the missing field."""
    try:
        specification = json.loads(gold)
    except json.JSONDecodeError as error:
        raise GradingError(f"gold {gold[:60]!r}: not JSON ({error}); use the problems of a code benchmark") from None
    for name in ("prompt", "entry_point", "tests"):
        if not isinstance(specification, dict) or not isinstance(specification.get(name), str):
            raise GradingError(f"gold {gold[:60]!r}: the field {name!r} is missing; needed: prompt, entry_point, tests")
    if not specification["tests"].strip():
        raise GradingError(f"gold {gold[:60]!r}: 'tests' is empty, so every program would pass")
    return specification


def make_gold(*, prompt: str, entry_point: str, tests: str) -> str:
    """The gold of a code problem."""
    return json.dumps({"prompt": prompt, "entry_point": entry_point, "tests": tests}, sort_keys=True)


def extract_code(response: str, specification: dict[str, Any]) -> str | None:
    """The code of a response; ``None`` when there is none.

    The last complete fenced block that defines the entry point, else the last complete fenced block; a last block that never ends
    and defines the entry point again, or that nothing complete stands before, is an unfinished answer. Without a fence: the
    response itself where it defines the entry point, else its lines as a continuation of the prompt, up to the first line
    that starts something new at the margin."""
    text = after_reasoning(response).replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    name = specification["entry_point"]
    blocks = [] if is_unfenced(text) else fenced_blocks(text)
    if blocks:
        finished = [block.code for block in blocks if block.closed and block.code.strip()]
        defining = [code for code in finished if defines(code, name)]
        if not blocks[-1].closed and (not defining or defines(blocks[-1].code, name)):
            return None
        return (defining or finished or [None])[-1]
    if "```" in text and not is_unfenced(text):
        return None  # a fence that opens no block: there is code, but not in a form that can be cut out
    if not text.strip():
        return None
    if defines(text, name) or not specification["prompt"]:
        return text
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if i and line[:1] not in ("", " ", "\t", "#", ")", "]", "}")), len(lines))
    return "\n".join(lines[:end])


def defines(code: str, name: str) -> bool:
    """Whether the code defines ``name`` at its margin."""
    pattern = rf"^(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*="
    return re.search(pattern, code, re.MULTILINE) is not None


def assemble(specification: dict[str, Any], code: str) -> str:
    """The program to run: what precedes the answer in the prompt, the answer, the tests; imports from ``__future__`` first."""
    prompt, name = specification["prompt"], specification["entry_point"]
    signature = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", prompt, re.MULTILINE)
    if signature and defines(code, name):
        before = prompt[: signature.start()]  # imports and helpers that the prompt gives
        return _future_first(f"{before}\n{code}\n\n{specification['tests']}\n")
    return _future_first(f"{prompt}{code}\n\n{specification['tests']}\n")


def _future_first(program: str) -> str:
    """The program with its imports from ``__future__`` at the beginning, where alone they are allowed; strings stay as they are."""
    if "__future__" not in program:
        return program
    moved, kept, position, copied = [], [], 0, 0
    endless: set[str] = set()
    while token := _FUTURE.search(program, position):
        position = token.end()
        if token["quote"] and (end := skip_string(program, token["quote"], position, endless)) >= 0:
            position = end
        elif token["future"]:
            moved.append(token["future"].rstrip() + "\n")
            kept.append(program[copied : token.start()])
            copied = position
    return "".join([*moved, *kept, program[copied:]])
