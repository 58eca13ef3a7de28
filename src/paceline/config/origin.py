"""The shape of a model that starts from weights: it is theirs, unless the recipe gives it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.hub import fields_of, is_hub_folder, read_config
from paceline.errors import ConfigError

_OWN = ("preset", "init_from")


def expand_origin(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the fields of the model that `model.init_from` names below those that the recipe gives.

    With a preset the preset is the shape. Multi-token prediction is not taken over from a Hugging Face folder, whose
    files often have none: `model.mtp_layers` asks for it.

    Raises:
        ConfigError: the folder describes a model that ours cannot be, or nothing is there and the recipe has no shape.
    """
    model = tables.get("model", {})
    name = model.get("init_from", "")
    if not name or not isinstance(name, str) or model.get("preset"):
        return dict(tables)
    fields = _fields(Path(name))
    if fields is None and not {"num_layers", "hidden_size"} <= model.keys():
        raise ConfigError(
            f"model.init_from = '{name}' holds no model that can be read",
            evidence="It has neither a config.json that names a model_type nor a recipe.toml."
            if Path(name).is_dir()
            else "There is no such folder.",
            next_step="Give a Hugging Face folder, a run folder or a checkpoint.",
        )
    return {**tables, "model": _merge(fields or {}, model)}


def _fields(path: Path) -> dict[str, Any] | None:
    if is_hub_folder(path):
        fields = fields_of(read_config(path))
        fields.pop("mtp_layers", None)
        return fields
    try:
        recipe = tomllib.loads((path / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {name: value for name, value in recipe.get("model", {}).items() if name not in _OWN}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
