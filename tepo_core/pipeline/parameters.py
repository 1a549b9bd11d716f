"""Everything that can be known to be wrong before work starts.

:func:`load_validated` is called by ``make repro`` before DVC, and again at the start of every stage. What it found right is
remembered under ``.tepo/``, keyed by the file and by the code that judged it, so that the check costs nothing the next time.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_core.config import ARITHMETIC_TASKS, ConfigError, Strict, Study, load_study, parse_study
from tepo_core.files import local_path, source_path

if TYPE_CHECKING:
    from tepo_core.objectives.options import Common

PACKAGE = Path(__file__).parents[1]


def load_validated(path: str | Path = "params.yaml") -> Study:
    """Read ``params.yaml``, check each parameter, that none is left out, and that tasks, splits and methods exist.

    Raises :class:`ConfigError` naming the parameter, its value and what is allowed."""
    path = Path(path)
    study = load_study(path)
    marker = path.parent / ".tepo" / "validated"
    key = _key(path)
    if marker.is_file() and marker.read_text(encoding="utf-8") == key:
        return study
    root = path.absolute().parent
    check(study, path.name, root)
    # Folders can change behind the parameters, so what they held is never remembered.
    named = source_path(study.policy.source, root) is not None or study.data.benchmarks_dir is not None
    if (path.parent / "dvc.yaml").is_file() and not named:
        try:
            marker.parent.mkdir(exist_ok=True)
            marker.write_text(key, encoding="utf-8")
        except OSError:
            pass  # a read-only tree can still be checked, only more slowly
    return study


def load_normalised(path: Path) -> Study:
    """The parameters as normalise wrote them after it had checked them."""
    return parse_study(json.loads(path.read_text(encoding="utf-8")))


def check(study: Study, where: str = "params.yaml", root: Path = Path()) -> None:
    """The checks that the typed parameters cannot make on their own; paths start at ``root``.

    Raises :class:`ConfigError` listing every fault."""
    faults = _missing(study, where)
    faults += _tasks(study, where, root)
    faults += _methods(study, where)
    faults += _policy(study, where, root)
    if faults:
        raise ConfigError("\n".join(faults))


def _missing(study: Study, where: str) -> list[str]:
    # DVC sees only what the file holds: a default that changed in the code would not make a stage stale.
    names = _left_out(study)
    if not names:
        return []
    return [f"{where}: parameters missing: {', '.join(names)}; each must be given (profiles/quick.yaml explains them)"]


def _left_out(group: Strict, prefix: str = "") -> list[str]:
    known, given = type(group).model_fields, group.model_fields_set
    names = [f"{prefix}{name}" for name in known if name not in given]
    for name in (name for name in known if name in given and isinstance(getattr(group, name), Strict)):
        names += _left_out(getattr(group, name), f"{prefix}{name}.")
    return names


def _tasks(study: Study, where: str, root: Path) -> list[str]:
    from tepo_core.tasks.benchmark_table import BENCHMARKS

    tasks = [*ARITHMETIC_TASKS, *(name for name, entry in BENCHMARKS.items() if entry.use == "train")]
    splits = ["train", "validation", "test"]
    if not set(study.tasks) & set(BENCHMARKS):
        splits.append("long")  # longer chains; a benchmark has no such thing
    faults = [_unknown(where, "tasks", task, tasks) for task in study.tasks if task not in tasks]
    faults += [
        _unknown(where, "data.eval_sets", name, list(BENCHMARKS)) for name in study.data.eval_sets if name not in BENCHMARKS
    ]
    allowed = [*splits, *study.data.eval_sets]
    faults += [_unknown(where, "evaluate.splits", split, allowed) for split in study.evaluate.splits if split not in allowed]
    faults += _solutions(study, where, root)
    folder = study.data.benchmarks_dir
    if folder is not None and not local_path(folder, root).is_dir():
        faults.append(f"{where}: data.benchmarks_dir = {folder!r}: no such folder; allowed: a folder of *.jsonl files, or null")
    return faults


def _solutions(study: Study, where: str, root: Path) -> list[str]:
    """A warm-up learns from worked solutions: those that the table promises, or that a file of one's own holds."""
    from tepo_core.tasks.benchmark_table import BENCHMARKS

    faults, folder = [], study.data.benchmarks_dir
    for task in study.tasks if study.warmup.steps else []:
        entry = BENCHMARKS.get(task)
        if entry is None or entry.use != "train":
            continue
        path = None if folder is None else local_path(folder, root) / entry.file
        own = path is not None and path.is_file()
        if not (b'"solution"' in path.read_bytes() if own else entry.has_solutions):
            fault = f"{task} has no worked solutions to learn from; set it to 0"
            faults.append(f"{where}: warmup.steps = {study.warmup.steps}: {fault}")
    return faults


def _unknown(where: str, parameter: str, value: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(value, allowed, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"{where}: {parameter}: {value!r} is unknown{hint}; allowed: {', '.join(allowed)}"


def _methods(study: Study, where: str) -> list[str]:
    from tepo_core.objectives.methods import resolve  # imports torch: only when something has to be checked

    faults = []
    for name in dict.fromkeys([*study.methods, *study.variants]):
        try:
            method = resolve(name, study.variants)
            if method.mtp_modules > study.policy.mtp_modules:
                raise ConfigError(
                    f"policy.mtp_modules = {study.policy.mtp_modules}: method {name} needs {method.mtp_modules} "
                    f"(block.size - 1, block.logprobs: mtp); set it to at least that, or use block.logprobs: backbone"
                )
            if not isinstance(study.variants.get(name, {}).get("train", {}), dict):
                raise ConfigError(f"variants.{name}.train: must be a mapping of training parameters")
            _acts(study, name, method.settings)
        except ConfigError as error:
            text = str(error)
            faults.append(text if text.startswith(where) else f"{where}: {text}")
    return faults


LEAST_CHOSEN = 10  # tokens of a mini-batch; a share that selects fewer is one token's accident, or nothing


def _acts(study: Study, name: str, settings: Common) -> None:
    """Refuse a share of tokens (kl_cov, clip_cov) that selects fewer than ten of a typical mini-batch.

    Its N is estimated as responses of a mini-batch times half of max_new_tokens: what responses here come to, and near enough
    elsewhere, since shares that act and that do not lie a factor of ten apart. Groups of equal rewards leave N smaller."""
    train, share = study.train_for(name), getattr(settings, "share", None)
    if share is None:
        return
    responses = train.prompts_per_rollout // train.minibatches * train.group_size
    tokens = responses * train.max_new_tokens // 2
    if (chosen := math.floor(share * tokens)) < LEAST_CHOSEN:
        least = math.ceil(1e4 * LEAST_CHOSEN / max(tokens, LEAST_CHOSEN)) / 1e4
        preset = study.variants.get(name, {}).get("preset", name)
        raise ConfigError(
            f"variants.{name}: share = {share:g} selects {chosen} of the about {tokens} tokens of a mini-batch ({responses} "
            f"responses, half of max_new_tokens = {train.max_new_tokens}), too few to act; allowed here: {least:g} or more "
            f"({LEAST_CHOSEN} tokens), e.g. variants: {{{name}: {{preset: {preset}, share: {max(least, 0.02):g}}}}}, or larger "
            "mini-batches"
        )


def _policy(study: Study, where: str, root: Path) -> list[str]:
    """The model's files, its context and its chat template, as far as this machine has them."""
    source = study.policy.source
    if source == "tiny":
        if study.policy.prompt_format == "plain":
            return []
        fault = "the tokenizer of policy.source = 'tiny' has no chat template; set it to 'plain'"
        return [f"{where}: policy.prompt_format = 'chat': {fault}"]
    from tepo_core.model.policy import examine

    try:
        examine(source_path(source, root) or source, study.policy)
    except ConfigError as error:
        text = str(error)
        named = text.startswith(("policy.source", "policy.prompt_format"))
        return [f"{where}: {text}" if named else f"{where}: policy.source = {source!r}: {text}"]
    return []


def _key(path: Path) -> str:
    """Hash of the parameters and of the code that decides whether they are right."""
    sources = [PACKAGE / "config.py", PACKAGE / "tasks" / "benchmark_table.py", Path(__file__)]
    sources += sorted((PACKAGE / "objectives").rglob("*.py"))
    joined = hashlib.sha256(path.read_bytes())
    for source in sources:
        joined.update(source.name.encode() + source.read_bytes())
    return joined.hexdigest()
