"""How do hidden states and their gradients get from one pipeline rank to another?

Every ordered pair of ranks that talks is a *channel* with messages in one order, which both ends read off the action
lists: the sender's own order. So a receiver knows what comes next, posts its buffer before it needs it, and nothing is
ever matched wrongly.

A communicator carries at most one channel of each rank, in one direction: on NCCL whatever shares a communicator runs
one after the other, and a receive that was posted early would hold up a send that its peer is waiting for. Four
communicators are enough for a chain (six for a loop over an odd number of ranks), whatever its length.

The first runs go through host memory. A receive that was posted early is a kernel that spins until its message comes;
CUDA loads a kernel at its first use and may wait for the device to be idle before it does (CUDA's guide, "Lazy
loading"), as compiling and tuning do. While a rank meets its kernels for the first time, nothing may spin on its
device: the message that ends the spinning may be what the new kernel is needed for.

How long a sent tensor is kept: until something arrives from the same rank that it can only have made after taking ours,
or until the communicator says that it is gone. Neither ever waits for a rank that may be waiting for us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.config.parallel import ParallelConfig
from paceline.costs.grid import RankGrid
from paceline.costs.pipeline import Action, Actions
from paceline.parallel.collectives import span
from paceline.parallel.mesh import ParallelMesh

Channel = tuple[int, int]
"""(sender, receiver), as indices on the `pp` axis."""


class Message(NamedTuple):
    """A hidden state on its way to ``stage``, or the gradient of what ``stage`` gave on its way back to it."""

    way: Literal["forward", "backward"]
    stage: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message between two ranks: where in the action lists it is made and used."""

    message: Message
    channel: Channel
    made_at: int
    """Index of the action of its sender."""
    used_at: int
    """Index of the action of its receiver."""


def message_after(action: Action, last_stage: int) -> Message | None:
    """What an action has to tell a neighbouring stage."""
    if action.kind == "F" and action.stage < last_stage:
        return Message("forward", action.stage + 1, action.micro_batch)
    if action.kind in ("B", "I") and action.stage > 0:
        return Message("backward", action.stage - 1, action.micro_batch)
    return None


def sent_between_ranks(lists: Sequence[Actions]) -> list[Sent]:
    """All messages that leave a rank; those of one channel in the order of their sending."""
    home = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    used: dict[Message, int] = {}
    for actions in lists:
        for index, action in enumerate(actions):
            if action.kind != "W":
                way: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
                used[Message(way, action.stage, action.micro_batch)] = index
    found = []
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            message = message_after(action, last_stage=len(home) - 1)
            if message is not None and home[message.stage] != rank:
                channel = (rank, home[message.stage])
                found.append(Sent(message=message, channel=channel, made_at=index, used_at=used[message]))
    return found


def communicators(channels: Iterable[Channel]) -> dict[Channel, int]:
    """Which communicator each channel is on: no rank has two channels on one."""
    taken: list[set[int]] = []
    found = {}
    for channel in sorted(channels, key=lambda pair: (pair[0] > pair[1], pair)):
        number = next((index for index, ranks in enumerate(taken) if not ranks & set(channel)), len(taken))
        if number == len(taken):
            taken.append(set())
        taken[number] |= set(channel)
        found[channel] = number
    return found


class Links:
    """The channels of this rank. Making them is collective over all ranks of the world.

    Args:
        channels: all of one pipeline, the same on every rank.
    """

    def __init__(self, mesh: ParallelMesh, config: ParallelConfig, channels: Iterable[Channel]) -> None:
        self._axis = mesh["pp"]
        self._device = torch.device(mesh.device_type)
        numbers = communicators(channels)
        groups = self._groups(mesh, config, max(numbers.values(), default=-1) + 1)
        own = self._axis.index
        self._group_to = {receiver: groups[number] for (sender, receiver), number in numbers.items() if sender == own}
        self._group_from = {sender: groups[number] for (sender, receiver), number in numbers.items() if receiver == own}
        for channel in sorted(numbers):
            self._meet(channel, groups[numbers[channel]])

    def _groups(self, mesh: ParallelMesh, config: ParallelConfig, count: int) -> list[dist.ProcessGroup]:
        own: list[dist.ProcessGroup] = []
        lines = RankGrid(parallel=config, world_size=mesh.world_size).groups("pp")
        for _ in range(count):
            # every rank makes every group, in the same order, also those it is not in: torch asks for it
            for line in lines:
                group = dist.new_group(list(line))
                if self._axis.ranks == tuple(line):
                    own.append(group)
        assert len(own) == count, f"rank {mesh.rank} is on no pipeline of {lines}"
        return own

    def _meet(self, channel: Channel, group: dist.ProcessGroup) -> None:
        """The first message of a channel sets up its connection, on both ends at once: one channel after the other."""
        sender, receiver = channel
        hello = torch.ones(1, device=self._device)
        if sender == self._axis.index:
            _isend(hello, self._axis.ranks[receiver], group).wait()
        elif receiver == self._axis.index:
            _irecv(hello, self._axis.ranks[sender], group).wait()

    def begin(
        self, sent: Sequence[Sent], shape: torch.Size, dtype: torch.dtype, *, through_host: bool = False
    ) -> Exchange:
        """Opens the channels for one run through the action lists. All tensors have the same shape and dtype.

        Args:
            through_host: the same on all ranks.
        """
        return Exchange(self, sent, shape, dtype, through_host=through_host)

    def isend(self, message: Message, tensor: Tensor, receiver: int) -> dist.Work:
        with span(self._axis, f"pp/{message.way}/send", tensor.nbytes):
            return _isend(tensor, self._axis.ranks[receiver], self._group_to[receiver])

    def irecv(
        self, message: Message, shape: torch.Size, dtype: torch.dtype, sender: int, device: torch.device
    ) -> tuple[dist.Work, Tensor]:
        buffer = torch.empty(shape, dtype=dtype, device=device)
        with span(self._axis, f"pp/{message.way}/receive", buffer.nbytes):
            return _irecv(buffer, self._axis.ranks[sender], self._group_from[sender]), buffer

    @property
    def index(self) -> int:
        return self._axis.index

    @property
    def device(self) -> torch.device:
        return self._device


class Exchange:
    """The messages of one step on this rank."""

    def __init__(
        self, links: Links, sent: Sequence[Sent], shape: torch.Size, dtype: torch.dtype, *, through_host: bool
    ) -> None:
        self._links, self._shape, self._dtype = links, shape, dtype
        self._wire = torch.device("cpu") if through_host else links.device
        self._of: Mapping[Message, Sent] = {each.message: each for each in sent}
        self._expected: dict[int, deque[Message]] = {}
        for each in sent:
            if each.channel[1] == links.index:
                self._expected.setdefault(each.channel[0], deque()).append(each.message)
        self._posted: dict[Message, tuple[dist.Work, Tensor]] = {}
        self._outgoing: dict[int, deque[tuple[int, dist.Work, Tensor]]] = {}
        for sender in self._expected:
            self._post_next(sender)

    def send(self, message: Message, tensor: Tensor) -> None:
        each = self._of[message]
        receiver = each.channel[1]
        assert tensor.shape == self._shape and tensor.dtype == self._dtype, (
            f"{message} is {tuple(tensor.shape)} {tensor.dtype}, not {tuple(self._shape)} {self._dtype}"
        )
        tensor = tensor.detach().contiguous().to(self._wire)
        waiting = self._outgoing.setdefault(receiver, deque())
        while waiting and waiting[0][1].is_completed():
            waiting.popleft()
        waiting.append((each.used_at, self._links.isend(message, tensor, receiver), tensor))

    def receive(self, message: Message) -> Tensor:
        """Waits for a message, and posts a buffer for the one after it. On a GPU its stream alone waits, unless the
        message comes through the host."""
        each = self._of[message]
        sender = each.channel[0]
        while message not in self._posted:
            self._post_next(sender)
        work, tensor = self._posted.pop(message)
        work.wait()
        self._release(sender, each.made_at)
        if not any(self._of[posted].channel[0] == sender for posted in self._posted):
            self._post_next(sender)
        return tensor.to(self._links.device)

    def finish(self) -> None:
        """After the last action: everything that was sent has been received."""
        assert not self._posted and not any(self._expected.values()), "messages were not received"
        for waiting in self._outgoing.values():
            for _, work, _ in waiting:
                work.wait()
        self._outgoing.clear()

    def _post_next(self, sender: int) -> None:
        if self._expected[sender]:
            message = self._expected[sender].popleft()
            self._posted[message] = self._links.irecv(message, self._shape, self._dtype, sender, self._wire)

    def _release(self, peer: int, made_at: int) -> None:
        """What ``peer`` used in actions before number ``made_at`` has left: the wait returns at once."""
        waiting = self._outgoing.get(peer, deque())
        while waiting and waiting[0][0] <= made_at:
            waiting.popleft()[1].wait()


def _isend(tensor: Tensor, receiver: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.isend(tensor, dst=receiver, group=group)
    assert work is not None
    return work


def _irecv(tensor: Tensor, sender: int, group: dist.ProcessGroup) -> dist.Work:
    work = dist.irecv(tensor, src=sender, group=group)
    assert work is not None
    return work
