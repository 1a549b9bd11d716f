"""Loading the problem sets of :mod:`tepo_core.tasks.benchmark_table`, from a folder or through ``datasets``; mathematics here,
code in :mod:`tepo_core.tasks.code_benchmarks`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tepo_core.grading.boxes import last_boxed
from tepo_core.grading.exact import canonical_integer
from tepo_core.tasks import code_benchmarks
from tepo_core.tasks.benchmark_table import Benchmark, lookup
from tepo_core.tasks.problem import DataError, Problem

_DAPO_HEAD = re.compile(r"^Solve the following math problem step by step\..*?is the answer to the problem\.\s*", re.DOTALL)
_DAPO_TAIL = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$")


def load_benchmark(name: str, benchmarks_dir: str | Path | None = None) -> list[Problem]:
    """The problems of a set, in the order of their source, as :class:`Problem` (``split`` is the name of the set).

    Raises :class:`DataError` for an unknown set, a missing file or field (file and line named), an empty problem or answer,
    repeated ids, a wrong count or digest, and when neither folder nor network is there (with both ways out)."""
    benchmark = lookup(name)
    if benchmarks_dir is None:
        records, where = fetch(benchmark), f"{benchmark.source}@{(benchmark.revision or 'address')[:12]}"
        expected = benchmark.count
    else:
        path = Path(benchmarks_dir).expanduser() / benchmark.file
        records, where = read_records(path, benchmark), str(path)
        expected = benchmark.file_count or benchmark.count
    _check(records, benchmark, where, expected)
    if benchmarks_dir is not None and content_digest(records, benchmark) != benchmark.digest:
        raise DataError(
            f"{where}: the content is not that of {name!r} (digest {content_digest(records, benchmark)}, expected "
            f"{benchmark.digest}); take the file from {benchmark.source}, or unset data.benchmarks_dir to download it"
        )
    make = code_benchmarks.make_problem if benchmark.kind == "code" else make_problem
    return [make(record, benchmark) for record in records]


def make_problem(record: Mapping[str, Any], benchmark: Benchmark) -> Problem:
    """A mathematics record as a :class:`Problem`: the template around the text, everything else in ``meta``."""
    meta = {key: record[key] for key in ("subject", "level", "solution", "meta") if record.get(key) not in (None, "")}
    prompt = benchmark.prompt.format(problem=record["problem"])
    return Problem(str(record["id"]), prompt, record["answer"].strip(), benchmark.name, {"problem": record["problem"], **meta})


def read_records(path: Path, benchmark: Benchmark) -> list[dict[str, Any]]:
    """The lines of a file of ``benchmarks_dir``. Raises :class:`DataError` naming file and line."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; put {benchmark.file} there (the format is in tepo_core/tasks/benchmark_table.py), "
            f"or unset data.benchmarks_dir and go online to download {benchmark.source}"
        )
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}); the file is damaged or cut short") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: not a JSON object")
        missing = [name for name in _needed(benchmark) if name not in record]
        if missing:
            raise DataError(f"{path}, line {number}: the field {missing[0]!r} is missing; needed: {_needed(benchmark)}")
        records.append({**record, "line": number})
    return records


def fetch(benchmark: Benchmark) -> list[dict[str, Any]]:
    """The rows of a set through ``datasets``, renamed and converted. Raises :class:`DataError` when they cannot be had."""
    import datasets

    rows: list[dict[str, Any]] = []
    for split in benchmark.splits:
        try:
            with _offline_without_network():
                if benchmark.revision is None:
                    data = datasets.load_dataset("json", data_files={split: benchmark.source}, split=split)
                else:
                    data = datasets.load_dataset(benchmark.source, benchmark.config, split=split, revision=benchmark.revision)
        except Exception as error:  # datasets raises a dozen unrelated types when the network is off
            raise DataError(
                f"problem set {benchmark.name!r} cannot be downloaded from {benchmark.source} "
                f"({type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else 'no message'}). Two ways out: "
                f"set data.benchmarks_dir to a folder that holds {benchmark.file}, or go online once; "
                "the copy is then kept in the cache of the 'datasets' library"
            ) from None
        missing = [theirs for theirs in benchmark.fields.values() if theirs not in data.column_names]
        if missing:
            raise DataError(f"{benchmark.source}: the field {missing[0]!r} is missing; found: {', '.join(data.column_names)}")
        for row in data:
            if all(text in str(row[benchmark.fields[name]]) for name, text in benchmark.keep.items()):
                rows.append({**{ours: row[theirs] for ours, theirs in benchmark.fields.items()}, "source_split": split})
    convert = {**CONVERTERS, "mbpp": code_benchmarks.convert_mbpp}.get(benchmark.convert, lambda rows, benchmark: rows)
    return [{**record, "line": number} for number, record in enumerate(convert(rows, benchmark), start=1)]


@contextlib.contextmanager
def _offline_without_network() -> Iterator[None]:
    """Where the hub's name cannot be resolved, look into the cache only, instead of half a minute of retries."""
    import datasets
    import huggingface_hub.constants as hub

    proxies = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    offline = False
    if not proxies:
        try:
            socket.getaddrinfo(urlsplit(hub.ENDPOINT).hostname, 443)
        except OSError:
            offline = True
    before = hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if offline:
        hub.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _needed(benchmark: Benchmark) -> tuple[str, ...]:
    return ("task_id", "prompt", "tests", "entry_point") if benchmark.kind == "code" else ("id", "problem", "answer")


def _check(records: list[dict[str, Any]], benchmark: Benchmark, where: str, expected: int | None) -> None:
    needed, seen = _needed(benchmark), {}
    for record in records:
        place = f"{where}, line {record['line']}"
        for name in needed[1:]:
            if not isinstance(record[name], str) or not record[name].strip():
                raise DataError(f"{place}: {name!r} = {record[name]!r} must be a non-empty string")
        key = str(record[needed[0]])
        if not key.strip() or key in seen:
            raise DataError(f"{place}: the id {key!r} is empty or was used in line {seen.get(key, '?')}; ids must be unique")
        seen[key] = record["line"]
    if expected is not None and len(records) != expected:
        raise DataError(f"{where}: {len(records)} problems, expected {expected}; the file is cut short or another selection")


def content_digest(records: Iterable[Mapping[str, Any]], benchmark: Benchmark) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the sorted (text reduced to letters and digits, answer) pairs, so that
    order, spacing and extra fields do not matter."""
    first, second = ("prompt", "tests") if benchmark.kind == "code" else ("problem", "answer")
    lines = sorted(f"{letters_and_digits(r[first])}\t{r[second].strip()}" for r in records)
    return hashlib.sha256("\n".join(lines).encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def letters_and_digits(text: str) -> str:
    """The text in lower case without anything but letters and digits."""
    return "".join(c for c in text.lower() if c.isalnum())


def _integer(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """Integer answers written as floats or with leading zeros (AIME's 025, AMC's 27.0, AIME 2025's 336^\\circ)."""
    for row in rows:
        text = re.sub(r"\^\\circ$|\.0+$", "", str(row["answer"]).strip())
        row["answer"] = canonical_integer(text) or text
    return rows


def _after_hashes(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """GSM8K: the answer follows ``####`` at the end of the solution."""
    for number, row in enumerate(rows):
        row["solution"] = row["answer"]
        row["answer"] = row["answer"].rsplit("####", 1)[-1].strip().replace(",", "")
        row["id"] = f"gsm8k-{row['source_split']}-{number}"
    return rows


def _only_element(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """OlympiadBench: the answer is a list with one string."""
    for row in rows:
        answer = row["answer"]
        row["answer"] = ", ".join(answer) if isinstance(answer, list) else str(answer)
        row["id"] = f"{benchmark.name}-{row['id']}"
    return rows


def _last_boxed(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """Minerva: the answer is the last box of the solution."""
    for row in rows:
        row["solution"] = row["answer"]
        row["answer"] = last_boxed(row["answer"]) or ""
        row["id"] = f"{benchmark.name}-{row['id']}"
    return rows


def _numbered(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """Omni-MATH-Rule has no ids."""
    return [{**row, "id": f"omni-rule-{number}", "answer": str(row["answer"])} for number, row in enumerate(rows)]


def _dapo(rows: list[dict[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """DAPO-Math: unwrap the chat message and its instructions, drop repeats, drop problems given two different answers."""
    answers: dict[str, set[str]] = {}
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        text = row["problem"][0]["content"] if isinstance(row["problem"], list) else row["problem"]
        problem = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", text)).strip()
        reward = row["answer"]
        answer = str(reward["ground_truth"] if isinstance(reward, dict) else reward).strip()
        key = letters_and_digits(problem)
        answers.setdefault(key, set()).add(answer)
        first.setdefault(key, {"problem": problem, "answer": answer})
    kept = [record for key, record in first.items() if len(answers[key]) == 1]
    return [{**record, "id": f"dapo-{number}"} for number, record in enumerate(kept)]


CONVERTERS: dict[str, Callable[[list[dict[str, Any]], Benchmark], list[dict[str, Any]]]] = {
    "integer": _integer,
    "after_hashes": _after_hashes,
    "only_element": _only_element,
    "last_boxed": _last_boxed,
    "numbered": _numbered,
    "dapo": _dapo,
}
