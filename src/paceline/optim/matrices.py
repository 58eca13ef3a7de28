"""How does a whole matrix come to one rank, and its replacement back to the ranks that hold parts of it?

Muon works on whole matrices, while the engines hold ranges of elements (flat) or blocks of rows (FSDP). Each matrix has
an owner in the group over which parameters are sharded: all send their pieces to the owner, which computes once for all
and sends each rank the pieces that it holds. An element travels twice, and the computing is shared out by cost. Stacked
experts are cut into runs of experts, so that no rank has to hold a whole layer of them. Under expert parallelism a
group has only some of a layer's experts: those are what is exchanged.

The plan is made once, from `MainParameter.pieces` of all ranks; it knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.parallel.engine import MainParameter

_ROUND_ELEMENTS = 64 * 2**20
"""Elements that a rank owns in one exchange, which bounds the buffers: 128 MiB in bf16, three of them. A larger matrix
makes a round of its own."""
_UNIT_ELEMENTS = 16 * 2**20
"""Elements of a run of stacked experts, at least one expert."""

Box = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Offsets and sizes in a parameter seen as [matrices, rows, columns]."""


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Matrices `[first, first + shape[0])` of a parameter, computed by the rank `owner` of the group."""

    name: str
    first: int
    shape: tuple[int, int, int]
    owner: int

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def cost(self) -> int:
        """Of orthogonalising: long side times short side squared."""
        return self.numel * min(self.shape[1:])

    def clip(self, box: Box) -> Box | None:
        """The part of `box` (in the parameter) that lies in this unit, with offsets in the parameter."""
        (first, row, column), (count, rows, columns) = box
        begin, end = max(first, self.first), min(first + count, self.first + self.shape[0])
        return ((begin, row, column), (end - begin, rows, columns)) if begin < end else None


class MatrixExchange:
    """Applies a function of whole matrices to tensors of which each rank holds pieces.

    Args:
        parameters: this rank's matrices, alone or stacked. Ranks may list different ones, in the same order.
        group: the ranks that together hold every element; None = this rank holds all.
        device: where buffers are and the function runs.
        wire_dtype: what is sent and what the function gets.
    """

    def __init__(
        self,
        parameters: Sequence[MainParameter],
        group: dist.ProcessGroup | None,
        *,
        device: torch.device,
        wire_dtype: torch.dtype,
    ) -> None:
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._group = group
        self._device = device
        self._dtype = wire_dtype
        self._rank = dist.get_rank(group) if group is not None else 0
        self._size = dist.get_world_size(group) if group is not None else 1
        mine = {
            name: (
                _stack_shape(parameter.global_shape),
                [box for box, _ in _stacked_parts(parameter.pieces(parameter.param.detach()))],
            )
            for name, parameter in self._parameters.items()
        }
        everyone = self._gather(mine)
        shapes = {name: shape for held in everyone for name, (shape, _) in held.items()}
        self._held: list[dict[str, list[Box]]] = [{n: boxes for n, (_, boxes) in held.items()} for held in everyone]
        self._sent = _without_copies(self._held)
        self._rounds = _plan({name: _stack_here(name, shape, self._sent) for name, shape in shapes.items()}, self._size)

    def _gather(self, value: dict[str, tuple[tuple[int, int, int], list[Box]]]) -> list[dict]:
        if self._group is None:
            return [value]
        everyone: list[dict] = [{} for _ in range(self._size)]
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    @torch.no_grad()
    def apply(self, tensors: dict[str, Tensor], function: Callable[[Tensor], Tensor]) -> None:
        """Replaces each tensor in place by its part of `function(whole)`. A collective call of the group.

        Args:
            tensors: parameter name -> tensor laid out like the parameter; those of other exchanges are left alone.
            function: [matrices, rows, columns] of `wire_dtype` -> the same shape.
        """
        views = {name: self._views(name, tensor) for name, tensor in tensors.items() if name in self._parameters}
        for units in self._rounds:
            whole = self._collect(units, views)
            results = [function(matrices) for matrices in whole]
            self._distribute(units, results, views)

    def _views(self, name: str, tensor: Tensor) -> list[Tensor]:
        return [view for _, view in _stacked_parts(self._parameters[name].pieces(tensor))]

    def _collect(self, units: Sequence[_Unit], views: dict[str, list[Tensor]]) -> list[Tensor]:
        """The whole matrices of the units that this rank owns."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self._size)]
        for unit in units:
            for box, part in self._local_parts(unit, views):
                if box in self._sent[self._rank].get(unit.name, ()):
                    outgoing[unit.owner].append(part)
        owned = [unit for unit in units if unit.owner == self._rank]
        whole = [torch.zeros(unit.shape, device=self._device, dtype=self._dtype) for unit in owned]
        incoming = [
            [part for unit, into in zip(owned, whole, strict=True) for part in _parts(unit, sent, into)]
            for sent in self._sent
        ]
        self._exchange(outgoing, incoming)
        return whole

    def _distribute(self, units: Sequence[_Unit], results: Sequence[Tensor], views: dict[str, list[Tensor]]) -> None:
        owned = [unit for unit in units if unit.owner == self._rank]
        outgoing = [
            [part for unit, result in zip(owned, results, strict=True) for part in _parts(unit, held, result)]
            for held in self._held
        ]
        incoming: list[list[Tensor]] = [[] for _ in range(self._size)]
        for unit in units:
            incoming[unit.owner].extend(part for _, part in self._local_parts(unit, views))
        self._exchange(outgoing, incoming)

    def _local_parts(self, unit: _Unit, views: dict[str, list[Tensor]]) -> list[tuple[Box, Tensor]]:
        """This rank's pieces of the unit, each with the (unclipped) box that it comes from."""
        boxes = self._held[self._rank].get(unit.name, [])
        found = []
        for box, view in zip(boxes, views.get(unit.name, []), strict=True):
            clipped = unit.clip(box)
            if clipped is not None:
                found.append((box, view.narrow(0, clipped[0][0] - box[0][0], clipped[1][0])))
        return found

    def _exchange(self, outgoing: list[list[Tensor]], incoming: list[list[Tensor]]) -> None:
        """Sends `outgoing[rank]` to each rank and fills `incoming[rank]` from it."""
        send = self._pack([part for parts in outgoing for part in parts])
        if self._group is None:
            received = send
        else:
            splits_in = [sum(part.numel() for part in parts) for parts in incoming]
            splits_out = [sum(part.numel() for part in parts) for parts in outgoing]
            received = torch.empty(sum(splits_in), device=self._device, dtype=self._dtype)
            dist.all_to_all_single(received, send, splits_in, splits_out, group=self._group)
        position = 0
        for part in (part for parts in incoming for part in parts):
            part.copy_(received[position : position + part.numel()].view(part.shape))
            position += part.numel()

    def _pack(self, parts: Sequence[Tensor]) -> Tensor:
        buffer = torch.empty(sum(part.numel() for part in parts), device=self._device, dtype=self._dtype)
        position = 0
        for part in parts:
            buffer[position : position + part.numel()].view(part.shape).copy_(part)
            position += part.numel()
        return buffer


def _stack_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """[matrices, rows, columns] of one matrix [a, b], stacked ones [E, a, b], or pairs of stacked ones [E, M, a, b]."""
    assert 2 <= len(shape) <= 4, f"a matrix or stacked matrices, not {tuple(shape)}"
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _stacked_parts(value: ShardedValue) -> list[tuple[Box, Tensor]]:
    """The pieces as boxes of the stack of matrices, with views of their memory; empty ones left out."""
    parts: list[tuple[Box, Tensor]] = []
    for piece in value.pieces:
        tensor, offsets = piece.tensor, piece.offsets
        if not tensor.numel():
            continue
        if tensor.dim() == 2:
            tensor, offsets = tensor.unsqueeze(0), (0, *offsets)
        if tensor.dim() == 3:
            parts.append(_part(offsets[0], offsets[1:], tensor))
            continue
        per_expert = value.global_shape[1]
        if tensor.shape[1] == per_expert:
            parts.append(_part(offsets[0] * per_expert, offsets[2:], tensor.flatten(0, 1)))
        else:
            for index, expert in enumerate(tensor.unbind(0), start=offsets[0]):
                parts.append(_part(index * per_expert + offsets[1], offsets[2:], expert))
    return parts


def _part(first: int, corner: tuple[int, ...], tensor: Tensor) -> tuple[Box, Tensor]:
    count, rows, columns = tensor.shape
    return ((first, corner[0], corner[1]), (count, rows, columns)), tensor


def _parts(unit: _Unit, boxes: dict[str, list[Box]], whole: Tensor) -> list[Tensor]:
    """Views of the unit's whole matrices at a rank's boxes, in the order in which that rank lists them."""
    parts = []
    for box in boxes.get(unit.name, []):
        clipped = unit.clip(box)
        if clipped is not None:
            (first, row, column), (count, rows, columns) = clipped
            begin = first - unit.first
            parts.append(whole[begin : begin + count, row : row + rows, column : column + columns])
    return parts


def _without_copies(held: Sequence[dict[str, list[Box]]]) -> list[dict[str, list[Box]]]:
    """What each rank sends: of a box that several ranks hold, only the first one's."""
    seen: set[tuple[str, Box]] = set()
    sent: list[dict[str, list[Box]]] = []
    for boxes_by_name in held:
        mine: dict[str, list[Box]] = {}
        for name, boxes in boxes_by_name.items():
            mine[name] = [box for box in boxes if (name, box) not in seen]
            seen.update((name, box) for box in boxes)
        sent.append(mine)
    return sent


def _stack_here(
    name: str, shape: tuple[int, int, int], sent: Sequence[dict[str, list[Box]]]
) -> tuple[int, tuple[int, int, int]]:
    """The first matrix that the group has, and [matrices, rows, columns] of all that it has."""
    boxes = [box for held in sent for box in held.get(name, [])]
    first = min(box[0][0] for box in boxes)
    here = (max(box[0][0] + box[1][0] for box in boxes) - first, *shape[1:])
    assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(here), f"{name}: the group has no whole matrices"
    return first, here


def _plan(stacks: dict[str, tuple[int, tuple[int, int, int]]], size: int) -> list[list[_Unit]]:
    """Units with their owners, in rounds; the same on every rank.

    Each unit, dearest first, goes to the rank with the least work so far.
    """
    units = []
    for name, (begin, (count, rows, columns)) in stacks.items():
        step = min(count, max(_UNIT_ELEMENTS // (rows * columns), 1))
        step = min(step, -(-count // size))  # also share a layer's experts out among the ranks
        units += [
            _Unit(name=name, first=begin + first, shape=(min(step, count - first), rows, columns), owner=-1)
            for first in range(0, count, step)
        ]
    work = [0] * size
    owned: list[list[_Unit]] = [[] for _ in range(size)]
    for unit in sorted(units, key=lambda unit: -unit.cost):
        owner = work.index(min(work))
        work[owner] += unit.cost
        owned[owner].append(_Unit(name=unit.name, first=unit.first, shape=unit.shape, owner=owner))
    per_rank = [_in_rounds(mine) for mine in owned]
    return [
        [unit for rounds in per_rank if index < len(rounds) for unit in rounds[index]]
        for index in range(max((len(rounds) for rounds in per_rank), default=0))
    ]


def _in_rounds(units: Sequence[_Unit]) -> list[list[_Unit]]:
    rounds: list[list[_Unit]] = []
    elements = 0
    for unit in units:
        if not rounds or elements + unit.numel > _ROUND_ELEMENTS:
            rounds.append([])
            elements = 0
        rounds[-1].append(unit)
        elements += unit.numel
    return rounds
