"""Turns a plain model on the meta device into this rank's stages and the engine that owns their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.config.parallel import ParallelConfig
from paceline.errors import ConfigError
from paceline.models.transformer import Transformer
from paceline.parallel.compile import compile_blocks
from paceline.parallel.engine import Engine
from paceline.parallel.flat import FlatEngine
from paceline.parallel.fsdp import FsdpEngine
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import Precision
from paceline.parallel.recompute import recompute
from paceline.parallel.shards import Shard


@dataclass(frozen=True, kw_only=True)
class Parallelized:
    """What `parallelize` gives. Still on the meta device: `Engine.materialize` comes next."""

    stages: tuple[Transformer, ...]
    """This rank's parts of the model, in the order of their use."""
    engine: Engine


def parallelize(
    model: Transformer, config: ParallelConfig, mesh: ParallelMesh, precision: str, device: torch.device
) -> Parallelized:
    """Applies the `[parallel]` section to a plain model on the meta device. The order matters.

    Args:
        precision: `train.precision`.
        device: where this rank computes.

    Raises:
        ConfigError: something asked for is not available.
    """
    _refuse_missing(config, precision)
    assert all(parameter.is_meta for parameter in model.parameters()), "build the model on the meta device"
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    stages = (model,)
    shards: dict[str, Shard] = {}
    for stage in stages:
        recompute(list(stage.blocks.values()), config.recompute)  # wraps blocks, so before compile
        if config.compile:
            compile_blocks(list(stage.blocks.values()))  # per block: one graph, reused for every layer
    # last: outermost hooks. At degree 1 too: it owns the precision policy
    engine = _data_parallel(stages, config, mesh, precision, device, shards, shapes)
    return Parallelized(stages=stages, engine=engine)


def _data_parallel(
    stages: Sequence[Transformer],
    config: ParallelConfig,
    mesh: ParallelMesh,
    precision: str,
    device: torch.device,
    shards: Mapping[str, Shard],
    shapes: Mapping[str, torch.Size],
) -> Engine:
    kind: Precision = "fp32" if precision == "fp32" else "bf16"
    engine = FlatEngine if config.engine == "flat" else FsdpEngine
    return engine(stages, config, mesh, kind, device, shards, shapes)


def _refuse_missing(config: ParallelConfig, precision: str) -> None:
    for axis in ("tp", "pp", "cp", "ep", "etp"):
        if getattr(config, axis) > 1:
            raise ConfigError(
                f"parallel.{axis} = {getattr(config, axis)} is not available in this version",
                evidence="Data parallelism is: parallel.dp_replicate, parallel.dp_shard and parallel.zero.",
                next_step=f"Set parallel.{axis} = 1; parallel.zero = 3 shards parameters where they do not fit.",
            )
    if precision not in ("fp32", "bf16"):
        raise ConfigError(
            f"train.precision = {precision!r} is not available in this version",
            next_step="Set train.precision = 'bf16'.",
        )
