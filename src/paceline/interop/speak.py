"""A Hugging Face folder as a model that can speak."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.weights import fill
from paceline.config.run import RunConfig
from paceline.data.tokenizer import HFTokenizer, Tokenizer, load_tokenizer
from paceline.generate.load import (
    Speaker,
    Spread,
    empty_model,
    refuse_tokenizer,
    speaking_dtype,
    stay_whole,
    tokenizer_of,
)
from paceline.interop.peft import merge, read_adapter
from paceline.interop.sidecars import SETTINGS
from paceline.interop.sources import Opened, open_source


def load_hub_speaker(
    path: Path,
    *,
    device: torch.device,
    tokenizer: str = "",
    adapter: Path | None = None,
    spread: Spread = stay_whole,
) -> Speaker:
    """Builds the model of a folder, and the tokenizer that lies in it; spread over ranks, each reads its own part.

    A PEFT ``adapter`` is merged into what is read, of a folder or of a checkpoint of ours. A text ends at a token
    that `generation_config.json` or `config.json` names.

    Raises:
        CheckpointError, ConfigError: the folder cannot be read as a model of ours.
        DataError: there is no tokenizer in it.
    """
    opened = open_source(path)
    if adapter is not None:
        opened = merge(opened, read_adapter(adapter))
    found = load_tokenizer(tokenizer or _tokenizer_of(opened))
    refuse_tokenizer(found, opened.model.vocab_size)
    ends: tuple[int, ...] = ()
    if not tokenizer:
        ends = _ends_of(opened, found.vocab_size)
        found.eod_id = ends[0] if ends else found.eod_id
    model, into = empty_model(opened.model, device=device, dtype=speaking_dtype(device), spread=spread)
    fill(opened.weights, into)
    config = opened.recipe or RunConfig(model=opened.model)
    checkpoint = find_checkpoint(path) if opened.format == "paceline" else None
    return Speaker(
        model=model.eval(),
        tokenizer=found,
        config=config,
        checkpoint=checkpoint,
        ends=ends,
        begins=_begins(opened, found),
    )


def _begins(opened: Opened, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer itself puts before a text, as Transformers has it do; a run of ours was trained without."""
    if opened.format != "hf" or not isinstance(tokenizer, HFTokenizer):
        return ()
    plain = tokenizer.encode("a")
    whole = [int(token) for token in tokenizer.backend.encode("a", add_special_tokens=True).ids]
    before = whole.index(plain[0]) if plain and plain[0] in whole else 0
    return tuple(whole[:before])


def _tokenizer_of(opened: Opened) -> str:
    if opened.format == "hf":
        return str(opened.path)
    assert opened.recipe is not None, "a checkpoint of ours holds its recipe"
    return tokenizer_of(find_checkpoint(opened.path), opened.recipe)


def _ends_of(opened: Opened, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text, as `generation_config.json` or else `config.json` says."""
    settings = opened.sidecars.get(SETTINGS)
    try:
        said = None if settings is None else json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        said = None
    said = (opened.template or {}).get("eos_token_id") if said is None else said
    ids = said if isinstance(said, list) else [said]
    return tuple(one for one in ids if isinstance(one, int) and 0 <= one < vocab_size)
