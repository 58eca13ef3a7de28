"""Collectives inside the forward pass, and what their gradients do.

A tensor is either *cut* (each rank of the axis has its part), *whole* (every rank has the same) or *partial* (the value
is the sum over ranks). The gradient of a cut tensor is cut. The gradient of a whole one is *partial* where ranks go on
to compute different things with it, and whole where they compute the same.

| function | forward | backward | what it is for |
| --- | --- | --- | --- |
| `gather_sequence` | cut -> whole: all-gather | partial -> cut: reduce-scatter | the way into a sublayer |
| `scatter_sum` | partial -> cut: reduce-scatter | cut -> whole: all-gather | the way out of it |
| `gather_replicated` | cut -> whole: all-gather | whole -> cut: slice | every rank goes on alike |
| `sum_replicated` | partial -> whole: all-reduce | whole -> whole: identity | every rank goes on alike |
| `share` | whole -> whole: identity | partial -> whole: all-reduce | ranks go on differently |

Collectives count under ``name``/all_gather, ``name``/reduce_scatter and ``name``/all_reduce, whichever pass they are
in. In code that is being compiled they are the compiler's own functional ones, which it can trace, move and fuse, and
nothing is counted. On an axis of size 1 each function gives back its input.

Source of the pairs: Megatron-LM, arXiv:1909.08053, section 3, and sequence parallelism, arXiv:2205.05198, section 4.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.collectives import Axis, Pending, all_gather, all_reduce, reduce_scatter

# the collectives that a compiler can trace; there is no public form of these yet (torch 2.11 - 2.13)
_traced_all_gather = torch.ops._c10d_functional.all_gather_into_tensor
_traced_reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor
_traced_all_reduce = torch.ops._c10d_functional.all_reduce
_traced_wait = torch.ops._c10d_functional.wait_tensor


def gather_sequence(x: Tensor, axis: Axis, name: str, *, dim: int) -> Tensor:
    """The parts of all ranks, one after the other along ``dim``. The gradient is summed over ranks, then cut."""
    if axis.size == 1:
        return x
    whole: Tensor = _GatherSequence.apply(x, axis, name, dim)
    return whole


def scatter_sum(x: Tensor, axis: Axis, name: str, *, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks. ``dim`` must divide by the size of the axis."""
    if axis.size == 1:
        return x
    part: Tensor = _ScatterSum.apply(x, axis, name, dim)
    return part


def gather_replicated(x: Tensor, axis: Axis, name: str, *, dim: int) -> Tensor:
    """As `gather_sequence`, for what every rank goes on to compute the same with: the gradient is cut, not summed."""
    if axis.size == 1:
        return x
    whole: Tensor = _GatherReplicated.apply(x, axis, name, dim)
    return whole


def sum_replicated(x: Tensor, axis: Axis, name: str) -> Tensor:
    """The sum over ranks, which every rank goes on to compute the same with: the gradient passes unchanged."""
    if axis.size == 1:
        return x
    whole: Tensor = _SumReplicated.apply(x, axis, name)
    return whole


def share(x: Tensor, axis: Axis, name: str) -> Tensor:
    """``x``, equal on all ranks, before each goes its own way with it: the gradient is summed over them."""
    if axis.size == 1:
        return x
    same: Tensor = _Share.apply(x, axis, name)
    return same


def max_over(x: Tensor, axis: Axis, name: str) -> Tensor:
    """The elementwise maximum over ranks, of what has no gradient."""
    if axis.size == 1:
        return x
    return _reduce(x, axis, name, "max")


def own_part(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's part of a tensor that every rank has whole, as a view; the gradient is zero outside it."""
    assert x.shape[dim] % axis.size == 0, f"dim {dim} of {tuple(x.shape)} over {axis.size} ranks"
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.index * length, length)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, name: str, dim: int) -> Tensor:
        ctx.axis, ctx.name, ctx.dim = axis, name, dim
        return _gather(x, axis, name, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(grad, ctx.axis, ctx.name, ctx.dim), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, name: str, dim: int) -> Tensor:
        ctx.axis, ctx.name, ctx.dim = axis, name, dim
        return _scatter(x, axis, name, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grad, ctx.axis, ctx.name, ctx.dim), None, None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, name: str, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(x, axis, name, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return own_part(grad, ctx.axis, dim=ctx.dim), None, None, None


class _SumReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, name: str) -> Tensor:
        return _sum(x, axis, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, name: str) -> Tensor:
        ctx.axis, ctx.name = axis, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum(grad, ctx.axis, ctx.name), None, None


Started = tuple[Tensor, Pending | None]
"""A collective under way, and where its result will be. Waiting for a traced one (None) is up to the compiler."""


def start_gather(x: Tensor, axis: Axis, name: str, *, async_op: bool = True) -> Started:
    """Begins to gather; what is queued between this and `finish_gather` runs beside it."""
    assert axis.group is not None
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _traced_all_gather(x, axis.size, axis.group.group_name), None
    parts = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    return parts, all_gather(parts, x, axis, f"{name}/all_gather", async_op=async_op)


def finish_gather(started: Started, axis: Axis, dim: int) -> Tensor:
    """[..., n, ...] -> [..., size * n, ...]. Along the first dim, or where those before it are 1, nothing is copied."""
    parts = _wait(started)
    dim %= parts.dim()
    if dim == 0:
        return parts
    return parts.unflatten(0, (axis.size, parts.shape[0] // axis.size)).movedim(0, dim).flatten(dim, dim + 1)


def start_scatter(x: Tensor, axis: Axis, name: str, dim: int, *, async_op: bool = True) -> Started:
    """Begins to sum [..., size * n, ...] into [..., n, ...]."""
    assert axis.group is not None
    dim %= x.dim()
    assert x.shape[dim] % axis.size == 0, f"dim {dim} of {tuple(x.shape)} over {axis.size} ranks"
    if dim:
        x = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0).flatten(0, 1)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return _traced_reduce_scatter(x, "sum", axis.size, axis.group.group_name), None
    part = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return part, reduce_scatter(part, x, axis, f"{name}/reduce_scatter", async_op=async_op)


def finish_scatter(started: Started) -> Tensor:
    return _wait(started)


def _wait(started: Started) -> Tensor:
    tensor, pending = started
    if pending is None:
        return _traced_wait(tensor)
    pending.wait()
    return tensor


def _gather(x: Tensor, axis: Axis, name: str, dim: int) -> Tensor:
    return finish_gather(start_gather(x, axis, name, async_op=False), axis, dim)


def _scatter(x: Tensor, axis: Axis, name: str, dim: int) -> Tensor:
    return finish_scatter(start_scatter(x, axis, name, dim, async_op=False))


def _sum(x: Tensor, axis: Axis, name: str) -> Tensor:
    return _reduce(x, axis, name, "sum")


def _reduce(x: Tensor, axis: Axis, name: str, what: Literal["sum", "max"]) -> Tensor:
    assert axis.group is not None
    if torch.compiler.is_compiling():
        return _traced_wait(_traced_all_reduce(x.contiguous(), what, axis.group.group_name))
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, axis, f"{name}/all_reduce", op=_OPERATIONS[what])
    return total


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
