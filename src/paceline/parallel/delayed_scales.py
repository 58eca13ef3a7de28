"""Scales of fp8 operands from the largest numbers of earlier steps: who keeps them, and when they change.

    casts of a step      each leaves its tensor's largest number in a buffer          `kernels/fp8_delayed.py`
    after the update     the maximum over the ranks of a stage (one collective), pushed into a history of some steps;
                         factors for the next step: the largest power of two that leaves the history's maximum in range

So all micro-batches of a step cast by the same factors, whatever the layout and whatever is computed again. A tensor is
known by its layer, and is the input of joined linears or the gradient of their output.

- A step that is skipped pushes nothing, and numbers that are not finite are never pushed.
- One step raises a history by a factor of `RISE` at most. A single stray number would otherwise push all others of its
  tensor below what fp8 can show, for as long as the history remembers it; numbers that do grow are followed in a few
  steps.
- A tensor of nothing but zeros pushes nothing either: zeros say nothing of the range. What is known stays known.
- Until there is something, each cast takes the scale of the tensor before it.

Histories are part of a checkpoint. Nothing here waits for the device.

Dims: T tensors (inputs, then gradients, layer by layer), H steps of history.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.kernels.fp8_cast import E4M3, E5M2, multiplier
from paceline.kernels.fp8_delayed import FACTOR, LARGEST, SCALE, WIDTH, Delayed, DelayedPair
from paceline.parallel.collectives import Axis, all_reduce

RISE = 64.0
"""6 of the 18 binades of e4m3 at most are lost to one step's largest number."""


class Scaled(Protocol):
    """Joined linears."""

    delayed: DelayedPair | None


class DelayedScales:
    """Of all fp8 linears of a rank. Life: `add`, `settle`; after each update `advance`.

    Args:
        history: steps whose largest numbers count.
    """

    def __init__(self, history: int) -> None:
        self._members: dict[str, Scaled] = {}
        self._steps = history
        self._axis: Axis | None = None

    def add(self, name: str, member: Scaled) -> None:
        """``name``: the same in every layout."""
        assert name not in self._members, name
        self._members[name] = member

    def settle(self, device: torch.device, axis: Axis) -> None:
        """Gives every member its state.

        Args:
            axis: the ranks that have the same members, and parts or copies of their tensors.
        """
        count = 2 * len(self._members)
        self._axis = axis
        self._history = torch.zeros(count, self._steps, device=device)
        self._state = torch.zeros(count, WIDTH, device=device)
        self._known = torch.zeros(count, dtype=torch.bool, pin_memory=device.type == "cuda")
        self._is_gradient = torch.arange(count, device=device) % 2 == 1
        for index, member in enumerate(self._members.values()):
            first, second = (Delayed(self._state[place], self._known[place]) for place in (2 * index, 2 * index + 1))
            member.delayed = DelayedPair(input=first, gradient=second)

    @torch.no_grad()
    def advance(self, finite: Tensor) -> None:
        """The step is over. Collective.

        Args:
            finite: bool scalar on the device, the same on all ranks: the step was not skipped.
        """
        if not self._members or self._axis is None:
            return
        largest = self._state[:, LARGEST].clone()
        all_reduce(largest, self._axis, "stage/fp8/largest", op=dist.ReduceOp.MAX)
        counts = finite & largest.isfinite() & (largest > 0)
        top = self._history.amax(dim=1)
        pushes = torch.where(top > 0, torch.minimum(largest, RISE * top), largest)
        pushed = torch.cat((pushes[:, None], self._history[:, :-1]), dim=1)
        self._history.copy_(torch.where(counts[:, None], pushed, self._history))
        self.forget()
        self.refresh()

    def forget(self) -> None:
        """What has been seen since the last step counts for nothing."""
        if self._members:
            self._state[:, LARGEST] = 0

    @torch.no_grad()
    def refresh(self) -> None:
        """Factors follow the history, also one that has been loaded."""
        if not self._members:
            return
        top = self._history.amax(dim=1)
        factor = torch.where(self._is_gradient, multiplier(top, E5M2), multiplier(top, E4M3))
        factor = torch.where(top > 0, factor, 0.0)
        self._state[:, FACTOR] = factor
        self._state[:, SCALE] = factor.reciprocal()
        # on a GPU it arrives some time later, and never before the factors are there for what is issued then
        self._known.copy_(factor > 0, non_blocking=True)

    def values(self) -> dict[str, ShardedValue]:
        """[2, H] by name, input and gradient: what a checkpoint keeps. Loading fills the pieces, then `refresh`."""
        return {
            name: ShardedValue.from_full(self._history[2 * index : 2 * index + 2])
            for index, name in enumerate(self._members)
        }
