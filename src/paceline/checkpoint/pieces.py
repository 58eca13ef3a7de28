"""Which rectangular parts of a global tensor does this rank hold?

A checkpoint knows nothing of meshes or engines. Each rank says, for each name, which boxes of the global tensor it
holds; saving writes every box once, loading fills the boxes in place from whatever boxes were saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Private, in torch 2.11 to 2.13: where a rank's shard of a DTensor begins, also for strided and uneven shards. FSDP2,
# DCP and DTensor itself call it; there is no public way yet, and DTensor's own checkpoint protocol is private as well.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangular part of an N-dimensional tensor. A scalar's only box has no offsets and no sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: Box) -> Box | None:
        """What lies in both; None if nothing does."""
        starts = tuple(max(pair) for pair in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(start + size, begin + length)
            for start, size, begin, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(offsets=starts, sizes=sizes) if all(size > 0 for size in sizes) else None


T = TypeVar("T")


class BoxIndex(Generic[T]):
    """Finds which of many boxes of a tensor a box touches, without looking at all of them.

    Stacked layers and experts are thousands of boxes that are one thick in their first dims: those dims are the key.
    """

    def __init__(self, boxes: Sequence[tuple[Box, T]]) -> None:
        dims = len(boxes[0][0].sizes) if boxes else 0
        thin = [all(box.sizes[dim] == 1 for box, _ in boxes) for dim in range(dims)]
        self._lead = thin.index(False) if False in thin else dims
        self._found: dict[tuple[int, ...], list[tuple[Box, T]]] = {}
        for box, value in boxes:
            self._found.setdefault(box.offsets[: self._lead], []).append((box, value))

    def touched(self, box: Box) -> Iterator[tuple[Box, T]]:
        """(common part, value) of each that has one."""
        ranges = [
            range(offset, offset + size)
            for offset, size in zip(box.offsets[: self._lead], box.sizes[: self._lead], strict=True)
        ]
        for key in product(*ranges):
            for own, value in self._found.get(key, ()):
                common = own.common(box)
                if common is not None:
                    yield common, value


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of the global tensor that begins at ``offsets`` and is as large as ``tensor``.

    ``tensor`` is the memory itself, not a copy: loading writes into it.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    saved: bool = True
    """False: loading fills it, saving leaves it to other ranks, which may cut the tensor elsewhere."""

    def __post_init__(self) -> None:
        assert len(self.offsets) == self.tensor.dim(), (
            f"{self.offsets} for a tensor of shape {tuple(self.tensor.shape)}"
        )


@dataclass(frozen=True, kw_only=True)
class ShardedValue:
    """One named tensor as this rank sees it: its global shape, and the pieces of it that are here.

    All ranks together must hold every element in pieces that are saved; an element held by several ranks is written
    once, provided that they cut the tensor at the same places. A rank that holds nothing has no pieces (or empty ones,
    which are ignored).
    """

    global_shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            ends = (offset + size for offset, size in zip(piece.offsets, piece.tensor.shape, strict=True))
            fits = len(piece.offsets) == len(self.global_shape) and all(
                end <= size for end, size in zip(ends, self.global_shape, strict=True)
            )
            assert fits, f"piece {tuple(piece.tensor.shape)} at {piece.offsets} leaves {tuple(self.global_shape)}"

    @classmethod
    def from_full(cls, tensor: Tensor) -> ShardedValue:
        """The whole tensor is here (and, for all this rank knows, on others too)."""
        tensor = tensor.detach()
        piece = Piece(offsets=(0,) * tensor.dim(), tensor=tensor)
        return cls(global_shape=tensor.shape, dtype=tensor.dtype, pieces=(piece,))

    @classmethod
    def from_dtensor(cls, tensor: DTensor) -> ShardedValue:
        """The local shard of a DTensor; sharded or replicated over any number of mesh axes, never partial."""
        assert not any(placement.is_partial() for placement in tensor.placements), tensor.placements
        local = tensor.to_local().detach()
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        # of an empty shard (fewer rows than ranks) torch places the offset at or past the end: it holds nothing
        pieces = (Piece(offsets=tuple(offsets), tensor=local),) if local.numel() else ()
        return cls(global_shape=tensor.shape, dtype=tensor.dtype, pieces=pieces)

    @classmethod
    def from_flat_range(cls, flat: Tensor, global_shape: Sequence[int], start: int) -> ShardedValue:
        """Elements ``[start, start + flat.numel())`` of the flattened global tensor, held in the 1-D tensor ``flat``.

        The pieces are views of ``flat``.
        """
        assert flat.dim() == 1, tuple(flat.shape)
        flat = flat.detach()
        pieces, position = [], 0
        for box in boxes_of_range(global_shape, start, start + flat.numel()):
            part = flat[position : position + box.numel]
            pieces.append(Piece(offsets=box.offsets, tensor=part.view(box.sizes)))
            position += box.numel
        return cls(global_shape=torch.Size(global_shape), dtype=flat.dtype, pieces=tuple(pieces))

    def inside(self, whole: Sequence[int], offsets: Sequence[int], *, saved: bool = True) -> ShardedValue:
        """The same memory as pieces of a tensor of the shape ``whole``, in which this one begins at ``offsets``."""
        pieces = tuple(
            Piece(
                offsets=tuple(begin + offset for begin, offset in zip(offsets, piece.offsets, strict=True)),
                tensor=piece.tensor,
                saved=saved,
            )
            for piece in self.pieces
        )
        return ShardedValue(global_shape=torch.Size(whole), dtype=self.dtype, pieces=pieces)

    @property
    def num_local_bytes(self) -> int:
        return sum(piece.tensor.nbytes for piece in self.pieces)

    def map(self, function: Callable[[Tensor], Tensor]) -> ShardedValue:
        """The same places, with ``function`` (which keeps shapes) applied to the memory of each piece."""
        pieces = tuple(replace(piece, tensor=function(piece.tensor)) for piece in self.pieces)
        dtype = pieces[0].tensor.dtype if pieces else self.dtype
        return ShardedValue(global_shape=self.global_shape, dtype=dtype, pieces=pieces)


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements ``[start, end)`` of the flattened tensor of ``shape`` as few boxes, in flattened order.

    A range begins within a row, runs over full rows and ends within a row: the middle is one box, the two ends are the
    same question one dimension lower. So an N-dimensional tensor gives at most ``2 N - 1`` boxes, and each box is
    contiguous in the flattened order.

    >>> boxes_of_range((4, 3), 2, 8)   # the last element of row 0, row 1, two elements of row 2
    [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(1, 3)), Box(offsets=(2, 0), sizes=(1, 2))]
    """
    assert 0 <= start <= end <= math.prod(shape), f"[{start}, {end}) of {tuple(shape)}"
    if start == end:
        return []
    if not shape:
        return [Box(offsets=(), sizes=())]
    row_numel = math.prod(shape[1:])
    first_row, begins_within = divmod(start, row_numel)
    last_row, ends_within = divmod(end, row_numel)
    if first_row == last_row:
        return _boxes_in_row(shape, first_row, begins_within, ends_within)
    boxes = []
    if begins_within:
        boxes += _boxes_in_row(shape, first_row, begins_within, row_numel)
        first_row += 1
    if first_row < last_row:
        boxes.append(
            Box(offsets=(first_row,) + (0,) * (len(shape) - 1), sizes=(last_row - first_row, *shape[1:])),
        )
    if ends_within:
        boxes += _boxes_in_row(shape, last_row, 0, ends_within)
    return boxes


def _boxes_in_row(shape: Sequence[int], row: int, start: int, end: int) -> list[Box]:
    return [Box(offsets=(row, *box.offsets), sizes=(1, *box.sizes)) for box in boxes_of_range(shape[1:], start, end)]
