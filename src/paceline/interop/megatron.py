"""A Megatron-LM `torch_dist` checkpoint as a source of weights, whatever layout wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.chunks import ChunkReader
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError
from paceline.interop.links import LinkedSource, LinkTable
from paceline.interop.megatron_config import model_of
from paceline.interop.megatron_files import iteration_folder, read_common, read_metadata
from paceline.interop.megatron_links import Names, megatron_links

_MODEL = ("decoder.", "embedding.", "output_layer.")
_EMBEDDING = "embedding.word_embeddings.weight"
_PADDED = (_EMBEDDING, "output_layer.weight")


class MegatronFolder:
    """What one iteration holds.

    Raises:
        CheckpointError: it is not torch_dist, not whole, or its tensors are not those of the model.
        ConfigError: its arguments ask for what our model cannot do.
    """

    def __init__(self, path: Path, like: ModelConfig | None = None) -> None:
        self.path = iteration_folder(path)
        common = read_common(self.path)
        reader = ChunkReader(self.path, read_metadata(self.path))
        shapes = reader.shapes()
        if _EMBEDDING not in shapes:
            raise CheckpointError(
                f"{self.path} has no {_EMBEDDING}",
                evidence=f"It has {', '.join(sorted(shapes)[:4])} ...",
                next_step="Models with that embedding are read: GPT-like decoders.",
            )
        self.step = int(common.get("iteration") or 0)
        self.model = self._model(common, shapes[_EMBEDDING][0], like)
        self.notes = tuple(_notes(shapes, self.model))
        self.model = self.model.model_copy(update={"mtp_layers": 0})
        table = megatron_links(self.model, Names(shapes))
        _account(self.path, table, shapes)
        self.weights = LinkedSource(table, reader)

    def _model(self, common: Mapping[str, Any], rows: int, like: ModelConfig | None) -> ModelConfig:
        if like is not None:
            if like.vocab_size > rows:
                raise CheckpointError(
                    f"{self.path} has {rows} rows of vocabulary, the model that it is likened to {like.vocab_size}",
                    next_step="Give the folder of the right model to --like.",
                )
            return like
        args = common.get("args")
        if args is None:
            raise CheckpointError(
                f"{self.path} does not say what model it is: its common.pt has no args",
                evidence="Megatron-LM's own training writes them; Megatron Bridge and NeMo keep them elsewhere.",
                next_step="Name a model of the same shape: `paceline convert ... --like FOLDER`, a Hugging Face folder "
                "or a run.",
            )
        return model_of(vars(args), rows)


def _notes(shapes: Mapping[str, torch.Size], model: ModelConfig) -> list[str]:
    others = Counter(name.split(".")[0] for name in shapes if not name.startswith(_MODEL))
    rows = shapes[_EMBEDDING][0]
    notes = []
    if mtp := others.pop("mtp", 0):
        notes.append(f"{mtp} tensors of multi-token prediction are left out.")
    if number := sum(others.values()):
        notes.append(f"{number} tensors that are no weights ({', '.join(sorted(others)[:3])}) are left out.")
    if rows == model.vocab_size and rows % 128 == 0:
        notes.append(f"The vocabulary has {rows} rows, perhaps padded: --vocab-size N keeps the first N.")
    elif rows > model.vocab_size:
        notes.append(f"{rows - model.vocab_size} rows that pad the vocabulary are left out.")
    return notes


def _account(path: Path, table: LinkTable, found: Mapping[str, torch.Size]) -> None:
    wanted = table.their_shapes()
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    problems += [
        f"unexpected: {name} {list(shape)}"
        for name, shape in found.items()
        if name.startswith(_MODEL) and name not in wanted
    ]
    for name, shape in wanted.items():
        there = found.get(name, shape)
        padded = name in _PADDED and there[0] >= shape[0] and there[1:] == shape[1:]
        if there != shape and not padded:
            problems.append(f"shape: {name} is {list(there)} there, {list(shape)} by its arguments")
    if problems:
        more = [f"... and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise CheckpointError(
            f"the tensors in {path} are not those of its arguments: {len(problems)} differences",
            evidence="\n  ".join([*problems[:20], *more]),
            next_step="Describe the model with --like FOLDER, a Hugging Face folder or a run of the same shape.",
        )
