"""The flat engine: whole weights on every rank, optimizer state sharded (ZeRO-1) or not (ZeRO-0, plain DDP).

Memory of a parameter in bf16 with fp32 accumulation and S shards, AdamW's moments included: 2 (weight) + 4 (gradient) +
12 / S bytes; ZeRO-0 is S = 1. A step talks once, whatever the accumulation: buckets are reduce-scattered while the last
backward runs, and the new weights are gathered while the next forward does.

Choose it where whole weights and gradients fit; otherwise `fsdp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.parallel import ParallelConfig
from paceline.models.transformer import Transformer
from paceline.parallel.accumulate import Joined, announce_products
from paceline.parallel.collectives import Axis, all_reduce
from paceline.parallel.engine import MainParameter, ParameterInit
from paceline.parallel.flat_group import FlatGroup, FlatSettings
from paceline.parallel.lanes import Lane
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import DTYPES, Precision, Site, parameter_sites, persistent_buffers, units
from paceline.parallel.reduction import GradientReducer, SumReducer
from paceline.parallel.shards import Shard, shard_of
from paceline.parallel.spread import Spread, same_everywhere, spread_of

_MIB = 2**20

ReducerFactory = Callable[[Axis, Sequence[Axis], torch.dtype], GradientReducer]
"""Makes what sums the gradients of a group, from the axis over which they are cut, those of copies, and a dtype."""


class FlatEngine:
    """See `Engine`; this is ``parallel.zero`` 0 and 1.

    Args:
        stages: this rank's parts of the model, on the meta device.
        device: where weights and gradients live.
        shards: where the local tensors lie; a parameter that is missing is whole and dense.
        shapes: every parameter of the whole model.
        widen_gradients: see `FlatSettings`.
        passing: layers whose weights the model reads once after each change, when it makes a copy of its own; a block
            that has made its copies says so to `release`.
        joined: linears of which the gradient of all weights is one product, which may be told where to add it.
        reducer: how gradients are summed, for a compressor.
    """

    def __init__(
        self,
        stages: Sequence[Transformer],
        config: ParallelConfig,
        mesh: ParallelMesh,
        precision: Precision,
        device: torch.device,
        shards: Mapping[str, Shard],
        shapes: Mapping[str, torch.Size],
        *,
        widen_gradients: bool = True,
        passing: Sequence[nn.Module] = (),
        joined: Sequence[Joined] = (),
        reducer: ReducerFactory = SumReducer,
    ) -> None:
        assert config.engine == "flat", f"parallel.zero = {config.zero}"
        self.stages: Sequence[Transformer] = tuple(stages)
        self.shapes: Mapping[str, torch.Size] = dict(shapes)
        self.on_publish: Callable[[], None] | None = None
        """Called when the weights that the model computes with are about to change."""
        self.kept_beside: Callable[[], int] = lambda: 0
        """Bytes that somebody keeps in place of frozen weights."""
        self._device, self._world = device, mesh["world"]
        sites = parameter_sites(stages, precision)
        self._shards = {name: shard_of(name, site.parameter, shards) for name, site in sites.items()}
        self._frozen = {name: site for name, site in sites.items() if not site.parameter.requires_grad}
        spreads = {name: spread_of(shard, mesh, sharded=config.zero == 1) for name, shard in self._shards.items()}
        self._alike = same_everywhere(mesh, spreads.values())
        self._groups = flat_groups(
            {name: site for name, site in sites.items() if name not in self._frozen},
            self._shards,
            spreads,
            flat_settings(config, device, widen_gradients=widen_gradients),
            DTYPES[config.reduce_dtype],
            count_all=self._alike,
            passing=_weights_of(passing, sites),
            joined=joined,
            reducer=reducer,
        )

    def materialize(self, init: ParameterInit) -> None:
        for group in self._groups:
            group.materialize(init)
        for name, site in self._frozen.items():
            value = torch.empty(site.parameter.shape, dtype=site.parameter.dtype, device=self._device)
            init(name, value, self._shards[name].whole, self._shards[name].offsets)
            site.replace(value.to(site.compute_dtype))
        for stage in self.stages:
            for module in stage.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_meta:
                        module._buffers[name] = torch.empty_like(buffer, device=self._device)
            stage.reset_buffers()
        for index, stage in enumerate(self.stages):
            groups = [group for group in self._groups if index in group.stages]
            await_weights_in_forward(stage, groups)
            for group in groups:
                if group.is_passing:
                    group.read_by(stage.blocks.values())
            for block in stage.blocks.values():
                targets = [target for group in groups for target in group.targets_in(block)]
                if targets:
                    announce_products(block, targets)
        by_name = {parameter.name: parameter for group in self._groups for parameter in group.main_parameters}
        self._main_parameters = [by_name[name] for name in self.shapes if name in by_name]

    def main_parameters(self) -> list[MainParameter]:
        return self._main_parameters

    @contextmanager
    def accumulate(self, last: bool, stage: int = 0) -> Iterator[None]:
        if last:
            for group in self._groups:
                if group.early and group.stages == (stage,):
                    group.begin_last()
        yield

    def reduce_gradients(self) -> None:
        for group in self._groups:
            group.finish()

    def sum_over_shards(self, value: Tensor) -> Tensor:
        if not self._alike:
            all_reduce(value, self._world, "world/sum_over_shards/all_reduce")
        return value

    def publish_weights(self, *, cast: bool = True) -> None:
        if self.on_publish is not None:
            self.on_publish()
        for group in self._groups:
            group.publish(cast=cast)

    def wait_for_weights(self) -> None:
        for group in self._groups:
            if not group.is_passing:
                group.wait_for(range(len(group.layout.buckets)))

    def release(self, block: nn.Module) -> None:
        """This block has copied the weights of its layers that are ``passing``."""
        for group in self._groups:
            group.release(block)

    def zero_gradients(self) -> None:
        for group in self._groups:
            group.zero()

    def weights(self) -> dict[str, ShardedValue]:
        found = {name: value for group in self._groups for name, value in group.weights().items()}
        found |= frozen_weights(self._frozen, self._shards)
        return whole_model(found, self.shapes) | {
            name: ShardedValue.from_full(tensor) for name, tensor in persistent_buffers(self.stages).items()
        }

    def bytes_by_kind(self) -> dict[str, int]:
        total = Counter({"parameters": 0, "gradients": 0, "masters": 0, "host": 0})
        for group in self._groups:
            total.update(group.bytes_by_kind())
        total["parameters"] += sum(held_bytes(site.parameter) for site in self._frozen.values()) + self.kept_beside()
        return dict(total)


def flat_settings(config: ParallelConfig, device: torch.device, *, widen_gradients: bool = True) -> FlatSettings:
    accumulate_dtype = DTYPES[config.accumulate_dtype]
    return FlatSettings(
        device=device,
        accumulate_dtype=accumulate_dtype,
        bucket_elements=config.bucket_mb * _MIB // accumulate_dtype.itemsize,
        offload=config.offload != "none",
        lane=Lane(device),
        widen_gradients=widen_gradients,
    )


def flat_groups(
    sites: Mapping[str, Site],
    shards: Mapping[str, Shard],
    spreads: Mapping[str, Spread],
    settings: FlatSettings,
    reduce_dtype: torch.dtype,
    *,
    count_all: bool,
    passing: Collection[str] = (),
    joined: Sequence[Joined] = (),
    reducer: ReducerFactory = SumReducer,
) -> list[FlatGroup]:
    """Parameters that are used, kept and reduced alike, each group in the model's order.

    Groups whose gradients are summed over more than data-parallel ranks wait for the end of backward: on those axes the
    model itself talks until then, and what is left (norms, routers, a tied embedding) is small.
    """
    members: dict[Any, dict[str, Site]] = {}
    for name, site in sites.items():
        shard = shards[name]
        replicas = tuple(axis.ranks for axis in shard.replicas if axis.size > 1)
        key = (site.stages, site.compute_dtype, site.parameter.dtype, shard.expert, replicas, name in passing)
        members.setdefault(key, {})[name] = site
    groups = []
    for (stages, _, dtype, _, replicas, passes), inside in members.items():
        spread = spreads[next(iter(inside))]
        # gradients of a float64 model (a reference in tests) are not rounded on their way
        sum_dtype = torch.float64 if dtype == torch.float64 else reduce_dtype
        groups.append(
            FlatGroup(
                inside,
                shards,
                spread,
                reducer(spread.shard_axis, spread.replicate_axes, sum_dtype),
                settings,
                counted=count_all or spread.first,
                early=len(stages) == 1 and not replicas,
                passing=passes,
                joined=joined,
            )
        )
    return groups


def _weights_of(layers: Sequence[nn.Module], sites: Mapping[str, Site]) -> set[str]:
    """The weights of these layers that nothing else refers to."""
    inside = {id(layer) for layer in layers}
    return {
        name
        for name, site in sites.items()
        if len(site.owners) == 1 and site.owners[0][1] == "weight" and id(site.owners[0][0]) in inside
    }


def await_weights_in_forward(stage: Transformer, groups: Sequence[FlatGroup]) -> None:
    """Embedding and each block wait for their own buckets only; the last block for all that is used after it.

    Nothing hangs on norm and head: the loss may read the head's weight without calling the head.
    """
    blocks = list(stage.blocks.values())
    parts: list[nn.Module] = [unit for unit in units(stage) if unit is stage.embed or unit in blocks]
    if not blocks:
        parts = [stage]
    for part in parts:
        needed = [
            (group, range(len(group.layout.buckets)) if part is parts[-1] else sorted(group.buckets_of(part)))
            for group in groups
        ]

        def wait(module: nn.Module, args: Any, needed: Any = needed) -> None:
            for group, buckets in needed:
                group.wait_for(buckets)

        # prepended: before hooks that read weights
        part.register_forward_pre_hook(wait, prepend=True)


def frozen_weights(sites: Mapping[str, Site], shards: Mapping[str, Shard]) -> dict[str, ShardedValue]:
    """Weights that nobody updates and every rank has whole, in the precision that the model computes in."""
    found = {}
    for name, site in sites.items():
        shard, value = shards[name], ShardedValue.from_full(site.parameter)
        found[name] = value.inside(shard.whole, shard.offsets, saved=shard.saved)
    return found


def held_bytes(parameter: Tensor) -> int:
    """Of a parameter's memory, which may have been given up (`frozen.py`)."""
    return min(parameter.nbytes, parameter.untyped_storage().nbytes())


def whole_model(found: Mapping[str, ShardedValue], shapes: Mapping[str, torch.Size]) -> dict[str, ShardedValue]:
    """``found`` with an entry for every parameter of the model; those of other ranks have no pieces."""
    assert all(value.global_shape == shapes[name] for name, value in found.items()), "a shape is not the plain model's"
    dtype = next((value.dtype for value in found.values()), torch.float32)
    return {
        name: found.get(name, ShardedValue(global_shape=shape, dtype=dtype, pieces=()))
        for name, shape in shapes.items()
    }
