"""Rows that travel between ranks in uneven numbers, with their gradients.

Each function takes several tensors with the same rows and exchanges them one after the other in one autograd node: the
order in which ranks talk, forward and backward, is then fixed by this file and not by the scheduling of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.collectives import Axis, span


def all_to_all_rows(
    tensors: tuple[Tensor, ...], axis: Axis, names: tuple[str, ...], *, sent: Sequence[int], received: Sequence[int]
) -> tuple[Tensor, ...]:
    """Sends the first ``sent[0]`` rows of each tensor to the first rank of the axis, and so on.

    Returns the rows of all ranks in order, ``received[i]`` from rank i. The gradient goes the way back.
    """
    return _AllToAll.apply(axis, names, list(sent), list(received), *tensors)


def gather_rows(
    tensors: tuple[Tensor, ...], axis: Axis, names: tuple[str, ...], *, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """The rows of all ranks of the axis in order, ``sizes[i]`` from rank i; the gradient is a `reduce_scatter_rows`."""
    return _Gather.apply(axis, names, list(sizes), *tensors)


def reduce_scatter_rows(tensor: Tensor, axis: Axis, name: str, *, sizes: Sequence[int]) -> Tensor:
    """This rank's ``sizes[index]`` rows of the sum over the axis; the gradient is a `gather_rows`."""
    return _ReduceScatter.apply(axis, name, list(sizes), tensor)


def exchange(tensor: Tensor, axis: Axis, name: str, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """`all_to_all_rows` of one tensor, without a gradient."""
    output = tensor.new_empty(sum(received), *tensor.shape[1:])
    with span(axis, name, tensor.nbytes):
        dist.all_to_all_single(output, tensor.contiguous(), list(received), list(sent), group=axis.group)
    return output


# Gathering and reducing rows are all-to-alls as well: NCCL's and gloo's own collectives want the same number of rows
# from every rank. What crosses the wires is the same, and sums are made in a fixed order.


def _gather(tensor: Tensor, axis: Axis, name: str, sizes: list[int]) -> Tensor:
    own = tensor.shape[0]
    copies = tensor.expand(axis.size, *tensor.shape).flatten(0, 1)
    return exchange(copies, axis, name, sent=[own] * axis.size, received=sizes)


def _reduce_scatter(tensor: Tensor, axis: Axis, name: str, sizes: list[int]) -> Tensor:
    own = sizes[axis.index]
    parts = exchange(tensor, axis, name, sent=sizes, received=[own] * axis.size)
    return parts.view(axis.size, own, *tensor.shape[1:]).sum(0)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: Axis, names: tuple[str, ...], sent: list[int], received: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.names, ctx.sent, ctx.received = axis, names, sent, received
        return tuple(
            exchange(tensor, axis, name, sent=sent, received=received)
            for tensor, name in zip(tensors, names, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = (
            exchange(gradient, ctx.axis, name, sent=ctx.received, received=ctx.sent)
            for gradient, name in zip(gradients, ctx.names, strict=True)
        )
        return None, None, None, None, *back


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, names: tuple[str, ...], sizes: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.names, ctx.sizes = axis, names, sizes
        return tuple(_gather(tensor, axis, name, sizes) for tensor, name in zip(tensors, names, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = (
            _reduce_scatter(gradient, ctx.axis, name, ctx.sizes)
            for gradient, name in zip(gradients, ctx.names, strict=True)
        )
        return None, None, None, *back


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, name: str, sizes: list[int], tensor: Tensor) -> Tensor:
        ctx.axis, ctx.name, ctx.sizes = axis, name, sizes
        return _reduce_scatter(tensor, axis, name, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, _gather(gradient, ctx.axis, ctx.name, ctx.sizes)
