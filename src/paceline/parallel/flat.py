"""The flat engine: whole weights on every rank, optimizer state sharded (ZeRO-1) or not (ZeRO-0, plain DDP).

Memory of a parameter in bf16 with fp32 accumulation and S shards, AdamW's moments included: 2 (weight) + 4 (gradient) +
12 / S bytes; ZeRO-0 is S = 1. A step talks once, whatever the accumulation: buckets are reduce-scattered while the last
backward runs, and the new weights are gathered while the next forward does.

Choose it where whole weights and gradients fit; otherwise `fsdp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.parallel import ParallelConfig
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis, all_reduce
from paceline.parallel.engine import MainParameter
from paceline.parallel.flat_group import FlatGroup, FlatSettings
from paceline.parallel.lanes import Lane
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import DTYPES, Precision, Site, parameter_sites, persistent_buffers, units
from paceline.parallel.reduction import GradientReducer, SumReducer

_MIB = 2**20


class FlatEngine:
    """See `Engine`; this is ``parallel.zero`` 0 and 1.

    Args:
        model: on the meta device.
        device: where weights and gradients live.
        reducer: how gradients are summed, for a compressor; None sums them in ``parallel.reduce_dtype``.
    """

    def __init__(
        self,
        model: Transformer,
        config: ParallelConfig,
        mesh: ParallelMesh,
        precision: Precision,
        device: torch.device,
        *,
        reducer: GradientReducer | None = None,
    ) -> None:
        assert config.engine == "flat", f"parallel.zero = {config.zero}"
        self.model = model
        self._device = device
        if config.zero == 1:
            self._shard_axis, weights_axis, replicate_axis = mesh["dp_shard"], mesh["dp_weights"], mesh["dp_replicate"]
        else:
            self._shard_axis = weights_axis = Axis.alone("dp_shard", mesh.rank)
            replicate_axis = mesh["dp"]
        settings = FlatSettings(
            device=device,
            accumulate_dtype=DTYPES[config.accumulate_dtype],
            bucket_elements=config.bucket_mb * _MIB // DTYPES[config.accumulate_dtype].itemsize,
            offload=config.offload == "optimizer",
            lane=Lane(device),
        )
        reduce_dtype = DTYPES[config.reduce_dtype]
        sites = parameter_sites(model, precision)
        self._frozen = {name: site for name, site in sites.items() if not site.parameter.requires_grad}
        self._groups = [
            FlatGroup(
                members,
                self._shard_axis,
                weights_axis,
                reducer or SumReducer(self._shard_axis, replicate_axis, _at_least(reduce_dtype, members)),
                settings,
            )
            for members in _by_dtype(sites, self._frozen)
        ]
        self._names = list(sites)

    def materialize(self, init: Callable[[Transformer], None]) -> None:
        for group in self._groups:
            group.allocate()
        for site in self._frozen.values():
            site.replace(torch.empty(site.parameter.shape, dtype=site.parameter.dtype, device=self._device))
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self._device)
        with torch.no_grad():
            init(self.model)
            for group in self._groups:
                group.settle()
            for site in self._frozen.values():
                site.replace(site.parameter.to(site.compute_dtype))
        self._await_weights_in_forward()
        by_name = {parameter.name: parameter for group in self._groups for parameter in group.main_parameters}
        self._main_parameters = [by_name[name] for name in self._names if name in by_name]

    def main_parameters(self) -> list[MainParameter]:
        return self._main_parameters

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        if last:
            for group in self._groups:
                group.begin_last()
        yield

    def reduce_gradients(self) -> None:
        for group in self._groups:
            group.finish()

    def sum_over_shards(self, value: Tensor) -> Tensor:
        all_reduce(value, self._shard_axis, "dp/sum_over_shards/all_reduce")
        return value

    def publish_weights(self) -> None:
        for group in self._groups:
            group.publish()

    def wait_for_weights(self) -> None:
        for group in self._groups:
            group.wait_for(range(len(group.layout.buckets)))

    def zero_gradients(self) -> None:
        for group in self._groups:
            group.zero()

    def weights(self) -> dict[str, ShardedValue]:
        found = {name: value for group in self._groups for name, value in group.weights().items()}
        found |= {name: ShardedValue.from_full(site.parameter) for name, site in self._frozen.items()}
        buffers = {name: ShardedValue.from_full(tensor) for name, tensor in persistent_buffers(self.model).items()}
        return {name: found[name] for name in self._names} | buffers

    def bytes_by_kind(self) -> dict[str, int]:
        total = Counter({"parameters": 0, "gradients": 0, "masters": 0, "host": 0})
        for group in self._groups:
            total.update(group.bytes_by_kind())
        total["parameters"] += sum(site.parameter.nbytes for site in self._frozen.values())
        return dict(total)

    def _await_weights_in_forward(self) -> None:
        """Embedding and each block wait for their own buckets only; the last block for all that is used after it.

        Nothing hangs on norm and head: the loss may read the head's weight without calling the head.
        """
        parts = [unit for unit in units(self.model) if unit is self.model.embed or unit in self.model.blocks.values()]
        for part in parts:
            needed = [
                (group, range(len(group.layout.buckets)) if part is parts[-1] else sorted(group.buckets_of(part)))
                for group in self._groups
            ]

            def wait(module: nn.Module, args: Any, needed: Any = needed) -> None:
                for group, buckets in needed:
                    group.wait_for(buckets)

            # prepended: before hooks that read weights
            part.register_forward_pre_hook(wait, prepend=True)


def _by_dtype(sites: dict[str, Site], frozen: dict[str, Site]) -> list[dict[str, Site]]:
    """Trainable parameters by compute and main precision, each in the model's order."""
    groups: dict[tuple[torch.dtype, torch.dtype], dict[str, Site]] = {}
    for name, site in sites.items():
        if name not in frozen:
            groups.setdefault((site.compute_dtype, site.parameter.dtype), {})[name] = site
    return list(groups.values())


def _at_least(dtype: torch.dtype, members: dict[str, Site]) -> torch.dtype:
    """Gradients of a float64 model (a reference in tests) are not rounded on their way."""
    doubles = any(site.parameter.dtype == torch.float64 for site in members.values())
    return torch.float64 if doubles else dtype
