"""The FSDP engine: parameters, gradients and optimizer state sharded, on torch's FSDP2.

| | parameters | gathered |
| --- | --- | --- |
| ZeRO-3 | whole only around their use | for each forward and each backward; the last block and the head stay between |
| ZeRO-2 | whole from the first forward of a step to its last backward | once a step |

Both keep fp32 shards, which are what the optimizer updates, and reduce-scatter gradients once a step: before the last
micro-batch they are accumulated whole, in the precision of their reduction, so accumulation over several micro-batches
needs memory for the gradients of all parameters. With ``dp_replicate`` > 1 (HSDP) shards are then all-reduced.

In a pipeline, where many micro-batches are under way at a time, ZeRO-3 keeps a stage whole from its first forward of a
step to its last backward, as ZeRO-2 does: each micro-batch would gather it twice otherwise. Each stage is a root of its
own. What two stages of one rank share (an embedding) is whole, in a `FlatGroup`: FSDP2 has no parameter in two roots.

Experts that are spread over other ranks than their block (expert parallelism) are units of their own, over `edp`.
Gradients that ranks beside the data-parallel ones have a part in are summed once more, as shards, after backward.

Offload: with "parameters" the shards and their gradients live in host memory (FSDP2's own policy), are sent to the GPU
for each gather, and the update runs on the CPU. With "optimizer" the fp32 shards stay on the GPU, and the update runs
on a copy of them in host memory, where moments and the gradients it reads are too.

Frozen weights have shards in the precision that the model computes in, and no gradients.

Precision: FSDP2 casts a unit at a time, so router weights are rounded to bf16 with their block, where the flat engine
keeps them in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paceline.checkpoint.pieces import Piece, ShardedValue
from paceline.config.parallel import ParallelConfig
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis, all_reduce
from paceline.parallel.engine import MainParameter, ParameterInit
from paceline.parallel.flat import (
    await_weights_in_forward,
    flat_groups,
    flat_settings,
    frozen_weights,
    whole_model,
)
from paceline.parallel.fsdp_units import finish_backward, shard_stage
from paceline.parallel.lanes import Lane
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import DTYPES, Precision, main_dtype, parameter_sites, persistent_buffers
from paceline.parallel.reduction import gradient_collective
from paceline.parallel.shards import Shard, shard_of
from paceline.parallel.spread import same_everywhere, spread_of


class FsdpEngine:
    """See `Engine`; this is ``parallel.zero`` 2 and 3.

    Args:
        stages: this rank's parts of the model, on the meta device.
        device: where the model computes.
        shards: where the local tensors lie; a parameter that is missing is whole and dense.
        shapes: every parameter of the whole model.
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
    ) -> None:
        assert config.engine == "fsdp", f"parallel.zero = {config.zero}"
        self.stages: Sequence[Transformer] = tuple(stages)
        self.shapes: Mapping[str, torch.Size] = dict(shapes)
        self._device, self._config, self._world = device, config, mesh["world"]
        self._lane = Lane(device)
        pipelined = mesh.size("pp") > 1 or len(self.stages) > 1
        self._keep_whole = config.zero == 2 or pipelined
        # there FSDP2's hooks run before the gradients of weights are there
        self._reduce_at_end = pipelined and config.pipeline_schedule in ("zero_bubble", "zbv")
        sites = parameter_sites(stages, precision)
        self._shards = {name: shard_of(name, site.parameter, shards) for name, site in sites.items()}
        self._spreads = {name: spread_of(shard, mesh, sharded=True) for name, shard in self._shards.items()}
        self._alike = same_everywhere(mesh, self._spreads.values())
        shared = {name: site for name, site in sites.items() if len(site.stages) > 1}
        self._groups = flat_groups(
            {name: site for name, site in shared.items() if site.parameter.requires_grad},
            self._shards,
            self._spreads,
            flat_settings(config, device),
            DTYPES[config.reduce_dtype],
            count_all=self._alike,
        )
        self._frozen_shared = {name: site for name, site in shared.items() if not site.parameter.requires_grad}
        self._sites = {name: site for name, site in sites.items() if name not in shared}
        for site in self._sites.values():
            trained = site.parameter.requires_grad
            # nobody updates a frozen shard: it lies in the precision that the model computes in
            site.replace(site.parameter.to(main_dtype(site.parameter.dtype) if trained else site.compute_dtype))
        experts = {site.owners[0][0] for name, site in self._sites.items() if self._shards[name].expert}
        ignored = {site.parameter for site in shared.values()}
        for stage in self.stages:
            shard_stage(
                stage, config, mesh, precision, device, experts=experts, ignored=ignored, keep_whole=self._keep_whole
            )
        self._dtensors: dict[str, DTensor] = {}
        self._main: dict[str, MainParameter] = {}
        self._host_gradients: dict[str, Tensor] = {}

    def materialize(self, init: ParameterInit) -> None:
        for stage in self.stages:
            stage.to_empty(device="cpu" if self._config.offload == "parameters" else self._device)
            for module in stage.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(self._device)
            stage.reset_buffers()
        for name, site in self._sites.items():
            # kept: while a unit is gathered, the module's attribute is the whole parameter
            dtensor: Tensor = site.parameter
            assert isinstance(dtensor, DTensor)
            self._dtensors[name] = dtensor
            self._initialise(name, dtensor, init)
            if (main := self._main_parameter(name, dtensor)) is not None:
                self._main[name] = main
        for group in self._groups:
            group.materialize(init)
            self._main |= {parameter.name: parameter for parameter in group.main_parameters}
        for name, site in self._frozen_shared.items():
            value = torch.empty(site.parameter.shape, dtype=main_dtype(site.parameter.dtype), device=self._device)
            init(name, value, self._shards[name].whole, self._shards[name].offsets)
            site.replace(value.to(site.compute_dtype))
        for index, stage in enumerate(self.stages):
            await_weights_in_forward(stage, [group for group in self._groups if index in group.stages])
        self._main = {name: self._main[name] for name in self.shapes if name in self._main}

    @torch.no_grad()
    def _initialise(self, name: str, dtensor: DTensor, init: ParameterInit) -> None:
        for piece in self._located(name, dtensor).pieces:
            # where the model computes: a CPU and a GPU draw different numbers
            value = piece.tensor if piece.tensor.device.type == self._device.type else piece.tensor.to(self._device)
            init(name, value, self._shards[name].whole, piece.offsets)
            if value is not piece.tensor:
                piece.tensor.copy_(value)

    def _located(self, name: str, dtensor: DTensor) -> ShardedValue:
        """This rank's shard of a parameter, in the plain model's coordinates."""
        shard = self._shards[name]
        return ShardedValue.from_dtensor(dtensor).inside(shard.whole, shard.offsets, saved=shard.saved)

    def _main_parameter(self, name: str, dtensor: DTensor) -> MainParameter | None:
        """None if the parameter is frozen, or if this rank holds nothing of it."""
        value = self._located(name, dtensor)
        if not dtensor.requires_grad or not value.pieces:
            return None
        (piece,) = value.pieces

        def locate(local: Tensor) -> ShardedValue:
            here = Piece(offsets=piece.offsets, tensor=local.detach(), saved=piece.saved)
            return ShardedValue(global_shape=value.global_shape, dtype=local.dtype, pieces=(here,))

        local = piece.tensor
        if self._config.offload == "optimizer":
            local = _on_host(local).copy_(local)
        return MainParameter(
            name=name,
            param=nn.Parameter(local),
            global_shape=value.global_shape,
            locate=locate,
            counted=self._alike or self._spreads[name].first,
            shard_axis=self._spreads[name].whole_axis,
        )

    def main_parameters(self) -> list[MainParameter]:
        return list(self._main.values())

    @contextmanager
    def accumulate(self, last: bool, stage: int = 0) -> Iterator[None]:
        root, send = _root(self.stages[stage]), last and not self._reduce_at_end
        root.set_requires_gradient_sync(send)
        root.set_is_last_backward(send)
        if self._keep_whole:
            root.set_reshard_after_backward(send)
        yield

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """FSDP2 has summed over the data-parallel ranks during the last backward, or does it now; here follow the other
        sums, and where the optimizer looks gets them."""
        if self._reduce_at_end:
            for stage in self.stages:
                finish_backward(_root(stage))
        for group in self._groups:
            group.finish()
        gradients = {
            # zeros if nobody used it: the same as in the flat engine, so that decay and moments go on alike
            name: torch.zeros_like(dtensor.to_local()) if dtensor.grad is None else _local(dtensor.grad)
            for name, dtensor in self._dtensors.items()
            if name in self._main
        }
        self._sum_over_replicas(gradients)
        if self._config.offload == "optimizer":
            self._gradients_to_host(gradients)
            return
        for name, gradient in gradients.items():
            self._main[name].param.grad = gradient

    def _sum_over_replicas(self, gradients: Mapping[str, Tensor]) -> None:
        """In place, and in one message for all parameters that the same ranks share."""
        together: dict[tuple[tuple[int, ...], ...], tuple[tuple[Axis, ...], list[Tensor]]] = {}
        for name in self.shapes:
            axes = tuple(axis for axis in self._shards[name].replicas if axis.size > 1) if name in gradients else ()
            if axes:
                together.setdefault(tuple(axis.ranks for axis in axes), (axes, []))[1].append(gradients[name])
        for axes, tensors in together.values():
            message = torch.cat([tensor.flatten() for tensor in tensors]).to(self._device)
            for axis in axes:
                all_reduce(message, axis, gradient_collective(axis, "all_reduce"))
            for tensor, total in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def _gradients_to_host(self, gradients: Mapping[str, Tensor]) -> None:
        with self._lane.run():
            for name, gradient in gradients.items():
                if name not in self._host_gradients:
                    self._host_gradients[name] = _on_host(gradient)
                self._main[name].param.grad = self._host_gradients[name].copy_(gradient, non_blocking=True)
        self._lane.drain()
        for dtensor in self._dtensors.values():
            dtensor.grad = None

    def sum_over_shards(self, value: Tensor) -> Tensor:
        if not self._alike:
            all_reduce(value, self._world, "world/sum_over_shards/all_reduce")
        return value

    @torch.no_grad()
    def publish_weights(self, *, cast: bool = True) -> None:
        if self._config.offload == "optimizer":
            for name, dtensor in self._dtensors.items():
                if name in self._main:
                    dtensor.to_local().copy_(self._main[name].param, non_blocking=True)
        for group in self._groups:
            group.publish(cast=cast)
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    # units that stay whole after a forward without backward (an evaluation) must be gathered again
                    module.reshard()

    def wait_for_weights(self) -> None:
        """FSDP2 gathers before each use; what stages share is waited for."""
        for group in self._groups:
            group.wait_for(range(len(group.layout.buckets)))

    def zero_gradients(self) -> None:
        for dtensor in self._dtensors.values():
            dtensor.grad = None
        for main in self._main.values():
            main.param.grad = None
        for group in self._groups:
            group.zero()

    def weights(self) -> dict[str, ShardedValue]:
        found = {name: self._located(name, dtensor) for name, dtensor in self._dtensors.items()}
        found |= {name: main.pieces(main.param) for name, main in self._main.items()}
        found |= {name: value for group in self._groups for name, value in group.weights().items()}
        found |= frozen_weights(self._frozen_shared, self._shards)
        return whole_model(found, self.shapes) | {
            name: ShardedValue.from_full(tensor) for name, tensor in persistent_buffers(self.stages).items()
        }

    def bytes_by_kind(self) -> dict[str, int]:
        """Shards only: what FSDP2 has gathered at the moment is not counted."""
        total = Counter({"parameters": 0, "gradients": 0, "masters": 0, "host": 0})
        for group in self._groups:
            total.update(group.bytes_by_kind())
        total["parameters"] += sum(site.parameter.nbytes for site in self._frozen_shared.values())
        offloaded = self._config.offload == "parameters"
        for dtensor in self._dtensors.values():
            total["host" if offloaded else "parameters"] += dtensor.to_local().nbytes
            if dtensor.grad is not None:
                total["host" if offloaded else "gradients"] += _local(dtensor.grad).nbytes
        if self._config.offload == "optimizer":
            total["host"] += sum(self._main[name].param.nbytes for name in self._dtensors if name in self._main)
            total["host"] += sum(tensor.nbytes for tensor in self._host_gradients.values())
        return dict(total)


def _root(stage: Transformer) -> FSDPModule:
    assert isinstance(stage, FSDPModule)
    return stage


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _on_host(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
