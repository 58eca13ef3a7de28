"""Batches of answers for tests: rows of packed documents, as the contract of `tasks/` has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.config.model import ModelConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.models.transformer import Transformer

TRL = Path(__file__).parent / "trl"
"""What TRL makes of one batch; `make_values.py` there says how it was written."""


class Text(NamedTuple):
    """One document."""

    prompt: Sequence[int]
    answer: Sequence[int]


def row(texts: Sequence[Text], length: int) -> Batch:
    """One row: the documents one after the other, labels on answers alone, and padding as a last document."""
    tokens, labels, positions, documents = ([0] * length, [IGNORE_INDEX] * length, [0] * length, [0] * length)
    start = 0
    for number, text in enumerate(texts):
        ids = [*text.prompt, *text.answer]
        for place, token in enumerate(ids):
            tokens[start + place], positions[start + place], documents[start + place] = token, place, number
        for place in range(len(text.prompt), len(ids)):
            labels[start + place - 1] = ids[place]
        start += len(ids)
    assert start <= length, f"{start} tokens do not fit in {length}"
    for place in range(start, length):
        positions[place], documents[place] = place - start, len(texts)
    columns = (torch.tensor([each]) for each in (tokens, labels, positions, documents))
    return Batch(**dict(zip(("tokens", "labels", "positions", "documents"), columns, strict=True)))


def rows(parts: Sequence[Batch], **fields: Any) -> Batch:
    """Rows of one length as one batch; ``fields``: lists of [D] by name."""
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return Batch(
        **joined, fields={name: torch.stack([torch.tensor(v) for v in value]) for name, value in fields.items()}
    )


_COLUMNS = ("tokens", "labels", "positions", "documents")


def pair_texts(pairs: Sequence[dict[str, Any]]) -> list[Text]:
    """Chosen and rejected in turn."""
    return [Text(pair["prompt"], pair[which]) for pair in pairs for which in ("chosen", "rejected")]


def trl_batch() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TRL / "batch.json").read_text())
    return found


def trl_values() -> dict[str, Tensor]:
    return load_file(TRL / "values.safetensors")


def trl_model(which: str, **changes: Any) -> Transformer:
    """One of the models that TRL's values are of: ``policy``, ``reference`` or ``score``."""
    sizes = json.loads((TRL / "config.json").read_text())
    config = ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        ffn_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        max_seq_len=sizes["max_position_embeddings"],
        norm_eps=1e-6,
        head="score" if which == "score" else "vocabulary",
        **changes,
    )
    model = Transformer(config)
    model.reset_buffers()
    saved = {our_name(n.removeprefix(f"{which}/")): v for n, v in trl_values().items() if n.startswith(f"{which}/")}
    missing, unexpected = model.load_state_dict(saved, strict=False)
    assert not unexpected and not any("weight" in name for name in missing), (missing, unexpected)
    return model


def our_name(name: str) -> str:
    """Of a Llama's weight."""
    for theirs, ours in (
        ("model.layers.", "blocks."),
        ("model.embed_tokens", "embed"),
        ("model.norm", "norm"),
        ("lm_head", "head"),
        ("self_attn", "attention"),
        ("mlp", "feed_forward"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "feed_forward_norm"),
    ):
        name = name.replace(theirs, ours)
    return name
