"""The registry: a preset is a surrogate with default options; a method is a preset with its options resolved and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from tepo_core.config import ConfigError
from tepo_core.objectives.method import Method, Objective, Preset
from tepo_core.objectives.options import Common

PRESETS: dict[str, Preset] = {}


def register(
    name: str,
    options: type[Common] = Common,
    *,
    source: str,
    title: str = "",
    equation: str = "",
    status: str = "own",
    inert_at_zero: bool = True,
    **defaults: Any,
) -> Callable[[Objective], Objective]:
    """Decorator: make ``surrogate(batch, options) -> Surrogate`` a method called ``name``. See :class:`Preset`.

    options: its options class; the method uses exactly these fields and refuses others. ``defaults`` override the class's.
    Several presets may share one function. Raises :class:`ConfigError` for a name in use or defaults that do not validate."""

    def add(surrogate: Objective) -> Objective:
        if name in PRESETS:
            raise ConfigError(f"objective {name!r} is registered already; choose another name")
        preset = Preset(
            name=name,
            surrogate=surrogate,
            options=options,
            defaults=defaults,
            source=source,
            title=title or name,
            equation=equation,
            status=status,
            inert_at_zero=inert_at_zero,
        )
        _settings(preset, {}, f"objective {name}")
        PRESETS[name] = preset
        return surrogate

    return add


def resolve(name: str, variants: Mapping[str, Mapping[str, Any]] | None = None) -> Method:
    """The method called ``name``: a key of ``variants`` ({preset: ..., option: value}) or a preset.

    Options given as mappings (kl, block) are merged into the preset's. ``train`` inside a variant is not an option of the
    objective. Raises :class:`ConfigError` naming the option, its value and what is allowed."""
    variant = dict((variants or {}).get(name, {"preset": name}))
    where = f"variants.{name}" if name in (variants or {}) else f"method {name}"
    preset_name = variant.pop("preset", name)
    variant.pop("train", None)
    if preset_name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"{where}: preset {preset_name!r} is unknown; allowed: {known}, or a key of variants")
    preset = PRESETS[preset_name]
    return Method(name, preset, _settings(preset, variant, where))


def _settings(preset: Preset, overrides: Mapping[str, Any], where: str) -> Common:
    """Validated options: class defaults, preset defaults, overrides; kl and block merge key by key."""
    used = preset.options.model_fields
    for option in overrides:
        if option not in used:
            kind = "does not use option" if option in _every_option() else "has no option"
            raise ConfigError(f"{where}: {preset.name} {kind} {option!r}; it uses: {', '.join(sorted(used))}")
    values = dict(preset.defaults)
    for option, value in overrides.items():
        merges = isinstance(value, Mapping) and isinstance(values.get(option), Mapping)
        values[option] = {**values[option], **value} if merges else value
    try:
        return preset.options.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, preset, where) for fault in error.errors())) from None


def _every_option() -> set[str]:
    return {option for preset in PRESETS.values() for option in preset.options.model_fields}


def _explain(fault: Mapping[str, Any], preset: Preset, where: str) -> str:
    path = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        group: Any = next(a for a in preset.options.model_fields[path[0]].annotation.__args__ if hasattr(a, "model_fields"))
        return f"{where}: {path[0]} has no option {path[1]!r}; allowed: {', '.join(sorted(group.model_fields))}"
    given = "" if isinstance(fault["input"], Mapping) or not path else f" = {fault['input']!r}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {'.'.join(path)}{given}: {message}" if path else f"{where}: {message}"
