"""How a bucket of gradients becomes this rank's part of the sum over all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
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
    """Reduce-scatter over the shard axis, then all-reduce of the shard over the replicate axis.

    Either axis may have size 1; with no shards this is plain DDP's all-reduce. SUM, never a mean: the loss is already
    divided by the tokens of all ranks.
    """

    def __init__(
        self, shard_axis: Axis, replicate_axis: Axis, dtype: torch.dtype, *, name: str = "dp/gradients"
    ) -> None:
        self._shard_axis, self._replicate_axis = shard_axis, replicate_axis
        self._dtype, self._name = dtype, name

    def start(self, bucket: Tensor, shard: Tensor, *, async_op: bool) -> Callable[[], None]:
        if self._shard_axis.size == self._replicate_axis.size == 1:
            return _nothing
        message = bucket.to(self._dtype)
        if self._shard_axis.size == 1:
            output = message
            pending = self._all_reduce(message, async_op=async_op)
        else:
            # NCCL reduces into a part of its own input; gloo would overwrite what it still reads
            in_place = message is bucket and bucket.is_cuda
            output = shard if in_place else message.new_empty(shard.shape)
            name = f"{self._name}/reduce_scatter"
            pending = reduce_scatter(output, message, self._shard_axis, name, async_op=async_op)

        def finish() -> None:
            pending.wait()
            # keeps the message alive until it was sent
            if self._shard_axis.size > 1 and self._replicate_axis.size > 1:
                self._all_reduce(output, async_op=False)
            if output.data_ptr() != shard.data_ptr() or output.dtype != shard.dtype:
                shard.copy_(output)

        return finish

    def _all_reduce(self, tensor: Tensor, *, async_op: bool) -> Pending:
        return all_reduce(tensor, self._replicate_axis, f"{self._name}/all_reduce", async_op=async_op)


def _nothing() -> None:
    return
