"""How a bucket of gradients becomes this rank's part of the sum over all ranks that have a part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.parallel.collectives import Axis, Pending, all_reduce, reduce_scatter


class GradientReducer(Protocol):
    """What the flat engine hands its buckets to. A compressor is another one of these."""

    def start(self, bucket: Tensor, shard: Tensor, *, async_op: bool) -> Callable[[], None]:
        """Begins to sum a bucket; called for the same buckets in the same order on every rank.

        Args:
            bucket: [n], gradients of this rank. Its contents outside ``shard`` are not needed afterwards.
            shard: [n / size of the shard axis], the view of ``bucket`` that the sum is to be in.
            async_op: return at once, and let the returned function wait; otherwise the current stream may wait.

        Returns:
            What makes the sum be there for the current stream. Called once, in the order of the starts.
        """


class SumReducer:
    """Reduce-scatter over the shard axis, then all-reduce of the shard over each replicate axis.

    Any axis may have size 1; with no shards this is plain DDP's all-reduce. SUM, never a mean: the loss is already
    divided by the tokens of all ranks. Ranks of a replicate axis end with the same bits.
    """

    def __init__(self, shard_axis: Axis, replicate_axes: Sequence[Axis], dtype: torch.dtype) -> None:
        self._shard_axis = shard_axis
        self._replicate_axes = [axis for axis in replicate_axes if axis.size > 1]
        self._dtype = dtype

    def start(self, bucket: Tensor, shard: Tensor, *, async_op: bool) -> Callable[[], None]:
        if self._shard_axis.size == 1 and not self._replicate_axes:
            return _nothing
        message = bucket.to(self._dtype)
        rest = self._replicate_axes
        if self._shard_axis.size == 1:
            output = message
            pending = _all_reduce(message, rest[0], async_op=async_op)
            rest = rest[1:]
        else:
            # NCCL reduces into a part of its own input; gloo would overwrite what it still reads
            in_place = message is bucket and bucket.is_cuda
            output = shard if in_place else message.new_empty(shard.shape)
            name = gradient_collective(self._shard_axis, "reduce_scatter")
            pending = reduce_scatter(output, message, self._shard_axis, name, async_op=async_op)

        def finish() -> None:
            pending.wait()
            # keeps the message alive until it was sent
            for axis in rest:
                _all_reduce(output, axis, async_op=False)
            if output.data_ptr() != shard.data_ptr() or output.dtype != shard.dtype:
                shard.copy_(output)

        return finish


def gradient_collective(axis: Axis, kind: str) -> str:
    """``dp/gradients/reduce_scatter``: all axes that are made of dp_replicate, dp_shard and cp are called dp here."""
    return f"{family(axis)}/gradients/{kind}"


def family(axis: Axis) -> str:
    """dp, edp, tp or ends: the axis without what it is joined with or used for."""
    return axis.name.partition("_")[0]


def _all_reduce(tensor: Tensor, axis: Axis, *, async_op: bool) -> Pending:
    return all_reduce(tensor, axis, gradient_collective(axis, "all_reduce"), async_op=async_op)


def _nothing() -> None:
    return
