"""A data-parallel engine small enough to see through: parameters of a toy model cut as the real engines cut them."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.pieces import Piece, ShardedValue
from paceline.parallel.collectives import Axis
from paceline.parallel.engine import Engine, MainParameter

Layout = Literal["whole", "flat", "rows"]

SHAPES = {
    "embed.weight": (50, 12),
    "blocks.0.norm.weight": (12,),
    "blocks.0.attention.q.weight": (16, 12),
    "blocks.0.attention.q.bias": (16,),
    "blocks.0.mlp.up.weight": (12, 40),
    "blocks.1.moe.router.weight": (5, 12),
    "blocks.1.moe.experts.up_weight": (5, 2, 8, 12),
    "blocks.1.moe.experts.up_bias": (5, 2, 8),
    "blocks.1.moe.experts.down_weight": (5, 12, 8),
    "blocks.1.moe.shared_gate.weight": (1, 12),
    "norm.weight": (12,),
    "head.weight": (50, 12),
}


def toy_values(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class ToyEngine:
    """Rank `rank` of `world_size`. flat: equal ranges of all elements in a row; rows: blocks of dim 0, uneven."""

    def __init__(
        self,
        values: dict[str, Tensor],
        layout: Layout = "whole",
        rank: int = 0,
        world_size: int = 1,
        axis: Axis | None = None,
    ) -> None:
        self.layout, self.rank, self.world_size = layout, rank, world_size
        self._axis = axis or Axis.alone("dp_shard_cp", rank)
        self.shapes = {name: value.shape for name, value in values.items()}
        self._main: list[MainParameter] = []
        begin = 0
        for name, value in values.items():
            self._add(name, value.clone(), begin, sum(v.numel() for v in values.values()))
            begin += value.numel()

    def _add(self, name: str, value: Tensor, begin: int, total: int) -> None:
        shape, rank, size = value.shape, self.rank, self.world_size
        if self.layout == "flat":
            share = -(-total // size)
            low = min(max(rank * share - begin, 0), value.numel())
            high = min(max((rank + 1) * share - begin, 0), value.numel())
            param = nn.Parameter(value.view(-1)[low:high].clone())
            locate = lambda local: ShardedValue.from_flat_range(local, shape, low)  # noqa: E731
        else:
            rows = -(-shape[0] // size) if self.layout == "rows" else shape[0]
            low = min(rank * rows, shape[0]) if self.layout == "rows" else 0
            param = nn.Parameter(value[low : low + rows].clone())
            offsets = (low,) + (0,) * (len(shape) - 1)
            locate = lambda local: ShardedValue(  # noqa: E731
                global_shape=shape, dtype=local.dtype, pieces=(Piece(offsets=offsets, tensor=local),)
            )
        if param.numel():
            self._main.append(
                MainParameter(
                    name=name,
                    param=param,
                    global_shape=shape,
                    locate=locate,
                    counted=True,
                    shard_axis=self._axis,
                )
            )

    def main_parameters(self) -> list[MainParameter]:
        return self._main

    def set_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Each rank takes its pieces of the global gradients."""
        for parameter in self._main:
            grad = torch.empty_like(parameter.param)
            for piece in parameter.pieces(grad).pieces:
                piece.tensor.copy_(cut(gradients[parameter.name], piece))
            parameter.param.grad = grad

    def sum_over_shards(self, value: Tensor) -> Tensor:
        if self.layout != "whole" and self.world_size > 1:
            dist.all_reduce(value)
        return value

    def zero_gradients(self) -> None:
        for parameter in self._main:
            parameter.param.grad = None

    def weights(self) -> dict[str, ShardedValue]:
        mine = {parameter.name: parameter.pieces(parameter.param.detach()) for parameter in self._main}
        return {
            name: mine.get(name, ShardedValue(global_shape=shape, dtype=torch.float32, pieces=()))
            for name, shape in self.shapes.items()
        }

    def as_engine(self) -> Engine:
        """What the optimizer uses is all here; the rest of the protocol is not."""
        return cast(Engine, cast(Any, self))


def cut(full: Tensor, piece: Piece) -> Tensor:
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.tensor.shape, strict=True)):
        full = full.narrow(dim, offset, size)
    return full


def max_difference(value: ShardedValue, full: Tensor) -> float:
    """Between the pieces that are here and the same places of `full`."""
    return max((float((piece.tensor - cut(full, piece)).abs().max()) for piece in value.pieces), default=0.0)
