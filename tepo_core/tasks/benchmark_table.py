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
        "aime24", "HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", ("train",), _MATH, "aime24.jsonl", 30,
        "a40f698a52dc5ea5", "integer", _MAA, convert="integer",
    ),
    Benchmark(
        "aime25", "math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", ("test",), _MATH, "aime25.jsonl", 30,
        "f43d0506237041f9", "integer", f"{_MAA}; collection Apache-2.0", convert="integer",
    ),
    Benchmark(
        "amc23", "AI-MO/aimo-validation-amc", "69d78a4a2c840e82d69af6bc742bda09005f6316", ("train",),
        {**_MATH, "url": "url"}, "amc23.jsonl", 40, "a9346843b4ae0f01", "integer", f"{_MAA}; collection Apache-2.0",
        convert="integer", keep={"url": "2023_AMC"}, note="the 2023 part of amc83: do not add the two up",
    ),
    Benchmark(
        "amc83", "AI-MO/aimo-validation-amc", "69d78a4a2c840e82d69af6bc742bda09005f6316", ("train",), _MATH, "amc83.jsonl",
        83, "875e6e9d438d9bbf", "integer", f"{_MAA}; collection Apache-2.0", convert="integer",
        note="AMC 12 of 2022 and 2023; contains amc23",
    ),
    Benchmark(
        "math500", "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", ("test",),
        {**_MATH, "id": "unique_id", "solution": "solution", "subject": "subject", "level": "level"},
        "math500.jsonl", 500, "561298df25f8d865", "latex", "MIT",
    ),
    Benchmark(
        "olympiadbench", f"{QWEN}/olympiadbench/test.jsonl", None, ("train",),
        {"id": "id", "problem": "question", "answer": "final_answer", "subject": "subfield"}, "olympiadbench.jsonl", 675,
        "ae79530bb247c23c", "latex", "MIT", convert="only_element",
        note="the 675 problems of the Qwen suite; the original OE_TO_maths_en_COMP has 674",
    ),
    Benchmark(
        "minerva", f"{QWEN}/minerva_math/test.jsonl", None, ("train",),
        {"id": "idx", "problem": "problem", "answer": "solution", "subject": "type"}, "minerva.jsonl", 272,
        "517ca13342361909", "latex", "texts of MIT OpenCourseWare, CC BY-NC-SA 4.0", convert="last_boxed",
    ),
    Benchmark(
        "omni_math", f"{RAW}/KbsdJames/omni-math-rule/4793415ef37d31c9cdb4e5b82dbe172f76f8cf08/omni_math_rule.jsonl", None,
        ("train",), {"problem": "problem", "answer": "answer", "level": "difficulty"}, "omni_math.jsonl", 2821,
        "ab6d262eb5ceaea3", "latex", "Apache-2.0", convert="numbered",
        note="the rule-gradable subset of 4,428; 4 golds are cut short and cannot be graded",
    ),
    Benchmark(
        "gsm8k", "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", ("test",),
        {"problem": "question", "answer": "answer"}, "gsm8k_test.jsonl", 1319, "a8394e38eadf7282", "number", "MIT",
        config="main", convert="after_hashes",
    ),
    Benchmark(
        "humaneval", "openai/openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544", ("test",),
        {"task_id": "task_id", "prompt": "prompt", "tests": "test", "entry_point": "entry_point",
         "canonical_solution": "canonical_solution"},
        "humaneval.jsonl", 164, "dafe21391e431ed4", "tests", "MIT", prompt=HUMANEVAL_PROMPT, config="openai_humaneval",
    ),
    Benchmark(
        "mbpp", "google-research-datasets/mbpp", "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        ("prompt", "test", "validation", "train"),
        {"task_id": "task_id", "prompt": "text", "tests": "test_list", "canonical_solution": "code",
         "setup": "test_setup_code"},
        "mbpp.jsonl", 974, "4b178d0cb755ae25", "tests", "CC BY 4.0", prompt=MBPP_PROMPT, config="full", convert="mbpp",
        note="all four splits; the usual test split is ids 11 to 510 (meta.split)",
    ),
    Benchmark(
        "gsm8k-train", "openai/gsm8k", "740312add88f781978c0658806c59bc2815b9866", ("train",),
        {"problem": "question", "answer": "answer"}, "gsm8k_train.jsonl", 7473, "311fe553ba4209fd", "number", "MIT",
        config="main", convert="after_hashes", use="train",
    ),
    Benchmark(
        "dapo-math-17k", "BytedTsinghua-SIA/DAPO-Math-17k", "65877096c24ffa7abc4e4fa5edb95cf3413a5674", ("train",),
        {"problem": "prompt", "answer": "reward_model"}, "dapo_math_17k_sample.jsonl",
        None, "52c405ee78da1c83", "integer", "Apache-2.0",
        convert="dapo", file_count=16284, use="train",
        note="the hub data set repeats every problem about 100 times; repeats are dropped, so its count is not fixed here",
    ),
]  # fmt: skip
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
