"""A Hugging Face `config.json` as fields of `[model]`, and back.

Every key is accounted for: it becomes a field, has no influence on what the network computes, or is refused with its
name, its value and the reason. The way back is proved by reading what was written.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config.hub_families import EVERYWHERE, FAMILIES, REQUIRED, HubFamily, Key, keys
from paceline.config.hub_rules import UnsayableError, same_scaling
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError, ConfigError

CONFIG = "config.json"
_CLASSIFIER, _LANGUAGE_MODEL = "ForSequenceClassification", "ForCausalLM"

TRAINING_ONLY = keys(
    """preset init_from dropout attention_dropout init_std scaled_residual_init mtp_loss_coef mtp_layers
    moe.aux_loss_coef moe.z_loss_coef moe.bias_update_rate moe.jitter moe.expert_dropout moe.router_precision"""
)
"""Fields that do not change what a trained network says; a hub config need not have words for them."""


def is_hub_folder(path: str | Path) -> bool:
    """Whether there is a `config.json` that names a model type."""
    try:
        content = json.loads((Path(path) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        CheckpointError: it is not there or not JSON.
    """
    file = folder / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no {CONFIG} in {folder}", next_step="Give the folder that a model was downloaded or saved to."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read", evidence=str(error), next_step="Download or save that file again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is no table of keys", next_step="Download or save that file again.")
    return content


def family_of(config: Mapping[str, Any]) -> HubFamily:
    """The family that `model_type` names.

    Raises:
        ConfigError: it is not one of ours.
    """
    name = config.get("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    raise ConfigError(
        f"model_type = {name!r} is not a family that can be read",
        evidence=f"Known: {', '.join(FAMILIES)}.",
        next_step="A model whose weights have the names of one of these may say so in its config.json.",
    )


def fields_of(config: Mapping[str, Any], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The `[model]` fields, nested, that say what a hub config says.

    Args:
        ignore: keys that the user wants left out of account.

    Raises:
        ConfigError: the family is unknown, a key is missing, or keys say what our model cannot do; all are listed.
    """
    family = family_of(config)
    config = {key: value for key, value in config.items() if key not in set(ignore)}
    problems = _refused(family, config)
    fields: dict[str, Any] = dict(family.fixed)
    if _is_classifier(config):
        fields["head"] = "score"
        problems += _too_many_labels(config)
    for key in family.keys:
        value = _value(key, config)
        if value is REQUIRED:
            problems.append(f"{key.hub} is missing")
        else:
            fields[key.ours] = value
    if not problems:
        for rule in family.rules:
            try:
                fields.update(rule.read(config))
            except UnsayableError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(
            f"this {family.model_type} model cannot be built: {problems[0]}",
            evidence="\n  ".join(problems[1:]),
            next_step="What is refused would change the model's output if it were left out. A key that is known to "
            "have no effect can be passed over: `paceline convert ... --ignore-key NAME`.",
        )
    return nested(fields)


def _is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the weights have a row for each label in place of a head: of one label, a reward model."""
    return any(str(name).endswith(_CLASSIFIER) for name in config.get("architectures") or ())


def _too_many_labels(config: Mapping[str, Any]) -> list[str]:
    # what Transformers takes where the config says nothing
    number = config.get("num_labels") or len(config.get("id2label") or ()) or 2
    return [] if number == 1 else [f"num_labels = {number}: ours computes one score"]


def _value(key: Key, config: Mapping[str, Any]) -> Any:
    for name in filter(None, (key.hub, key.also)):
        if config.get(name) is not None:
            return config[name]
    return key.default


def _refused(family: HubFamily, config: Mapping[str, Any]) -> list[str]:
    problems = []
    known = EVERYWHERE | family.ignored | family.must.keys()
    known |= {name for key in family.keys for name in (key.hub, key.also)}
    known |= {name for rule in family.rules for name in rule.keys}
    for name, values in family.must.items():
        value = config.get(name)
        if value is not None and value not in values:
            problems.append(f"{name} = {value!r}: ours computes {' or '.join(map(repr, values))} only")
    for name, value in config.items():
        if name not in known and value not in (None, False, [], {}, ""):
            problems.append(f"{name} = {value!r}: not a key that is known for {family.model_type}")
    return problems


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``{"moe.ffn_size": 8}`` -> ``{"moe": {"ffn_size": 8}}``."""
    result: dict[str, Any] = {}
    for dotted, value in fields.items():
        *path, name = dotted.split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return result


def model_of(config: Mapping[str, Any], ignore: Iterable[str] = ()) -> ModelConfig:
    """The model that a hub config describes. Errors as in ``fields_of``, and of a shape that cannot be built."""
    fields = fields_of(config, ignore)
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as error:
        for detail in error.errors():
            cause = detail.get("ctx", {}).get("error")
            if isinstance(cause, ConfigError):
                raise cause from None
        detail = error.errors()[0]
        place = ".".join(map(str, detail["loc"]))
        raise ConfigError(
            f"the config's model.{place} = {detail['input']!r} is not usable",
            evidence=detail["msg"],
            next_step=f"Look at the {CONFIG} of the model.",
        ) from None


# ---- the way back


def config_of(model: ModelConfig, model_type: str = "") -> dict[str, Any]:
    """A hub config that says what ``model`` is.

    Args:
        model_type: the family; empty takes the first that can say it.

    Raises:
        ConfigError: the family has no words for some fields, which are listed; or no family has.
    """
    if model_type and model_type not in FAMILIES:
        family_of({"model_type": model_type})
    names = [model_type] if model_type else list(FAMILIES)
    unsaid: dict[str, list[str]] = {}
    for name in names:
        config = _write(FAMILIES[name], model)
        try:
            unsaid[name] = differences(model, model_of(config))
        except ConfigError as error:
            # what was written cannot even be read: no near miss, unless it is the one family that was asked for
            if model_type or not unsaid:
                unsaid[name] = [error.subject] * len(ModelConfig.model_fields)
            continue
        if not unsaid[name]:
            return config
    best = min(unsaid, key=lambda name: len(unsaid[name]))
    raise ConfigError(
        f"no config of {'the family ' + model_type if model_type else 'any known family'} can say what this model is",
        evidence=f"Nearest is {best}, which has no words for {'; '.join(dict.fromkeys(unsaid[best]))}.",
        next_step="Keep it as a Paceline checkpoint, or train a shape that a family has (`paceline train --presets`).",
    )


def _write(family: HubFamily, model: ModelConfig) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    if model.has_score:
        name = family.architecture.removesuffix(_LANGUAGE_MODEL).removesuffix("LMHeadModel") + _CLASSIFIER
        config |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    for key in family.keys:
        value: Any = model
        for part in (key.said_by or key.ours).split("."):
            value = getattr(value, part)
        config[key.hub] = value
    config.update({name: values[0] for name, values in family.must.items() if name not in config})
    for rule in family.rules:
        config.update(rule.write(model))
    if model.attention == "mla":
        config["q_lora_rank"] = model.q_lora_rank or None
    return config | {"initializer_range": model.init_std, "use_cache": True}


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Fields, with their values in ``one``, in which two models compute something else."""
    first, second = _essence(one), _essence(other)
    names = [name for name in first if first[name] != second.get(name)]
    names += [] if same_scaling(one.rope_scaling, other.rope_scaling) or not one.rotary_dim else ["rope_scaling"]
    return [f"model.{name} = {first[name]!r}" if name in first else f"model.{name}" for name in names]


def _essence(model: ModelConfig) -> dict[str, Any]:
    """Dotted fields that decide what the network computes, zeros filled in, meaningless ones left out."""
    flat: dict[str, Any] = {}
    for name, value in model.model_dump().items():
        if name == "moe":
            flat |= {f"moe.{key}": entry for key, entry in value.items()}
        elif name != "rope_scaling":
            flat[name] = value
    flat |= {"num_kv_heads": model.kv_heads, "head_dim": model.qk_head_dim, "ffn_size": model.dense_ffn_size}
    moe = model.moe
    flat["moe.ffn_size"] = model.expert_ffn_size
    flat["moe.num_shared_experts"] = moe.num_shared_experts * (moe.shared_ffn_size or model.expert_ffn_size)
    leave_out = set(TRAINING_ONLY) | {"moe.shared_ffn_size"}
    if not model.is_moe:
        leave_out |= {name for name in flat if name.startswith("moe.")} | {"top_k"}
    else:
        leave_out |= {"moe.layer_period", "moe.layer_offset", "moe.first_dense_layers"}
        flat["moe.layers"] = [block.index for block in model.blocks() if block.is_moe]
        if len(flat["moe.layers"]) == model.num_layers:
            leave_out.add("ffn_size")
    if moe.num_groups == 1:
        leave_out |= {"moe.top_k_groups", "moe.group_score"}
    if not moe.capacity_factor:
        leave_out.add("moe.eval_capacity_factor")
    if model.attention == "mla":
        leave_out |= {"num_kv_heads", "head_dim"}
    if not model.sliding_window:
        leave_out.add("sliding_window_period")
    if not model.rotary_dim:
        leave_out |= {"rope_theta", "rope_fraction"}
    return {name: value for name, value in flat.items() if name not in leave_out}
