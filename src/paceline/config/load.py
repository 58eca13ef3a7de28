"""From a TOML file and overrides to a `RunConfig`, and back.

A recipe may start with ``extends = "other.toml"`` (relative to its own folder): tables are merged, everything else is
replaced. ``--set section.key=value`` is the one form of override; the value is read as TOML, and as plain text where it
is not TOML. A preset is expanded here, so the resolved recipe names every field and runs again as it is.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from paceline.config.asked import show
from paceline.config.origin import expand_origin
from paceline.config.plugins import Registry, load_plugins
from paceline.config.presets import preset
from paceline.config.run import RunConfig
from paceline.errors import ConfigError

Tables = dict[str, Any]

ELSEWHERE = {
    "dp": "parallel.dp_shard",
    "data_parallel": "parallel.dp_shard",
    "tensor_parallel": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "expert_parallel": "parallel.ep",
    "expert_model_parallel_size": "parallel.ep",
    "zero_stage": "parallel.zero",
    "activation_checkpointing": "parallel.recompute",
    "batch_size": "train.global_batch_size",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "seq_length": "train.seq_len",
    "learning_rate": "optim.lr",
}
"""Names that other systems give to fields; they look like none of ours, or like a wrong one."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A resolved recipe, and what its plugins registered."""

    config: RunConfig
    registry: Registry


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and applies ``section.key=value`` overrides.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, or a value does not fit.
    """
    return resolve(read_tables(Path(path)), overrides)


def resolve(tables: Tables, overrides: Sequence[str] = ()) -> Recipe:
    """Builds the configuration from raw tables: overrides, plugins, preset, then validation."""
    for override in overrides:
        tables = merge(tables, parse_override(override))
    _refuse_non_tables(tables)
    registry = load_plugins(_plugin_names(tables))
    return Recipe(config=validate(expand_origin(_expand_preset(tables, registry))), registry=registry)


def read_tables(path: Path, above: tuple[Path, ...] = ()) -> Tables:
    """Reads one TOML file with everything it extends."""
    resolved = path.resolve()
    if resolved in above:
        chain = " -> ".join(str(item) for item in (*above, resolved))
        raise ConfigError(f"recipes extend each other in a circle: {chain}", next_step="Remove one `extends`.")
    try:
        tables = tomllib.loads(resolved.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no recipe {path}", next_step=_nearby_recipes(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML",
            evidence=str(error),
            next_step="Mend that line. Text values need quotes; tables look like [train].",
        ) from error
    except OSError as error:
        inside = path / "recipe.toml"
        step = f"A run folder's recipe is {inside}." if inside.is_file() else "Give a recipe file."
        raise ConfigError(f"{path} cannot be read", evidence=str(error), next_step=step) from error
    parent = tables.pop("extends", None)
    if parent is None:
        return tables
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends = {parent!r} is not a file name", next_step='Write extends = "other.toml".')
    return merge(read_tables(resolved.parent / parent, (*above, resolved)), tables)


def _nearby_recipes(path: Path) -> str:
    told = []
    for folder in {each.resolve(): each for each in (Path("recipes"), path.parent)}.values():
        names = [item.name for item in sorted(folder.glob("*.toml")) if _is_recipe(item)]
        close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:6]
        if close:
            told.append(f"Recipes in {folder}: {', '.join(close)}.")
    return " ".join(told) or "Give the path of a .toml file."


def _is_recipe(path: Path) -> bool:
    """Whether a TOML file has a section of a recipe: ``pyproject.toml`` has none."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    return not tables.keys().isdisjoint({*RunConfig.model_fields, "extends"})


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tables:
    """Lays one set of tables over another; a new `model.preset` drops the fields that the old one was given beside."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def parse_override(text: str) -> Tables:
    """``"train.steps=100"`` -> ``{"train": {"steps": 100}}``.

    What is a number or a date in TOML is text where the field takes text alone: ``"run.name=2026"`` ->
    ``{"run": {"name": "2026"}}``.
    """
    key, equals, raw = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        known = [name for name in field_names(RunConfig) if name.endswith(f".{key.strip()}")] if equals else []
        raise ConfigError(
            f"--set {text!r} is not of the form section.key=value",
            next_step=f"Did you mean --set {known[0]}={raw}?" if known else "For example: --set train.steps=100",
        )
    value: Any = _parse_value(raw.strip())
    field = _field(".".join(parts))
    if field is not None and field.annotation is str and not isinstance(value, str | list | dict):
        value = raw.strip()
    for part in reversed(parts):
        value = {part: value}
    return value


def _parse_value(raw: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw  # plain text needs no quotes: --set data.train=corpus
    return parsed["value"] if len(parsed) == 1 else raw


def _refuse_non_tables(tables: Tables) -> None:
    for key, value in tables.items():
        if key in RunConfig.model_fields and not isinstance(value, Mapping):
            raise ConfigError(f"{key} = {value!r} is not a section", next_step=f"Write [{key}] and its fields below.")


def _plugin_names(tables: Tables) -> list[str]:
    """None where the value is of another kind: validation, which comes later, refuses it by name."""
    value = tables.get("run", {}).get("plugins", ())
    names = [value] if isinstance(value, str) else value
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
    return list(names) if is_list else []


def _expand_preset(tables: Tables, registry: Registry) -> Tables:
    model = tables.get("model", {})
    name = model.get("preset", "")
    if not name or not isinstance(name, str):
        return tables  # another kind of value is refused by validation
    fields = registry.presets[name] if name in registry.presets else preset(name)
    return {**tables, "model": merge(fields, model)}


def validate(tables: Mapping[str, Any]) -> RunConfig:
    """Builds the frozen configuration from plain tables.

    Raises:
        ConfigError: one error for everything that is wrong, each with its key, value and reason.
    """
    try:
        return RunConfig.model_validate(dict(tables))
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ConfigError:
    details = error.errors()
    for detail in details:  # our own checks already say everything
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return cause
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    if unknown:
        return _unknown_key(unknown)
    lines = [
        f"{_key(detail['loc'])} = {show(detail['input'])}: {_NEEDED.get(detail['type']) or detail['msg'].lower()}"
        for detail in details
    ]
    return ConfigError(
        lines[0],
        evidence="\n  ".join(lines[1:]),
        next_step=f"{_meaning(_key(details[0]['loc']))}`paceline train --print-schema` lists every field with its type "
        "and meaning.",
    )


_NEEDED = {
    "tuple_type": "a list is needed, in brackets",
    "model_type": "a table of fields is needed",
}
"""Where pydantic speaks of Python's types."""


def _meaning(key: str) -> str:
    """What a field is, in its own words; empty for a key that is no field (an entry of a list)."""
    field = _field(key)
    if field is None or not field.description:
        return ""
    return f"{key}: {' '.join(field.description.split())} "


def _field(key: str) -> FieldInfo | None:
    """None for a key that is no field."""
    model: type[BaseModel] = RunConfig
    *path, name = key.split(".")
    for part in path:
        kind = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        model = kind
    return model.model_fields.get(name)


def _unknown_key(details: Sequence[Any]) -> ConfigError:
    key = _key(details[0]["loc"])
    # not the section that the key is in: that one was right
    known = [candidate for candidate in field_names(RunConfig) if not key.startswith(f"{candidate}.")]
    name = key.rsplit(".", 1)[-1]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    same_name = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == name]
    near = difflib.get_close_matches(name, [candidate.rsplit(".", 1)[-1] for candidate in known], n=1, cutoff=0.75)
    guess = (
        [ELSEWHERE[name]]
        if name in ELSEWHERE
        else same_name[:1]
        or close
        or [candidate for candidate in known if near and candidate.endswith("." + near[0])][:1]
    )
    others = [_key(detail["loc"]) for detail in details[1:]]
    return ConfigError(
        f"unknown key {key}" + (f" = {details[0]['input']!r}" if not isinstance(details[0]["input"], dict) else ""),
        evidence=f"Also unknown: {', '.join(others)}." if others else "",
        next_step=(f"Did you mean {guess[0]}? " if guess else "") + "`paceline train --print-schema` lists every key.",
    )


def _key(location: tuple[int | str, ...]) -> str:
    # pydantic names the branch of a union in the location; it is no part of the key
    return ".".join(str(part) for part in location if not (isinstance(part, str) and ("[" in part or part == "str")))


def field_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys below a section, `train.steps` and the like."""
    for name, info in model.model_fields.items():
        kinds = [kind for kind in (info.annotation, *get_args(info.annotation)) if isinstance(kind, type)]
        nested = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        yield f"{prefix}{name}"
        if nested is not None:
            yield from field_names(nested, f"{prefix}{name}.")


def dump_recipe(config: RunConfig) -> str:
    """The whole configuration as TOML; `load_recipe` of it gives the same configuration."""
    return tomli_w.dumps(config.model_dump(mode="json"))


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    before, after = dict(_flatten(old.model_dump(mode="json"))), dict(_flatten(new.model_dump(mode="json")))
    return {key: (before.get(key), after.get(key)) for key in {**before, **after} if before.get(key) != after.get(key)}


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def json_schema() -> str:
    """The JSON schema of a recipe, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)
