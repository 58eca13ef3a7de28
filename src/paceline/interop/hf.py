"""A Hugging Face folder as a source of weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.pieces import Box
from paceline.config.hub import family_of, model_of, read_config
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError
from paceline.interop.block_fp8 import CONFIG_KEY, BlockFp8, block_sizes
from paceline.interop.hf_links import hf_links, unmeant
from paceline.interop.links import LinkedSource, LinkTable, RawSource, blocks
from paceline.interop.safetensors_files import SafetensorsFolder

log = logging.getLogger(__name__)

_COMPARED_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class HubFolder:
    """A folder whose tensors are exactly those that its config asks for."""

    path: Path
    config: dict[str, Any]
    model: ModelConfig
    weights: LinkedSource
    notes: tuple[str, ...]
    """What a person should know of it."""


def open_hub(
    path: Path, *, ignore_keys: Iterable[str] = (), model: ModelConfig | None = None, compare_copies: bool = True
) -> HubFolder:
    """Reads config and headers and checks every name and shape; reads no weights, but for a head that is said to be
    tied and stored all the same.

    Args:
        model: takes the place of what the config says; its shapes must be the folder's.
        compare_copies: read a head that is tied and stored all the same, to note where it is another one.

    Raises:
        ConfigError: the family is unknown, or the config says what our model cannot do.
        CheckpointError: a file is missing or damaged, or tensors are missing, unexpected or of another shape.
    """
    config = read_config(path)
    block = block_sizes(config)
    if block is None:
        _refuse_quantized(path, config, ignore_keys)
    family = family_of(config)
    raw: RawSource = SafetensorsFolder(path)
    notes = []
    if block is not None:
        raw = BlockFp8(raw, block)
        _refuse(path, raw.problems())
        notes.append("The weights are fp8 with a scale for each block; they are read as bf16.")
        config = {key: value for key, value in config.items() if key != CONFIG_KEY}
    described = model_of(config, ignore_keys)
    names = raw.shapes()
    if described.mtp_layers and f"model.layers.{described.num_layers}.eh_proj.weight" not in names:
        notes.append("The config speaks of multi-token prediction, the files have none: the model is read without it.")
        described = described.model_copy(update={"mtp_layers": 0})
    if model is not None and model.mtp_layers < described.mtp_layers:
        described = described.model_copy(update={"mtp_layers": model.mtp_layers})
    names_of_mtp = _mtp_names(raw, family.model_type, described)
    if names_of_mtp:
        notes.append(f"{len(names_of_mtp)} tensors of multi-token prediction are left out.")
    chosen = model or described
    if chosen.has_score and not described.has_score:
        # a language model that a reward model begins with: its score is not among the weights
        chosen = chosen.model_copy(update={"head": "vocabulary"})
    prefixed = _Prefixed(raw, family.model_type)
    table = hf_links(chosen, family.model_type)
    _account(path, table, prefixed, family.model_type, names_of_mtp)
    weights = LinkedSource(table, prefixed)
    notes += _stored_copies(table, prefixed, weights) if compare_copies else []
    return HubFolder(path=path, config=config, model=chosen, weights=weights, notes=tuple(notes))


_OUTSIDE = ("lm_head.weight", "score.weight")


class _Prefixed:
    """GPT-2's first files lack the prefix "transformer." that all later ones have."""

    def __init__(self, raw: RawSource, model_type: str) -> None:
        self._raw = raw
        names = raw.shapes()
        bare = model_type == "gpt2" and "wte.weight" in names
        self._their = {f"transformer.{name}" if bare and name not in _OUTSIDE else name: name for name in names}

    def shapes(self) -> dict[str, torch.Size]:
        shapes = self._raw.shapes()
        return {name: shapes[theirs] for name, theirs in self._their.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._raw.dtype(self._their[name])

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._raw.read(self._their[name], box)


def _refuse_quantized(path: Path, config: dict[str, Any], ignore_keys: Iterable[str]) -> None:
    quantized = config.get("quantization_config")
    if quantized and "quantization_config" not in set(ignore_keys):
        method = quantized.get("quant_method", "an unknown method") if isinstance(quantized, dict) else quantized
        raise CheckpointError(
            f"the weights in {path} are quantized ({method})",
            evidence="Quantized weights are not read: their values are not those that the model was trained to.",
            next_step="Take the bf16 release of the model, or save a dequantized copy first.",
        )


def _mtp_names(raw: RawSource, model_type: str, model: ModelConfig) -> set[str]:
    """Tensors of multi-token prediction beyond what ``model`` has."""
    if model_type != "deepseek_v3":
        return set()
    first = model.num_layers + model.mtp_layers
    layers = {name: name.split(".")[2] for name in raw.shapes() if name.startswith("model.layers.")}
    return {name for name, layer in layers.items() if layer.isdigit() and int(layer) >= first}


def _account(path: Path, table: LinkTable, raw: _Prefixed, model_type: str, left_out: set[str]) -> None:
    """Every tensor is one that is wanted, with its shape, and all that are wanted are there."""
    found, wanted = raw.shapes(), table.their_shapes()
    known = wanted.keys() | unmeant(found, model_type) | left_out
    problems = [f"missing: {name} {list(wanted[name])}" for name in wanted if name not in found.keys() | table.optional]
    problems += [f"unexpected: {name} {list(found[name])}" for name in found if name not in known]
    problems += [
        f"shape: {name} is {list(found[name])} there, {list(shape)} by the config"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    _refuse(path, problems)
    strange = sorted(
        {f"{raw.dtype(name)}" for name in wanted if name in found and not raw.dtype(name).is_floating_point}
    )
    if strange:
        raise CheckpointError(
            f"weights in {path} are stored as {', '.join(strange)}",
            evidence="They are quantized, or packed, in a way that the config does not tell.",
            next_step="Take the bf16 release of the model.",
        )


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        number = f"{len(problems)} difference{'s' * (len(problems) > 1)}"
        raise CheckpointError(
            f"the tensors in {path} are not those of its config: {number}",
            evidence=_listed(problems),
            next_step=_what_now(problems),
        )


def _listed(problems: Sequence[str], limit: int = 20) -> str:
    more = [f"... and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n  ".join([*problems[:limit], *more])


def _what_now(problems: Sequence[str]) -> str:
    if problems[0].startswith("missing: lm_head.weight"):
        return (
            "The config says that the head is not tied (tie_word_embeddings), yet there is none. If the model was "
            "trained tied, say so in config.json."
        )
    return "Take config.json and weights of one and the same model."


def _stored_copies(table: LinkTable, raw: _Prefixed, weights: LinkedSource) -> list[str]:
    """Tensors that are said to be the same as others, compared; one sentence for each that is not."""
    notes = []
    for theirs, ours in table.copies.items():
        if theirs not in raw.shapes():
            continue
        shape = table.shapes[ours]
        for box in blocks(shape, raw.dtype(theirs).itemsize, _COMPARED_BYTES):
            if not torch.equal(raw.read(theirs, box).float(), weights.read(ours, box).float()):
                notes.append(
                    f"{theirs} is stored with other values than {ours}, which the config says it is tied to: it is "
                    "not used. If they should differ, set tie_word_embeddings to false in config.json."
                )
                break
    return notes
