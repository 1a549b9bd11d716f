"""The table of problem sets: where each comes from, at which revision, how many problems, what kind of answer, which licence.

A set is loaded from ``data.benchmarks_dir`` (JSON Lines in the format below) where that is given, else through ``datasets``
from its source. Hub sets are pinned by commit, files on GitHub by the commit in their address; a commit fixes the content. A
folder has no commit, so there the digest of the content is checked. Counts are checked in both cases.

Format of a line: mathematics has ``id``, ``problem``, ``answer`` (a string), and may have ``solution``, ``subject``, ``level``,
``meta``; code has ``task_id``, ``prompt``, ``tests``, ``entry_point``, and may have ``canonical_solution``, ``split``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

import pandas as pd

from tepo_core.tasks.problem import DataError

MATH_PROMPT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMANEVAL_PROMPT = (
    "Complete the following Python function. Answer with the whole function, imports included, in one code block.\n\n"
    "```python\n{problem}```"
)
MBPP_PROMPT = (
    "{problem}\nWrite Python code that passes these tests, and answer with it in one code block.\n\n```python\n{tests}\n```"
)
RAW = "https://raw.githubusercontent.com"
QWEN = f"{RAW}/QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data"


@dataclass(frozen=True)
class Benchmark:
    """One problem set.

    ``source``: hub id, or the address of a JSON Lines file; ``revision``: commit of the hub data set (for a file it is in the
    address); ``config``, ``splits``: what ``datasets`` is asked for; ``fields``: our name -> theirs; ``convert``: name of a
    function of the loader for rows that need more than renaming; ``file``: name in ``benchmarks_dir``; ``count``: problems;
    ``file_count``: lines of that file where it holds another selection; ``digest``: first 16 digits of the SHA-256 of the
    file's content (problems reduced to letters and digits, answers as they are), see ``content_digest``.
    """

    name: str
    source: str
    revision: str | None
    splits: tuple[str, ...]
    fields: Mapping[str, str]
    file: str
    count: int | None
    digest: str
    answer: str  # integer | number | latex | tests
    licence: str
    prompt: str = MATH_PROMPT
    config: str | None = None
    convert: str = ""
    file_count: int | None = None
    use: str = "test"  # test | train
    note: str = ""
    keep: Mapping[str, str] = field(default_factory=dict)  # only rows whose field holds this text

    @property
    def kind(self) -> str:
        """Grader of the set: ``math`` or ``code``."""
        return "code" if self.answer == "tests" else "math"

    @property
    def has_solutions(self) -> bool:
        """Whether its source gives worked solutions, which a warm-up learns from. A file of one's own may have more."""
        return "solution" in self.fields or self.convert in ("after_hashes", "last_boxed")


_MATH = {"id": "id", "problem": "problem", "answer": "answer"}
_MAA = "problems: Mathematical Association of America"

_ENTRIES = [
    Benchmark(
        name="aime24",
        source="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        splits=("train",),
        fields=_MATH,
        file="aime24.jsonl",
        count=30,
        digest="a40f698a52dc5ea5",
        answer="integer",
        licence=_MAA,
        convert="integer",
    ),
    Benchmark(
        name="aime25",
        source="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        splits=("test",),
        fields=_MATH,
        file="aime25.jsonl",
        count=30,
        digest="f43d0506237041f9",
        answer="integer",
        licence=f"{_MAA}; collection Apache-2.0",
        convert="integer",
    ),
    Benchmark(
        name="amc23",
        source="AI-MO/aimo-validation-amc",
        revision="69d78a4a2c840e82d69af6bc742bda09005f6316",
        splits=("train",),
        fields={**_MATH, "url": "url"},
        file="amc23.jsonl",
        count=40,
        digest="a9346843b4ae0f01",
        answer="integer",
        licence=f"{_MAA}; collection Apache-2.0",
        convert="integer",
        keep={"url": "2023_AMC"},
        note="the 2023 part of amc83: do not add the two up",
    ),
    Benchmark(
        name="amc83",
        source="AI-MO/aimo-validation-amc",
        revision="69d78a4a2c840e82d69af6bc742bda09005f6316",
        splits=("train",),
        fields=_MATH,
        file="amc83.jsonl",
        count=83,
        digest="875e6e9d438d9bbf",
        answer="integer",
        licence=f"{_MAA}; collection Apache-2.0",
        convert="integer",
        note="AMC 12 of 2022 and 2023; contains amc23",
    ),
    Benchmark(
        name="math500",
        source="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        splits=("test",),
        fields={**_MATH, "id": "unique_id", "solution": "solution", "subject": "subject", "level": "level"},
        file="math500.jsonl",
        count=500,
        digest="561298df25f8d865",
        answer="latex",
        licence="MIT",
    ),
    Benchmark(
        name="olympiadbench",
        source=f"{QWEN}/olympiadbench/test.jsonl",
        revision=None,
        splits=("train",),
        fields={"id": "id", "problem": "question", "answer": "final_answer", "subject": "subfield"},
        file="olympiadbench.jsonl",
        count=675,
        digest="ae79530bb247c23c",
        answer="latex",
        licence="MIT",
        convert="only_element",
        note="the 675 problems of the Qwen suite; the original OE_TO_maths_en_COMP has 674",
    ),
    Benchmark(
        name="minerva",
        source=f"{QWEN}/minerva_math/test.jsonl",
        revision=None,
        splits=("train",),
        fields={"id": "idx", "problem": "problem", "answer": "solution", "subject": "type"},
        file="minerva.jsonl",
        count=272,
        digest="517ca13342361909",
        answer="latex",
        licence="texts of MIT OpenCourseWare, CC BY-NC-SA 4.0",
        convert="last_boxed",
    ),
    Benchmark(
        name="omni_math",
        source=f"{RAW}/KbsdJames/omni-math-rule/4793415ef37d31c9cdb4e5b82dbe172f76f8cf08/omni_math_rule.jsonl",
        revision=None,
        splits=("train",),
        fields={"problem": "problem", "answer": "answer", "level": "difficulty"},
        file="omni_math.jsonl",
        count=2821,
        digest="ab6d262eb5ceaea3",
        answer="latex",
        licence="Apache-2.0",
        convert="numbered",
        note="the rule-gradable subset of 4,428; 4 golds are cut short and cannot be graded",
    ),
    Benchmark(
        name="gsm8k",
        source="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        splits=("test",),
        fields={"problem": "question", "answer": "answer"},
        file="gsm8k_test.jsonl",
        count=1319,
        digest="a8394e38eadf7282",
        answer="number",
        licence="MIT",
        config="main",
        convert="after_hashes",
    ),
    Benchmark(
        name="humaneval",
        source="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        splits=("test",),
        fields={
            "task_id": "task_id",
            "prompt": "prompt",
            "tests": "test",
            "entry_point": "entry_point",
            "canonical_solution": "canonical_solution",
        },
        file="humaneval.jsonl",
        count=164,
        digest="dafe21391e431ed4",
        answer="tests",
        licence="MIT",
        prompt=HUMANEVAL_PROMPT,
        config="openai_humaneval",
    ),
    Benchmark(
        name="mbpp",
        source="google-research-datasets/mbpp",
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        splits=("prompt", "test", "validation", "train"),
        fields={
            "task_id": "task_id",
            "prompt": "text",
            "tests": "test_list",
            "canonical_solution": "code",
            "setup": "test_setup_code",
        },
        file="mbpp.jsonl",
        count=974,
        digest="4b178d0cb755ae25",
        answer="tests",
        licence="CC BY 4.0",
        prompt=MBPP_PROMPT,
        config="full",
        convert="mbpp",
        note="all four splits; the usual test split is ids 11 to 510 (meta.split)",
    ),
    Benchmark(
        name="gsm8k-train",
        source="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        splits=("train",),
        fields={"problem": "question", "answer": "answer"},
        file="gsm8k_train.jsonl",
        count=7473,
        digest="311fe553ba4209fd",
        answer="number",
        licence="MIT",
        config="main",
        convert="after_hashes",
        use="train",
    ),
    Benchmark(
        name="dapo-math-17k",
        source="BytedTsinghua-SIA/DAPO-Math-17k",
        revision="65877096c24ffa7abc4e4fa5edb95cf3413a5674",
        splits=("train",),
        fields={"problem": "prompt", "answer": "reward_model"},
        file="dapo_math_17k_sample.jsonl",
        count=None,
        digest="52c405ee78da1c83",
        answer="integer",
        licence="Apache-2.0",
        convert="dapo",
        file_count=16284,
        use="train",
        note="the hub data set repeats every problem about 100 times; repeats are dropped, so its count is not fixed here",
    ),
]
BENCHMARKS: dict[str, Benchmark] = {entry.name: entry for entry in _ENTRIES}


def lookup(name: str) -> Benchmark:
    """The entry of a set. Raises :class:`DataError` listing the names for an unknown one."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    near = get_close_matches(name, BENCHMARKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise DataError(f"problem set {name!r} is unknown{hint}; allowed: {', '.join(BENCHMARKS)}")


def table() -> pd.DataFrame:
    """The whole table, one row a set."""
    rows = [
        {
            "set": b.name,
            "use": b.use,
            "problems": b.count or b.file_count,
            "answer": b.answer,
            "source": b.source,
            "revision": b.revision or "in the address",
            "licence": b.licence,
            "note": b.note,
        }
        for b in BENCHMARKS.values()
    ]
    return pd.DataFrame(rows).set_index("set")
