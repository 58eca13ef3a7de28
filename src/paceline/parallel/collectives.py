"""Every collective of ours has a name and a size, and is counted.

The name says who talks about what (``dp/gradients/reduce_scatter``); `costs` predicts the same names. An axis of size 1
never talks: each function then does what the collective would have done, at the cost of at most a copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from paceline.observe.phases import CollectiveTimer

# torch 2.13 renamed them and warns at the old names; 2.11 has only those
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Traffic:
    """How often each named collective ran on this rank, and the bytes of its full tensor (not what crosses a wire).

    ``timer``, where there is one, is told how long each holds its caller up.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.timer: CollectiveTimer | None = None

    def record(self, name: str, num_bytes: int) -> None:
        self.calls[name] += 1
        self.bytes[name] += num_bytes

    def take(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) by name since the last take."""
        taken = {name: (self.calls[name], self.bytes[name]) for name in self.calls}
        self.calls.clear()
        self.bytes.clear()
        return taken


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks along one axis of the mesh that this rank belongs to. ``group`` is None if it is alone."""

    name: str
    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None = field(repr=False, default=None)
    traffic: Traffic = field(repr=False, default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @classmethod
    def alone(cls, name: str, rank: int = 0) -> Axis:
        """An axis of size 1."""
        return cls(name=name, ranks=(rank,), index=0)


class Pending:
    """A collective under way. ``wait`` makes the current stream (on the CPU: the caller) wait for it, once."""

    def __init__(self, work: dist.Work | None = None, timer: CollectiveTimer | None = None, name: str = "") -> None:
        self._work = work
        self._timer, self._name = timer, name

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        if self._timer is None:
            work.wait()
            return
        token = self._timer.resume(self._name)
        work.wait()
        self._timer.end_collective(token)


def all_reduce(
    tensor: Tensor, axis: Axis, name: str, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, async_op: bool = False
) -> Pending:
    """``tensor`` becomes the sum (or what ``op`` says) over the axis, in place."""
    if axis.group is None:
        return Pending()
    with span(axis, name, tensor.nbytes):
        return Pending(dist.all_reduce(tensor, op=op, group=axis.group, async_op=async_op), axis.traffic.timer, name)


def reduce_scatter(output: Tensor, tensor: Tensor, axis: Axis, name: str, *, async_op: bool = False) -> Pending:
    """``output`` [n / size] becomes this rank's part of the sum of ``tensor`` [n] over the axis.

    With NCCL ``output`` may be that part of ``tensor`` itself; gloo needs memory of its own.
    """
    assert output.numel() * axis.size == tensor.numel(), (tuple(output.shape), tuple(tensor.shape), axis.size)
    if axis.group is None:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return Pending()
    with span(axis, name, tensor.nbytes):
        return Pending(_reduce_scatter(output, tensor, group=axis.group, async_op=async_op), axis.traffic.timer, name)


def all_gather(output: Tensor, tensor: Tensor, axis: Axis, name: str, *, async_op: bool = False) -> Pending:
    """``output`` [n * size] becomes the ``tensor`` [n] of every rank of the axis, in order; it may hold ``tensor``."""
    assert output.numel() == tensor.numel() * axis.size, (tuple(output.shape), tuple(tensor.shape), axis.size)
    if axis.group is None:
        if output.data_ptr() != tensor.data_ptr():
            output.copy_(tensor)
        return Pending()
    with span(axis, name, output.nbytes):
        return Pending(_all_gather(output, tensor, group=axis.group, async_op=async_op), axis.traffic.timer, name)


def broadcast(tensor: Tensor, axis: Axis, name: str, *, source: int = 0) -> None:
    """``tensor`` becomes what the rank of index ``source`` on the axis holds, in place."""
    if axis.group is None:
        return
    with span(axis, name, tensor.nbytes):
        dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)


def all_reduce_number(
    value: float, axis: Axis, name: str, device: torch.device, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> float:
    """The sum of a Python number over the axis, in float64. Waits for the device: not for every step."""
    if axis.group is None:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    all_reduce(tensor, axis, name, op=op)
    return tensor.item()


def span(axis: Axis, name: str, num_bytes: int) -> Span | record_function:
    """Around a collective, from its call until its caller may go on: counted, named in a profile, and timed."""
    axis.traffic.record(name, num_bytes)
    timer = axis.traffic.timer
    return record_function(name) if timer is None else Span(timer, name, num_bytes)


class Span:
    """A span in a profile, and its time for who listens."""

    def __init__(self, timer: CollectiveTimer, name: str, num_bytes: int) -> None:
        self._timer, self._named, self._begun = timer, record_function(name), (name, num_bytes)

    def __enter__(self) -> None:
        self._named.__enter__()
        self._token = self._timer.begin(*self._begun)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.end_collective(self._token)
        self._named.__exit__(kind, error, trace)
