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
    files often have none: `model.mtp_layers` asks for it. Where the weights are gone, and the run that began with them
    has a checkpoint to go on from, the shape is that of the run's own recipe.

    Raises:
        ConfigError: the folder describes a model that ours cannot be, or nothing is there and the recipe has no shape.
    """
    model = tables.get("model", {})
    name = model.get("init_from", "")
    if not name or not isinstance(name, str) or model.get("preset"):
        return dict(tables)
    fields = _fields(Path(name)) or _fields_of_run(tables, name)
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
    model = _recipe_model(path)
    return None if model is None else _without_origin(model)


def _fields_of_run(tables: Mapping[str, Any], init_from: str) -> dict[str, Any] | None:
    """The fields of the model in the run folder, if the run there began from ``init_from`` and will be gone on with."""
    run, resume = tables.get("run", {}), tables.get("checkpoint", {}).get("resume", "auto")
    folder = Path(str(run.get("dir") or f"runs/{run.get('name', 'run')}"))
    if resume == "never" or not any(folder.glob("checkpoints/step_*/manifest.json")):
        return None
    model = _recipe_model(folder) or {}
    if model.get("init_from") != init_from:
        return None
    return _without_origin(model)


def _without_origin(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in _OWN}


def _recipe_model(folder: Path) -> dict[str, Any] | None:
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return dict(recipe.get("model", {}))


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
