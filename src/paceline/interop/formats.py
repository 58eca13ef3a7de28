"""What of other programs a training run can begin with and write: registered with it as plugins are."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from paceline.checkpoint.weights import ForeignWeights
from paceline.config.hub import is_hub_folder
from paceline.config.model import ModelConfig
from paceline.config.plugins import Registry
from paceline.interop.hf import open_hub
from paceline.interop.hf_export import export_hub
from paceline.interop.sidecars import sidecars_in

log = logging.getLogger(__name__)


def register(registry: Registry) -> None:
    """Adds all formats."""
    registry.weight_source(_hub_weights)
    registry.export("hf", export_hub)


def _hub_weights(path: Path, model: ModelConfig) -> ForeignWeights | None:
    if not is_hub_folder(path):
        return None
    # what a person should know is found out once, and told once
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    hub = open_hub(path, model=model, compare_copies=is_first)
    for note in hub.notes if is_first else ():
        log.warning("%s: %s", path, note)
    return ForeignWeights(weights=hub.weights, files=sidecars_in(path))
