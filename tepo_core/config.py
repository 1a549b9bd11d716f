"""Typed parameters of the study: every key of ``params.yaml``, its unit, range and source.

Unknown keys, wrong types and contradictory values raise :class:`ConfigError` before any work starts. The meaning of a
*method* (its objective) is not known here: names are checked by :mod:`tepo_core.objectives.methods`, which sits one floor up.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

ARITHMETIC_TASKS = ("facts", "facts_hard", "noise")
BASE_PROFILE = "quick.yaml"
WHOLE = ("variants",)
"""Mappings that are one value: a profile replaces them."""
LABEL = re.compile(r"[A-Za-z0-9_.]+(?:-[A-Za-z0-9_.]+)*")

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ConfigError(ValueError):
    """A parameter is missing, unknown, of the wrong type, out of range, or contradicts another."""


class Strict(BaseModel):
    """Base of every group: frozen, unknown keys refused, no silent conversion of strings to numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Data(Strict):
    """Problem sets. Counts are problems per split; a study seed draws its own facts and problems."""

    train_size: Count = 4096
    validation_size: Count = 128
    test_size: Count = 256
    long_size: Count = 256
    warmup_size: Count = 51200
    benchmarks_dir: str | None = None
    eval_sets: list[str] = []
    remove_contamination: bool = True


class Tiny(Strict):
    """Shape of the Qwen3-architecture model that ``source: tiny`` builds from scratch; another source brings its own."""

    hidden_size: Count = 128
    layers: Count = 2
    heads: Count = 4
    kv_heads: Count = 2
    head_size: Count = 32
    mlp_size: Count = 384
    context: Annotated[int, Field(ge=16)] = 128


class Policy(Strict):
    """The model. ``source: tiny`` builds one from scratch; anything else is a hub id or a folder."""

    source: str = "tiny"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    prompt_format: Literal["plain", "chat"] = "plain"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    lora_rank: Annotated[int, Field(ge=0)] = 0
    mtp_modules: Annotated[int, Field(ge=0, le=7)] = 0
    tiny: Tiny = Tiny()


MOVED = {f"policy.{name}": f"policy.tiny.{name}" for name in Tiny.model_fields}
"""Names of earlier parameter files, and where they went."""


class Warmup(Strict):
    """Supervised warm-up of the base policy (cosine learning rate)."""

    steps: Annotated[int, Field(ge=0)] = 400
    batch_size: Count = 64
    optimizer: Literal["adamw", "muon"] = "muon"
    lr: Positive = 5e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    grad_clip: Positive = 1.0


class Train(Strict):
    """The RL loop. One rollout step samples prompts_per_rollout x group_size responses and makes minibatches x epochs updates."""

    rollouts: Count = 100
    prompts_per_rollout: Count = 32
    group_size: Annotated[int, Field(ge=2)] = 8
    minibatches: Count = 4
    epochs: Count = 2
    micro_batch_tokens: Count = 8192
    lr: Positive = 1e-4
    lr_warmup_rollouts: Annotated[int, Field(ge=0)] = 10
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Positive = 1.0
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Count = 48
    zero_variance: Literal["keep", "drop", "refill"] = "keep"
    max_refills: Count = 4
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    validate_every: Annotated[int, Field(ge=0)] = 10
    record_every: Annotated[int, Field(ge=0)] = 10
    record_responses: Count = 32
    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    stop_kl: Positive = 5.0
    stop_reward_drop: Share = 0.0

    @model_validator(mode="after")
    def _divisible(self) -> Train:
        if self.prompts_per_rollout % self.minibatches:
            raise ValueError(
                f"minibatches = {self.minibatches} must divide prompts_per_rollout = {self.prompts_per_rollout}; "
                f"allowed: {[m for m in range(1, self.prompts_per_rollout + 1) if self.prompts_per_rollout % m == 0]}"
            )
        return self


class Rollout(Strict):
    """Which engine samples. ``transformers`` runs in the trainer's process; ``vllm`` in a process of its own."""

    engine: Literal["transformers", "vllm"] = "transformers"
    batch_size: Count = 1024
    importance_correction: Literal["none", "token", "sequence"] = "none"
    importance_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    gpu_memory_share: Annotated[float, Field(gt=0, lt=1)] = 0.5


class Evaluate(Strict):
    """Evaluation of a policy: n samples a problem, unbiased pass@k for every k, and a greedy answer.

    ``protocol: paper`` samples each set as the papers do (see :func:`tepo_core.evaluation.samples.settings_for`)."""

    protocol: Literal["study", "paper"] = "study"
    splits: Annotated[list[str], Field(min_length=1)] = ["test", "long"]
    limit: Annotated[int, Field(ge=0)] = 0
    samples: Count = 16
    k: Annotated[list[Count], Field(min_length=1)] = [1, 2, 4, 8, 16]
    temperature: Positive = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Count = 48
    greedy: bool = True

    @field_validator("temperature", mode="before")
    @classmethod
    def _samples_differ(cls, value: Any) -> Any:
        if value == 0:
            raise ValueError(
                "at temperature 0 all samples of a problem are the same; set 'greedy: true' for the greedy answer, and a "
                "temperature > 0 for the samples"
            )
        return value

    @model_validator(mode="after")
    def _k_fits(self) -> Evaluate:
        if list(self.k) != sorted(set(self.k)):
            raise ValueError(f"k = {self.k} must be sorted and without repeats")
        if max(self.k) > self.samples:
            raise ValueError(f"k = {max(self.k)} is larger than samples = {self.samples}; pass@k needs k <= samples")
        return self


class Analyse(Strict):
    """Statistics. Targets and shares are fractions in [0, 1]."""

    bootstrap: Annotated[int, Field(ge=100)] = 2000
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    target_accuracy: Share = 0.6
    collapse_entropy_share: Share = 0.1
    collapse_reward_share: Share = 0.5


class Report(Strict):
    """Presentation."""

    title: str = "TEPO study"
    watermark: bool = True


class Compute(Strict):
    """Machine. ``threads: 0`` takes one for the tiny model, else the cores that affinity and a container's quota leave."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0)] = 0


class Study(Strict):
    """The whole of ``params.yaml``."""

    profile: str
    tasks: Annotated[list[str], Field(min_length=1)]
    methods: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
    variants: dict[str, dict[str, Any]] = {}
    data: Data = Data()
    policy: Policy = Policy()
    warmup: Warmup = Warmup()
    train: Train = Train()
    rollout: Rollout = Rollout()
    evaluate: Evaluate = Evaluate()
    analyse: Analyse = Analyse()
    report: Report = Report()
    compute: Compute = Compute()

    @field_validator("tasks", "methods", "seeds")
    @classmethod
    def _unique(cls, values: list) -> list:
        repeated = sorted({v for v in values if values.count(v) > 1})
        if repeated:
            raise ValueError(f"{repeated} is listed twice; every (task, method, seed) may be run once")
        return values

    @field_validator("profile", "tasks", "methods")
    @classmethod
    def _labels(cls, value: Any) -> Any:
        for label in [value] if isinstance(value, str) else value:
            if not LABEL.fullmatch(label):
                raise ValueError(f"{label!r} is used as a folder name; allowed are letters, digits, '_', '.' and inner '-'")
        return value

    @model_validator(mode="after")
    def _lengths_fit(self) -> Study:
        if "base" in self.methods or "base" in self.variants:
            raise ValueError("methods: 'base' is the name of the untrained policy; choose another name")
        longest = max(self.train.max_new_tokens, self.evaluate.max_new_tokens)
        if self.policy.source == "tiny" and longest >= self.policy.tiny.context:
            raise ValueError(
                f"policy.tiny.context = {self.policy.tiny.context} tokens leaves no room for a prompt beside "
                f"max_new_tokens = {longest}; raise policy.tiny.context or lower max_new_tokens"
            )
        return self

    def train_for(self, method: str) -> Train:
        """The training parameters of one method: ``train`` with the ``train:`` overrides of its variant, validated again."""
        override = self.variants.get(method, {}).get("train", {})
        return _validated(Train, {**self.train.model_dump(), **override}, f"variants.{method}.train")


def _validated(model: type[Strict], values: Any, where: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, where)) from None


def explain(error: ValidationError, where: str) -> str:
    """One line per fault: file, parameter, value given, what is allowed."""
    lines = []
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden" and name in MOVED:
            lines.append(f"{where}: unknown parameter '{name}'; it is '{MOVED[name]}' now, see profiles/quick.yaml")
        elif fault["type"] == "extra_forbidden":
            known = ", ".join(_known_keys(error.title, fault["loc"][:-1]))
            lines.append(f"{where}: unknown parameter '{name}'; known here: {known}")
        elif fault["type"] == "missing":
            lines.append(f"{where}: parameter '{name}' is missing; see the comments in profiles/quick.yaml")
        else:
            given = f" = {fault['input']!r}" if not isinstance(fault["input"], (dict, BaseModel)) else ""
            lines.append(f"{where}: {name or 'parameters'}{given}: {message}")
    return "\n".join(lines)


def _known_keys(title: str, path: tuple) -> list[str]:
    model: Any = next((m for m in [Study, *Strict.__subclasses__()] if m.__name__ == title), Study)
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
    return sorted(getattr(model, "model_fields", {}))


def parse_study(values: Any, where: str = "params.yaml") -> Study:
    """Validate a plain mapping. Raises :class:`ConfigError` naming each faulty parameter."""
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{where}: empty or not a mapping of parameters; run 'tepo profile use quick' to write a fresh one")
    return _validated(Study, values, where)


def load_study(path: str | Path = "params.yaml") -> Study:
    """Read and validate a parameter file. Raises :class:`ConfigError` when it is missing, not YAML, or invalid."""
    path = Path(path)
    return parse_study(read_values(path), path.name)


def read_values(path: Path) -> Any:
    """The plain values of a parameter file; a file of ``profiles/`` states what differs from ``profiles/quick.yaml``.

    Raises :class:`ConfigError` when it is missing or not YAML."""
    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run 'tepo profile use quick' to write one") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    base = base_of(path)
    if base is None or not isinstance(values, dict) or not values:
        return values
    complete = read_values(base)
    if not isinstance(complete, dict):
        raise ConfigError(f"{base}: empty or not a mapping of parameters; the other profiles state what differs from it")
    out = merged(complete, values)
    return out if "profile" in values else {name: value for name, value in out.items() if name != "profile"}  # not inherited


def base_of(path: Path) -> Path | None:
    """The complete file behind a profile; None for a file that stands on its own."""
    base = path.absolute().with_name(BASE_PROFILE)
    return base if base.parent.name == "profiles" and base.name != path.name and base.is_file() else None


def merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``own``: groups are merged key by key, lists and :data:`WHOLE` are replaced."""
    out = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and key not in WHOLE
        out[key] = merged(base[key], value) if both else value
    return out


def digest(value: Any) -> str:
    """Stable 16-digit hash of parameters (a model or anything JSON can hold)."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def find_root(start: str | Path | None = None) -> Path:
    """The project folder: the nearest one at or above ``start`` that holds dvc.yaml and params.yaml.

    Raises :class:`ConfigError` outside the repository."""
    here = Path(start or Path.cwd()).resolve()
    for folder in [here, *here.parents]:
        if (folder / "dvc.yaml").is_file() and (folder / "tepo_core").is_dir():
            return folder
    raise ConfigError(f"{here} is not inside the project: no dvc.yaml beside tepo_core/ here or above; cd into the clone first")
