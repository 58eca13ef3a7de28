"""What a checkpoint of a run holds, and how a run takes it up again."""

from __future__ import annotations

import logging

import torch

from paceline.checkpoint.adapters import BASE, BaseReference
from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.state import TrainState, restore_rng
from paceline.checkpoint.store import Checkpoint, Contents
from paceline.config.load import dump_recipe
from paceline.data.build import Datasets
from paceline.runtime.device import versions
from paceline.runtime.log import log_once
from paceline.runtime.seed import rng_state
from paceline.training.setup import Parts
from paceline.training.trainer import Progress

log = logging.getLogger(__name__)


class RunSaver:
    """Hands the state of a run to the checkpoint manager."""

    def __init__(
        self, parts: Parts, manager: CheckpointManager, datasets: Datasets, base: BaseReference | None = None
    ) -> None:
        """``base``: with adapters, the weights that they belong to."""
        self.base = base
        self.parts = parts
        self.manager = manager
        self.datasets = datasets

    def prepare(self) -> None:
        """Makes ready for the first checkpoint that is written while training goes on. Collective."""
        config = self.parts.config
        if config.train.steps >= config.checkpoint.interval:
            self.manager.prepare(values(self.parts))

    def save(self, progress: Progress, *, wait: bool = False) -> None:
        """Starts to write a checkpoint; returns when weights and moments may change again.

        Raises:
            CheckpointError: this one, or the one before it in the background, could not be written.
        """
        parts = self.parts
        updates = parts.optimizer.step_count
        progress.skipped_steps = progress.step - updates
        state = TrainState(
            step=progress.step,
            tokens=progress.tokens,
            consumed_samples=progress.consumed_samples,
            skipped_steps=progress.skipped_steps,
            schedule=parts.config.optim.model_dump(mode="json") | {"total_steps": parts.config.train.steps},
            data=parts.config.data.model_dump(mode="json", include={"train", "split", "tokenizer", "order"}),
            sample_order={"train": self.datasets.train.identity},
            world_size=parts.info.world_size,
            versions=versions(),
            extra={"optimizer_updates": updates} | ({} if self.base is None else {BASE: self.base.as_json()}),
        )
        contents = Contents(
            values=values(parts), state=state, recipe=dump_recipe(parts.config), rng=rng_state(parts.device)
        )
        self.manager.save(contents, wait=wait)


_SCALES = "fp8/"


def values(parts: Parts) -> dict[str, ShardedValue]:
    """All tensors of a run, under the names that checkpoints use; with adapters, those that learn."""
    learned = parts.config.lora.learns if parts.config.lora.on else lambda name: True
    model = {f"model/{name}": value for name, value in parts.engine.weights().items() if learned(name)}
    optimizer = {f"optim/{name}": value for name, value in parts.optimizer.state().items()}
    return model | optimizer | {f"{_SCALES}{name}": value for name, value in parts.scales.values().items()}


def restore(parts: Parts, manager: CheckpointManager, checkpoint: Checkpoint) -> None:
    """Fills weights, moments and generators from a checkpoint, whatever layout wrote it. Collective.

    Raises:
        CheckpointError: names or shapes differ, or a file cannot be read.
    """
    into = _without_unknown_scales(values(parts), manager, checkpoint)
    manager.load(checkpoint, into, ignore=(_SCALES,))
    parts.optimizer.load_state(
        {name.removeprefix("optim/"): value for name, value in into.items() if name.startswith("optim/")}
    )
    parts.scales.refresh()
    state = checkpoint.state()
    parts.optimizer.set_step_count(int(state.extra.get("optimizer_updates", state.step)))
    parts.engine.publish_weights()
    info = parts.info
    restore_rng(
        checkpoint.rng(info.rank, info.world_size),
        device=parts.device,
        seed=parts.config.run.seed,
        step=state.step,
        rank=info.rank,
    )


def _without_unknown_scales(
    into: dict[str, ShardedValue], manager: CheckpointManager, checkpoint: Checkpoint
) -> dict[str, ShardedValue]:
    """A run may begin to scale by earlier steps, or put other linears into fp8 (another layout): what the checkpoint
    does not know begins anew."""
    saved: dict[str, torch.Size] = manager.ranks.from_first(
        f"reading the names in {checkpoint.folder}",
        lambda: {name: entry.size for name, entry in checkpoint.tensors().items() if name.startswith(_SCALES)},
    )
    unknown = [
        name for name, value in into.items() if name.startswith(_SCALES) and saved.get(name) != value.global_shape
    ]
    if unknown:
        text = "%s has no largest numbers of earlier steps for %d fp8 products (%s): they begin with their own scales"
        log_once(log, logging.WARNING, text, checkpoint.folder, len(unknown), unknown[0].removeprefix(_SCALES))
    return {name: value for name, value in into.items() if name not in unknown}
