"""The weights of a flat group, on their way from the shards of all ranks to where the model reads them.

KeptWeights      one buffer; all buckets are gathered when weights have changed, in the order of use
PassingWeights   memory for a bucket from its gather until it is let go, a block or two at a time: for weights of
                 which the model keeps another copy (in fp8)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.parallel.buckets import Bucket, Layout, Slot
from paceline.parallel.collectives import Axis, Pending, all_gather
from paceline.parallel.lanes import Lane
from paceline.parallel.reduction import family
from paceline.parallel.shard_state import ShardState

_FIRST = 4
"""Buckets that passing weights gather before the first block asks: a guess, a good part of a block."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """From where, over which ranks, beside what."""

    state: ShardState
    axis: Axis
    lane: Lane

    @property
    def layout(self) -> Layout:
        return self.state.layout

    def gather(self, whole: Tensor, shard: Tensor) -> Pending:
        """``whole`` [n * ranks] from each rank's ``shard`` [n], a part of it. To be called within the lane."""
        name = f"{family(self.axis)}/weights/all_gather"
        return all_gather(whole, shard, self.axis, name, async_op=not self.lane.asynchronous)

    def wait(self, pending: Pending, mark: torch.cuda.Event | None) -> None:
        pending.wait()
        timer = self.axis.traffic.timer
        if mark is None or timer is None:
            self.lane.wait(mark)
            return
        token = timer.resume(f"{family(self.axis)}/weights/all_gather")
        self.lane.wait(mark)
        timer.end_collective(token)


class FlatWeights(Protocol):
    """What a group needs of either."""

    def of(self, slot: Slot) -> Tensor:
        """A parameter's place, of its shape; readable where `wait_for` has been called and `release` has not."""

    def publish(self, *, cast: bool) -> None:
        """Main weights have changed. ``cast``: see `Engine`."""

    def wait_for(self, buckets: Iterable[int]) -> None:
        """The weights of these buckets are there for the current stream."""

    def release(self, buckets: Iterable[int]) -> None:
        """Nobody reads these buckets again before the next `publish`."""

    @property
    def nbytes(self) -> int:
        """Held now."""


class KeptWeights:
    """``buffer``: [layout.size], of which the state knows."""

    def __init__(self, buffer: Tensor, route: Route) -> None:
        self._buffer, self._route = buffer, route
        self._gathers: dict[int, tuple[Pending, torch.cuda.Event | None]] = {}

    def of(self, slot: Slot) -> Tensor:
        return self._buffer[slot.start : slot.end].view(slot.shape)

    def publish(self, *, cast: bool) -> None:
        route, state = self._route, self._route.state
        self.wait_for(range(len(route.layout.buckets)))
        if state.own_weights is None and route.layout.shard_degree == 1:
            return
        if state.offload:
            route.lane.drain()
        for bucket in reversed(route.layout.buckets):
            state.cast_for_sending(bucket)
            with route.lane.run():
                if cast or state.offload:
                    state.load_weights(bucket)
                # .data: the gather writes while a forward is under way; see Site.replace
                whole = self._buffer.data[bucket.start : bucket.end]
                pending = route.gather(whole, state.shard_of(self._buffer.data, bucket))
            self._gathers[bucket.index] = (pending, route.lane.mark())

    def wait_for(self, buckets: Iterable[int]) -> None:
        if not self._gathers:
            return
        for index in buckets:
            pending, mark = self._gathers.pop(index, (None, None))
            if pending is not None:
                self._route.wait(pending, mark)

    def release(self, buckets: Iterable[int]) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes


class PassingWeights:
    """In ``dtype``, which is not that of the main weights. Empty until somebody waits for them.

    Memory is taken and given back on the stream that computes, which waits for the gather in between.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, route: Route) -> None:
        self._route = route
        self._buckets: list[Tensor] = []
        self._places: dict[str, Tensor] = {}
        for bucket in route.layout.buckets:
            memory = torch.empty(bucket.size, dtype=dtype, device=device)
            # before it goes: torch makes no view of memory that is not there
            for slot in bucket.slots:
                self._places[slot.name] = memory[slot.start - bucket.start : slot.end - bucket.start].view(slot.shape)
            _free(memory)
            self._buckets.append(memory)
        self._stale = set(range(len(self._buckets)))
        """Buckets that are not what the main weights are, and that nobody has asked for since these changed."""
        self._gathers: dict[int, tuple[Pending, torch.cuda.Event | None]] = {}
        self._held: set[int] = set()

    def of(self, slot: Slot) -> Tensor:
        return self._places[slot.name]

    def publish(self, *, cast: bool) -> None:
        self._settle(list(self._gathers))
        self.release(list(self._held))
        self._stale = set(range(len(self._buckets)))
        self._start(self._next(_FIRST))

    def wait_for(self, buckets: Iterable[int]) -> None:
        wanted = sorted(set(buckets) & (self._stale | self._gathers.keys()), reverse=True)
        self._start([index for index in wanted if index in self._stale])
        # as much of what comes next, while these are at work
        self._start(self._next(len(wanted)))
        self._settle(wanted)

    def release(self, buckets: Iterable[int]) -> None:
        for index in self._held & set(buckets):
            _free(self._buckets[index])
            self._held.discard(index)

    @property
    def nbytes(self) -> int:
        return sum(bucket.untyped_storage().nbytes() for bucket in self._buckets)

    def _next(self, number: int) -> list[int]:
        """In the order of use, which is not that of the buffer."""
        return sorted(self._stale, reverse=True)[:number]

    @torch.no_grad()
    def _start(self, indices: Iterable[int]) -> None:
        for index in indices:
            bucket, whole = self._route.layout.buckets[index], self._buckets[index].data
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            with self._route.lane.run():
                shard = self._shard(bucket, whole)
                shard.copy_(self._route.state.weight_shard(bucket))
                pending = self._route.gather(whole, shard)
            self._stale.discard(index)
            self._gathers[index] = (pending, self._route.lane.mark())

    def _settle(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._route.wait(*self._gathers.pop(index))
            self._held.add(index)

    def _shard(self, bucket: Bucket, whole: Tensor) -> Tensor:
        layout = self._route.layout
        start = layout.shard_start(bucket, self._route.state.shard) - bucket.start
        return whole[start : start + layout.shard_size(bucket)]


def _free(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
