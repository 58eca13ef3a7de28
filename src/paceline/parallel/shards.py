"""Where does each tensor of this rank's model lie in the plain model, and who else computes gradients for it?

`tensor.py` and `expert/` make these as they cut parameters; engines and checkpoints read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from paceline.parallel.collectives import Axis


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One parameter of this rank's model."""

    whole: torch.Size
    """Its shape in the plain model."""
    offsets: tuple[int, ...]
    """Where the local tensor begins in it."""
    replicas: tuple[Axis, ...] = ()
    """Beside data parallelism, over which ranks the same part is held and gradients are to be summed: each rank of
    these axes has the gradient of what it computed itself."""
    expert: bool = False
    """Data parallelism is over `edp`, not over dp_replicate, dp_shard and cp."""
    saved: bool = True
    """False: another stage's copy goes into checkpoints, and this one is only loaded."""

    @classmethod
    def of_whole(cls, parameter: nn.Parameter | torch.Tensor) -> Shard:
        """A dense parameter that is here whole."""
        return cls(whole=parameter.shape, offsets=(0,) * parameter.dim())


def shard_of(name: str, parameter: torch.Tensor, shards: Mapping[str, Shard]) -> Shard:
    """The entry of ``name``; a parameter without one is whole and dense."""
    return shards.get(name) or Shard.of_whole(parameter)
