"""A run with adapters: the weights that they belong to, and how they begin."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from paceline.checkpoint.adapters import BaseReference, drawn_from, fingerprint, refuse_other_base
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.store import Checkpoint
from paceline.checkpoint.weights import WeightSource, fill
from paceline.config.lora import SCORE, is_adapter
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.costs.adapters import count_learned
from paceline.costs.layers import count_parameters
from paceline.errors import CheckpointError
from paceline.parallel.collectives import all_reduce
from paceline.report import units
from paceline.training.foreign import load_initial
from paceline.training.setup import Parts

log = logging.getLogger(__name__)


def load_base(
    parts: Parts, registry: Registry, run_folder: Path, ranks: Ranks, checkpoint: Checkpoint | None
) -> BaseReference:
    """Fills the frozen weights from `model.init_from`, also where a run goes on: checkpoints hold none. Collective.

    Args:
        checkpoint: where the run goes on from; its adapters have to belong to these weights.

    Raises:
        CheckpointError: the weights are not there, not of this model, or not those of the checkpoint's adapters.
    """
    source = parts.config.model.init_from
    found = drawn_from(parts.config.run.seed)
    if source:
        weights = load_initial(parts, registry, run_folder, ranks)
        log.info("frozen weights from %s", source)
        print_ = ranks.from_first(f"looking at {source}", lambda: fingerprint(weights))
        found = BaseReference(source=source, fingerprint=print_)
    if checkpoint is not None:
        ranks.from_first(
            f"looking at {checkpoint.folder}",
            lambda: refuse_other_base(
                BaseReference.from_extra(checkpoint.state().extra), found, str(checkpoint.folder)
            ),
        )
    return found


def adapter_facts(config: RunConfig) -> dict[str, str]:
    """What is told at the start: how many parameters learn; nothing without adapters."""
    lora = config.lora
    if not lora.on:
        return {}
    learned, total = count_learned(config), count_parameters(config.model).total
    kind = "DoRA" if lora.dora else "LoRA"
    kept = {"bf16": "", "fp8": ", the base in fp8", "nf4": ", the base in NF4"}[lora.base]
    text = f"{kind}, rank {lora.rank}: {learned:,} parameters learn beside {units.count(total)} frozen ones{kept}"
    return {"adapters": text}


def begin_adapters(parts: Parts, registry: Registry, ranks: Ranks) -> None:
    """What new adapters take from the weights (DoRA's lengths of rows), and `lora.init_adapter`. Collective.

    Raises:
        CheckpointError: the adapter cannot be read, or is not one of this recipe.
    """
    lora = parts.config.lora
    if lora.dora:
        set_magnitudes(parts)
    if lora.init_adapter:
        # a rank that fails alone would leave the others waiting
        ranks.gather(f"reading {lora.init_adapter}", lambda: _fill(_adapter(parts, registry), parts))
        log.info("adapters from %s; optimizer, schedule and data start anew", lora.init_adapter)
    parts.engine.publish_weights()


def _fill(adapter: WeightSource, parts: Parts) -> None:
    """A score that the adapter has not stays as the weights have it."""
    has_score = SCORE in adapter.shapes()
    values = parts.engine.weights().items()
    fill(adapter, {name: value for name, value in values if is_adapter(name) or (name == SCORE and has_score)})


def _adapter(parts: Parts, registry: Registry) -> WeightSource:
    path, config = Path(parts.config.lora.init_adapter), parts.config
    for factory in registry.adapter_sources:
        found: WeightSource | None = factory(path, config.model, config.lora)
        if found is not None:
            return found
    raise CheckpointError(
        f"lora.init_adapter = {str(path)!r} is no adapter",
        evidence="A PEFT folder has adapter_config.json, a run of ours checkpoints with adapters.",
        next_step="Look at the path.",
    )


@torch.no_grad()
def set_magnitudes(parts: Parts) -> None:
    """DoRA begins with the lengths of the rows of the frozen matrices. Collective."""
    values, axis = parts.engine.weights(), parts.mesh["tp"]
    for name, magnitude in values.items():
        weight = values.get(name.removesuffix("lora_magnitude") + "weight")
        if not name.endswith(".lora_magnitude") or weight is None or not weight.pieces:
            continue
        # a frozen matrix is one piece: all that this rank has of it
        (piece,) = weight.pieces
        wide = torch.promote_types(piece.tensor.dtype, torch.float32)
        squares = torch.linalg.vector_norm(piece.tensor.to(parts.device), dim=1, dtype=wide).square()
        if piece.tensor.shape[1] < weight.global_shape[1]:
            all_reduce(squares, axis, "tp/magnitudes")
        for part in magnitude.pieces:
            start = part.offsets[0] - piece.offsets[0]
            part.tensor.copy_(squares[start : start + len(part.tensor)].sqrt())
