"""The files beside the weights: tokenizer, chat template, generation settings, and the config that a model came with.

Checkpoints that were converted, and runs that began from other weights, keep them in their folder ``hub/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.hub import CONFIG, config_of, differences, is_hub_folder, model_of, read_config
from paceline.config.model import ModelConfig
from paceline.data.kept_tokenizer import MORE_TEMPLATES, TEMPLATE
from paceline.errors import ConfigError
from paceline.interop.block_fp8 import CONFIG_KEY

TOKENIZER = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
SETTINGS = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id")
OTHERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    SETTINGS,
)


def sidecars_in(*folders: Path) -> dict[str, Path]:
    """File name -> path of the files that go along with weights; the first folder that has one wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        for name in (*TOKENIZER, *OTHERS, CONFIG):
            if name not in found and (folder / name).is_file():
                found[name] = folder / name
        if found.get(TEMPLATE, folder / TEMPLATE).parent != folder:
            continue  # they go with the template beside them
        for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
            found.setdefault(f"{MORE_TEMPLATES}/{path.name}", path)
    return found


def read_sidecars(files: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in files.items()}


def hub_config(
    model: ModelConfig,
    *,
    template: Mapping[str, Any] | None,
    model_type: str = "",
    dtype: str = "",
    ignore_keys: Iterable[str] = (),
) -> dict[str, Any]:
    """The `config.json` of ``model``: the one it came with where that still describes it, otherwise a new one.

    Args:
        template: the config that the model came with.
        model_type: the family that is asked for; empty keeps the template's, or takes one that fits.
        dtype: of the weights, as `torch_dtype`.

    Raises:
        ConfigError: no family, or not the one that is asked for, has words for the model.
    """
    config = _from_template(model, template, model_type, ignore_keys) or _new(model, template, model_type)
    if dtype:
        key = "torch_dtype" if "torch_dtype" in config or "dtype" not in config else "dtype"
        config[key] = dtype
    return config


def _from_template(
    model: ModelConfig, template: Mapping[str, Any] | None, model_type: str, ignore_keys: Iterable[str]
) -> dict[str, Any] | None:
    if template is None or model_type not in ("", template.get("model_type")):
        return None
    # what we write is not quantized, whatever it was read from
    sized = {key: value for key, value in template.items() if key != CONFIG_KEY} | {"vocab_size": model.vocab_size}
    try:
        if not differences(model, model_of(sized, ignore_keys)):
            return sized
        # same family, another shape: its ids of special tokens still hold
        return _new(model, template, str(template["model_type"]))
    except ConfigError:
        return None


def _new(model: ModelConfig, template: Mapping[str, Any] | None, model_type: str) -> dict[str, Any]:
    """A config with the ids of special tokens that the template has. Without one they are null: a key that is not there
    means the ids of the family's first model."""
    unknown: Mapping[str, Any] = dict.fromkeys(IDS)
    ids = {key: value for key, value in (template or unknown).items() if re.fullmatch(r"(bos|eos|pad)_token_id", key)}
    return config_of(model, model_type) | ids


def with_ids(config: Mapping[str, Any], settings: bytes | None) -> dict[str, Any]:
    """``config``; where it gives all ids as null, those in the content of a `generation_config.json`."""
    if not says_nothing(config):
        return dict(config)
    try:
        said = json.loads(settings or b"{}")
    except ValueError:
        said = {}
    known = said if isinstance(said, dict) else {}
    return dict(config) | {key: known.get(key) for key in IDS}


def says_nothing(config: Mapping[str, Any]) -> bool:
    """Whether a config says of all ids of special tokens that they are not known."""
    return all(key in config and config[key] is None for key in IDS)


def read_template(files: Mapping[str, Path]) -> dict[str, Any] | None:
    """The hub config among sidecars, if there is one."""
    path = files.get(CONFIG)
    return read_config(path.parent) if path is not None and is_hub_folder(path.parent) else None


def tokenizer_size(files: Mapping[str, Path]) -> int | None:
    """Largest token id + 1 of a `tokenizer.json`; None where there is none that can be read."""
    path = files.get("tokenizer.json")
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens", ())]
        return max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
