"""The FSDP engine: parameters, gradients and optimizer state sharded, on torch's FSDP2.

| | parameters | gathered |
| --- | --- | --- |
| ZeRO-3 | whole only around their use | for each forward and each backward; the last block and the head stay between |
| ZeRO-2 | whole from the first forward of a step to its last backward | once a step |

Both keep fp32 shards, which are what the optimizer updates, and reduce-scatter gradients once a step: before the last
micro-batch they are accumulated whole, in the precision of their reduction, so accumulation over several micro-batches
needs memory for the gradients of all parameters. With ``dp_replicate`` > 1 (HSDP) shards are then all-reduced.

Offload: with "parameters" the shards and their gradients live in host memory (FSDP2's own policy), are sent to the GPU
for each gather, and the update runs on the CPU. With "optimizer" the fp32 shards stay on the GPU, and the update runs
on a copy of them in host memory, where moments and the gradients it reads are too.

Precision: FSDP2 casts a unit at a time, so router weights are rounded to bf16 with their block, where the flat engine
keeps them in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.checkpoint.pieces import Piece, ShardedValue
from paceline.config.parallel import ParallelConfig
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import all_reduce
from paceline.parallel.engine import MainParameter
from paceline.parallel.lanes import Lane
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.parameters import DTYPES, Precision, Site, main_dtype, parameter_sites, persistent_buffers

_INIT_BYTES = 2**30
"""Full values that are made at a time while initialising."""


class FsdpEngine:
    """See `Engine`; this is ``parallel.zero`` 2 and 3.

    Args:
        model: on the meta device.
        device: where the model computes.
    """

    def __init__(
        self, model: Transformer, config: ParallelConfig, mesh: ParallelMesh, precision: Precision, device: torch.device
    ) -> None:
        assert config.engine == "fsdp", f"parallel.zero = {config.zero}"
        self.model = model
        self._device, self._config = device, config
        self._shard_axis = mesh["dp_shard"]
        self._lane = Lane(device)
        self._sites = parameter_sites(model, precision)
        for site in self._sites.values():
            site.replace(site.parameter.to(main_dtype(site.parameter.dtype)))
        _shard_units(model, config, mesh, _precision_policy(config, precision, self._sites), device)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            # SUM: the loss is already divided by all tokens. Forced, since a factor alone becomes PREMUL_SUM, which
            # gloo has not
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        self._dtensors: dict[str, DTensor] = {}
        self._main: dict[str, MainParameter] = {}
        self._host_gradients: dict[str, Tensor] = {}

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def materialize(self, init: Callable[[Transformer], None]) -> None:
        self.model.to_empty(device="cpu" if self._config.offload == "parameters" else self._device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)
        for name, site in self._sites.items():
            # kept: while a unit is gathered, the module's attribute is the whole parameter
            dtensor: Tensor = site.parameter
            assert isinstance(dtensor, DTensor)
            self._dtensors[name] = dtensor
        with torch.no_grad():
            self._initialise(init, self._dtensors)
        for name, dtensor in self._dtensors.items():
            if (main := self._main_parameter(name, dtensor)) is not None:
                self._main[name] = main

    def _initialise(self, init: Callable[[Transformer], None], dtensors: dict[str, DTensor]) -> None:
        """Makes full values, some parameters at a time, as the plain model would, and keeps this rank's part."""
        for names in _portions(dtensors, _INIT_BYTES):
            for name, site in self._sites.items():
                site.put(None)
                if name in names:
                    like = dtensors[name]
                    site.put(nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=self._device)))
            init(self.model)
            for name in names:
                full = self._sites[name].parameter
                for piece in ShardedValue.from_dtensor(dtensors[name]).pieces:
                    box = zip(piece.offsets, piece.tensor.shape, strict=True)
                    piece.tensor.copy_(full[tuple(slice(offset, offset + size) for offset, size in box)])
        for name, site in self._sites.items():
            site.put(dtensors[name])

    def _main_parameter(self, name: str, dtensor: DTensor) -> MainParameter | None:
        """None if the parameter is frozen, or if this rank holds nothing of it."""
        pieces = ShardedValue.from_dtensor(dtensor).pieces
        if not dtensor.requires_grad or not pieces:
            return None
        (piece,) = pieces

        def locate(local: Tensor) -> ShardedValue:
            here = Piece(offsets=piece.offsets, tensor=local.detach())
            return ShardedValue(global_shape=dtensor.shape, dtype=local.dtype, pieces=(here,))

        local = piece.tensor
        if self._config.offload == "optimizer":
            local = _on_host(local).copy_(local)
        return MainParameter(name=name, param=nn.Parameter(local), global_shape=dtensor.shape, locate=locate)

    def main_parameters(self) -> list[MainParameter]:
        return list(self._main.values())

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        if self._config.zero == 2:
            self._root.set_reshard_after_backward(last)
        yield

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """The hooks of FSDP2 have done it during the last backward; here the sums go to where the optimizer looks."""
        for name, main in self._main.items():
            gradient = self._dtensors[name].grad
            if gradient is None:
                # nobody used it: the same as in the flat engine, so that decay and moments go on alike
                main.param.grad = torch.zeros_like(main.param)
            elif self._config.offload != "optimizer":
                main.param.grad = _local(gradient)
        if self._config.offload == "optimizer":
            self._gradients_to_host()

    def _gradients_to_host(self) -> None:
        with self._lane.run():
            for name, main in self._main.items():
                gradient = self._dtensors[name].grad
                if gradient is None:
                    continue
                local = _local(gradient)
                if name not in self._host_gradients:
                    self._host_gradients[name] = _on_host(local)
                main.param.grad = self._host_gradients[name].copy_(local, non_blocking=True)
        self._lane.drain()
        for dtensor in self._dtensors.values():
            dtensor.grad = None

    def sum_over_shards(self, value: Tensor) -> Tensor:
        all_reduce(value, self._shard_axis, "dp/sum_over_shards/all_reduce")
        return value

    @torch.no_grad()
    def publish_weights(self) -> None:
        if self._config.offload == "optimizer":
            for name, main in self._main.items():
                self._dtensors[name].to_local().copy_(main.param, non_blocking=True)
        for unit in self._units:
            # units that stay whole after a forward without backward (an evaluation) must be gathered again
            unit.reshard()

    def wait_for_weights(self) -> None:
        """Nothing to wait for: FSDP2 gathers before each use."""

    def zero_gradients(self) -> None:
        for name, dtensor in self._dtensors.items():
            dtensor.grad = None
            if name in self._main:
                self._main[name].param.grad = None

    def weights(self) -> dict[str, ShardedValue]:
        found = {name: ShardedValue.from_dtensor(dtensor) for name, dtensor in self._dtensors.items()}
        found |= {name: main.pieces(main.param) for name, main in self._main.items()}
        buffers = {name: ShardedValue.from_full(tensor) for name, tensor in persistent_buffers(self.model).items()}
        return found | buffers

    def bytes_by_kind(self) -> dict[str, int]:
        """Shards only: what FSDP2 has gathered at the moment is not counted."""
        total = Counter({"parameters": 0, "gradients": 0, "masters": 0, "host": 0})
        offloaded = self._config.offload == "parameters"
        for dtensor in self._dtensors.values():
            total["host" if offloaded else "parameters"] += dtensor.to_local().nbytes
            if dtensor.grad is not None:
                total["host" if offloaded else "gradients"] += _local(dtensor.grad).nbytes
        if self._config.offload == "optimizer":
            total["host"] += sum(main.param.nbytes for main in self._main.values())
            total["host"] += sum(tensor.nbytes for tensor in self._host_gradients.values())
        return dict(total)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _on_host(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _precision_policy(config: ParallelConfig, precision: Precision, sites: dict[str, Site]) -> MixedPrecisionPolicy:
    # inputs are not cast: hidden states come in the compute dtype, and angles and router losses must stay in fp32
    doubles = any(site.parameter.dtype == torch.float64 for site in sites.values())
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=None if doubles else DTYPES[config.reduce_dtype],
        cast_forward_inputs=False,
    )


def _shard_units(
    model: Transformer, config: ParallelConfig, mesh: ParallelMesh, policy: MixedPrecisionPolicy, device: torch.device
) -> None:
    """What is gathered together: each block, the embedding, norm and head, and what is left with the root.

    An embedding that is used in two places (tied, or by multi-token prediction) stays with the root, which is whole for
    the whole step: a unit of its own would be reduced once for each use.
    """
    axes = ("dp_shard",) if config.dp_replicate == 1 else ("dp_replicate", "dp_shard")
    device_mesh = mesh.device_mesh(*axes)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload == "parameters" else OffloadPolicy()

    def shard(unit: nn.Module | list[nn.Module], *, reshard: bool) -> None:
        fully_shard(unit, mesh=device_mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    used_once = model.head.weight is not None and not model.mtp
    if used_once:
        shard(model.embed, reshard=config.zero == 3)
    blocks = [*model.blocks.values(), *model.mtp.values()]
    for block in blocks:
        # backward begins with the last one: freeing it after its forward would only gather it again at once
        shard(block, reshard=config.zero == 3 and block is not blocks[-1])
    if used_once:
        shard([model.norm, model.head], reshard=False)
    shard(model, reshard=False)


def _portions(dtensors: dict[str, DTensor], limit_bytes: int) -> Iterator[set[str]]:
    """Names in portions of at most so many bytes of full values; a larger parameter is a portion of its own."""
    names: set[str] = set()
    size = 0
    for name, dtensor in dtensors.items():
        if names and size + dtensor.nbytes > limit_bytes:
            yield names
            names, size = set(), 0
        names.add(name)
        size += dtensor.nbytes
    yield names
