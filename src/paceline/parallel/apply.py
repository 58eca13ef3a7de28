"""Turns a plain model on the meta device into this rank's stages and the engine that owns their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.config.lora import BaseFormat
from paceline.config.parallel import ParallelConfig, RecomputeMode
from paceline.models.transformer import Transformer
from paceline.parallel.accumulate import accumulate_products
from paceline.parallel.adapters import join_adapters
from paceline.parallel.compile import compile_blocks
from paceline.parallel.context import shard_sequence
from paceline.parallel.delayed_scales import DelayedScales
from paceline.parallel.engine import Engine
from paceline.parallel.expert.fuse import fuse_experts, put_experts_in_fp8
from paceline.parallel.expert.shard import gather_tokens, shard_experts
from paceline.parallel.flat import FlatEngine
from paceline.parallel.frozen import FrozenBase, keep_in_nf4
from paceline.parallel.fsdp import FsdpEngine
from paceline.parallel.low_precision import Fp8Options, Fp8Weights, JoinedLinears, use_fp8
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import Precision
from paceline.parallel.recompute import recompute
from paceline.parallel.sequence import SequenceLayout
from paceline.parallel.shards import Shard
from paceline.parallel.stages import split_into_stages, tied_shards
from paceline.parallel.tensor import shard_tensors


@dataclass(frozen=True, kw_only=True)
class Parallelized:
    """What `parallelize` gives. Still on the meta device: `Engine.materialize` comes next."""

    stages: tuple[Transformer, ...]
    """This rank's parts of the model, in the order of their use."""
    engine: Engine
    base: FrozenBase
    """To be settled once the weights have come."""
    scales: DelayedScales
    """To be advanced after each update."""


def parallelize(
    model: Transformer,
    config: ParallelConfig,
    mesh: ParallelMesh,
    precision: str,
    device: torch.device,
    *,
    cut: Sequence[range] | None = None,
    fp8: Fp8Options | None = None,
    widen_gradients: bool = True,
    base_in: BaseFormat = "bf16",
) -> Parallelized:
    """Applies the `[parallel]` section to a plain model on the meta device. The order matters. Collective.

    Args:
        precision: `train.precision`.
        device: where this rank computes.
        cut: the blocks of every pipeline stage; None = all of them in one.
        widen_gradients: the flat engine's; False if the optimizer reads gradients in `accumulate_dtype`.
        fp8: how, where the precision is fp8; None = `Fp8Options`' defaults.
        base_in: `lora.base`, of a model with adapters.
    """
    assert all(parameter.is_meta for parameter in model.parameters()), "build the model on the meta device"
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    layout = SequenceLayout(size=mesh.size("cp"), method=config.cp_method)
    # first: later steps need only look at what this rank owns
    stages = split_into_stages(model, config, mesh, cut or (range(len(model.blocks)),))
    shards: dict[str, Shard] = {}
    fp8_weights, base = Fp8Weights(), FrozenBase()
    options = fp8 or Fp8Options()
    scales = DelayedScales(options.history)
    if base_in == "fp8":
        base.keep_fp8(fp8_weights)
    passing: list[nn.Linear] = []
    joined: list[JoinedLinears] = []
    for stage in stages:
        shards |= shard_tensors(stage, mesh)  # before data parallelism, which shards what this leaves
        shards |= shard_experts(stage, mesh, layout)
        shard_sequence(stage, mesh, config.cp_method)
        if config.expert_kernels != "plain":
            fuse_experts(stage, config.expert_kernels, precision, device)
            if config.expert_dispatch == "all_gather":
                gather_tokens(stage, mesh)
        products: list[JoinedLinears] = []
        in_fp8: list[nn.Linear] = []
        if precision == "fp8":  # inside what recomputes
            flat, carried = config.engine == "flat", scales if options.history else None
            products = use_fp8(stage, options, fp8_weights, cached=flat, axis=mesh["tp"], scales=carried)
            in_fp8 = [linear for product in products for linear in product.linears]
            joined += products if config.adds_weight_gradients else []
            passing += in_fp8 if flat and options.cached and options.only else []
            if options.experts:
                put_experts_in_fp8(stage, options, fp8_weights, cached=flat)
        if config.adds_weight_gradients:
            # last of all that changes layers: takes what is plain, or replaced by tp, whose products know places
            accumulate_products(list(stage.blocks.values()), replaced=mesh.size("tp") > 1, but=in_fp8)
        if base_in == "nf4":
            base.add(keep_in_nf4(stage, mesh["tp"]))
        join_adapters(stage, mesh["tp"], products)  # around whatever products have become
        recompute(list(stage.blocks.values()), _recompute_modes(config, stage))  # wraps blocks, so before compile
        if config.compile:
            compile_blocks(list(stage.blocks.values()))  # per block: one graph, reused for every layer
    shards |= tied_shards(stages, shards, mesh)
    # last: outermost hooks. At degree 1 too: it owns the precision policy
    kind: Precision = "fp32" if precision == "fp32" else "bf16"
    engine: Engine
    if config.engine == "flat":
        more: dict[str, Any] = {"widen_gradients": widen_gradients, "passing": passing, "joined": joined}
        engine = FlatEngine(stages, config, mesh, kind, device, shards, shapes, **more)
    else:
        engine = FsdpEngine(stages, config, mesh, kind, device, shards, shapes)
    if isinstance(engine, FlatEngine):
        engine.on_publish = fp8_weights.expire
        if passing:
            fp8_weights.on_cast = engine.release
        engine.kept_beside = lambda: base.nbytes
    scales.settle(device, mesh["stage"])
    return Parallelized(stages=stages, engine=engine, base=base, scales=scales)


def _recompute_modes(config: ParallelConfig, stage: Transformer) -> list[RecomputeMode]:
    """One for each block of the stage; a list in the recipe names all layers of the model."""
    modes = config.recompute
    return [modes if isinstance(modes, str) else modes[int(index)] for index in stage.blocks]
