"""A Hugging Face folder as a model that can speak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from paceline.config.run import RunConfig
from paceline.data.tokenizer import Tokenizer, load_tokenizer
from paceline.generate.load import Speaker, refuse_tokenizer, speaking_dtype
from paceline.interop.compare import plain_model
from paceline.interop.sources import open_source


def load_hub_speaker(path: Path, *, device: torch.device, tokenizer: str = "") -> Speaker:
    """Builds the model of a folder on one device, and the tokenizer that lies in it.

    A text ends at the token that `generation_config.json` or `config.json` names; of several, at the first.

    Raises:
        CheckpointError, ConfigError: the folder cannot be read as a model of ours.
        DataError: there is no tokenizer in it.
    """
    opened = open_source(path)
    found = load_tokenizer(tokenizer or path)
    refuse_tokenizer(found, opened.model.vocab_size)
    if not tokenizer:
        _end_as_the_folder_says(found, path, opened.template or {})
    model = plain_model(opened, speaking_dtype(device), device)
    return Speaker(model=model, tokenizer=found, config=RunConfig(model=opened.model))


def _end_as_the_folder_says(tokenizer: Tokenizer, path: Path, config: dict[str, Any]) -> None:
    settings = path / "generation_config.json"
    try:
        said = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        said = None
    said = config.get("eos_token_id") if said is None else said
    first = said[0] if isinstance(said, list) and said else said
    if isinstance(first, int) and 0 <= first < tokenizer.vocab_size:
        tokenizer.eod_id = first
