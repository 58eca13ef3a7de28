"""Which part of our tensor is which part of theirs?

A link says that a box of one of our tensors holds the same numbers as a box of one of theirs: possibly transposed, with
rows in another order, and with leading indices (a layer, an expert) that one side has and the other has not. All of
conversion is reading and writing boxes through links, so no tensor needs to be whole anywhere, in either direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box, BoxIndex


class RawSource(Protocol):
    """Tensors under the names of their file format."""

    def shapes(self) -> Mapping[str, torch.Size]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, box: Box) -> Tensor: ...


class RawSink(Protocol):
    """Takes boxes of tensors under the names of a file format, from any number of threads."""

    def write(self, name: str, box: Box, value: Tensor) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Link:
    """``ours_at`` of our tensor is ``theirs_at`` of theirs.

    The first ``ours_lead`` dims of our box, and the first ``theirs_lead`` of theirs, have size 1 and are only indices.
    What remains has the same sizes on both sides, after a transposition if there is one.
    """

    ours_at: Box
    theirs: str
    theirs_at: Box
    ours_lead: int = 0
    theirs_lead: int = 0
    transposed: bool = False
    rows: Tensor | None = field(default=None, compare=False)
    """int64: row i of our part is row ``rows[i]`` of their part."""

    def read(self, source: RawSource, box: Box) -> Tensor:
        """The numbers of ``box``, a part of ``ours_at``, in the shape of the box."""
        inner = self._inner(box)
        order: Tensor | None = None
        if self.rows is not None:
            wanted = self.rows[inner.offsets[0] : inner.offsets[0] + inner.sizes[0]]
            first = int(wanted.min())
            order = wanted - first
            inner = _with_rows(inner, first, int(wanted.max()) + 1 - first)
        value = source.read(self.theirs, self._their_box(inner)).reshape(
            inner.sizes[::-1] if self.transposed else inner.sizes
        )
        if self.transposed:
            value = value.T
        if order is not None:
            value = value.index_select(0, order)
        return value.reshape(box.sizes)

    def write(self, sink: RawSink, box: Box, value: Tensor) -> None:
        """Hands ``value``, the numbers of ``box``, to where they belong on their side."""
        inner = self._inner(box)
        value = value.reshape(inner.sizes)
        for part, rows in self._runs(inner, value):
            flipped = part.T.contiguous() if self.transposed else part.contiguous()
            target = self._their_box(rows)
            sink.write(self.theirs, target, flipped.reshape(target.sizes))

    def ours_of(self, box: Box) -> Box:
        """The part of ours that a part of ``theirs_at`` is made of; all of it where rows are in another order."""
        if self.rows is not None:
            return self.ours_at
        offsets = tuple(start - own for start, own in zip(box.offsets, self.theirs_at.offsets, strict=True))
        offsets, sizes = offsets[self.theirs_lead :], box.sizes[self.theirs_lead :]
        if self.transposed:
            offsets, sizes = offsets[::-1], sizes[::-1]
        lead, base = self.ours_at.offsets[: self.ours_lead], self.ours_at.offsets[self.ours_lead :]
        moved = tuple(start + offset for start, offset in zip(base, offsets, strict=True))
        return Box(offsets=(*lead, *moved), sizes=(*(1 for _ in lead), *sizes))

    def _runs(self, inner: Box, value: Tensor) -> Iterator[tuple[Tensor, Box]]:
        """Parts of ``value`` whose rows follow each other on their side."""
        if self.rows is None:
            yield value, inner
            return
        places = self.rows[inner.offsets[0] : inner.offsets[0] + inner.sizes[0]]
        places, order = places.sort()
        value = value.index_select(0, order)
        breaks = ((places[1:] - places[:-1]) != 1).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(places)]
        for start, end in pairwise(bounds):
            yield value[start:end], _with_rows(inner, int(places[start]), end - start)

    def _inner(self, box: Box) -> Box:
        """``box`` relative to our part, without leading indices."""
        offsets = tuple(b - own for b, own in zip(box.offsets, self.ours_at.offsets, strict=True))
        return Box(offsets=offsets[self.ours_lead :], sizes=box.sizes[self.ours_lead :])

    def _their_box(self, inner: Box) -> Box:
        offsets, sizes = inner.offsets, inner.sizes
        if self.transposed:
            offsets, sizes = offsets[::-1], sizes[::-1]
        lead, base = self.theirs_at.offsets[: self.theirs_lead], self.theirs_at.offsets[self.theirs_lead :]
        moved = tuple(start + offset for start, offset in zip(base, offsets, strict=True))
        return Box(offsets=(*lead, *moved), sizes=(*(1 for _ in lead), *sizes))


def _with_rows(box: Box, first: int, count: int) -> Box:
    return Box(offsets=(first, *box.offsets[1:]), sizes=(count, *box.sizes[1:]))


@dataclass(frozen=True, kw_only=True)
class LinkTable:
    """All links of one model. Our names are those of the plain model."""

    links: Mapping[str, tuple[Link, ...]]
    """Our name -> its links; together they cover the tensor once."""
    shapes: Mapping[str, torch.Size]
    """Our name -> shape."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Further names of theirs that hold what one of our names holds (a tied head, embeddings of later stages)."""
    optional: frozenset[str] = frozenset()
    """Names of theirs, out of ``copies``, that may be missing."""
    _indices: dict[str, BoxIndex[Link]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def their_shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of everything on their side, copies among it."""
        found: dict[str, list[int]] = {}
        for links in self.links.values():
            for link in links:
                ends = [
                    offset + size for offset, size in zip(link.theirs_at.offsets, link.theirs_at.sizes, strict=True)
                ]
                before = found.setdefault(link.theirs, ends)
                found[link.theirs] = [max(pair) for pair in zip(before, ends, strict=True)]
        shapes = {name: torch.Size(size) for name, size in found.items()}
        return shapes | {name: self.shapes[ours] for name, ours in self.copies.items()}

    def parts(self, name: str, box: Box) -> Iterator[tuple[Link, Box]]:
        """Each link that ``box`` of our tensor ``name`` touches, with the common part."""
        index = self._indices.get(name)
        if index is None:
            index = self._indices[name] = BoxIndex([(link.ours_at, link) for link in self.links[name]])
        return ((link, common) for common, link in index.touched(box))


class LinkedSource:
    """Their tensors under our names: a ``WeightSource``."""

    def __init__(self, table: LinkTable, raw: RawSource) -> None:
        self.table = table
        self.raw = raw
        self._dtypes: dict[str, torch.dtype] = {}

    def shapes(self) -> Mapping[str, torch.Size]:
        return self.table.shapes

    def dtype(self, name: str) -> torch.dtype:
        """The narrowest that holds what all of its parts hold."""
        if name not in self._dtypes:
            parts = {self.raw.dtype(link.theirs) for link in self.table.links[name]}
            self._dtypes[name] = reduce(torch.promote_types, parts)
        return self._dtypes[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        box = box or whole(self.table.shapes[name])
        parts = list(self.table.parts(name, box))
        if len(parts) == 1:
            link, common = parts[0]
            return link.read(self.raw, common)
        value = torch.empty(box.sizes, dtype=self.dtype(name))
        for link, common in parts:
            _place(value, box, common).copy_(link.read(self.raw, common))
        return value


class LinkedSink:
    """Takes boxes of our tensors and writes them where they belong on their side, copies included."""

    def __init__(self, table: LinkTable, raw: RawSink) -> None:
        self.table = table
        self.raw = raw
        self._copies: dict[str, list[str]] = {}
        for theirs, ours in table.copies.items():
            self._copies.setdefault(ours, []).append(theirs)

    def write(self, name: str, box: Box, value: Tensor) -> None:
        for link, common in self.table.parts(name, box):
            link.write(self.raw, common, _place(value, box, common))
        for theirs in self._copies.get(name, ()):
            self.raw.write(theirs, box, value.contiguous())


def whole(shape: torch.Size) -> Box:
    """The box that is all of a tensor."""
    return Box(offsets=(0,) * len(shape), sizes=tuple(shape))


def blocks(shape: torch.Size, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """A tensor cut into boxes of at most about ``limit_bytes``, along its first dims."""
    yield from cut(whole(shape), item_bytes, limit_bytes)


def cut(box: Box, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """As ``blocks``, of a part of a tensor."""
    size = math.prod(box.sizes) * item_bytes
    dim = next((dim for dim, length in enumerate(box.sizes) if length > 1), None)
    if size <= limit_bytes or dim is None:
        yield box
        return
    rows = max(1, limit_bytes // (size // box.sizes[dim]))
    for start in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = min(rows, box.sizes[dim] - start)
        yield from cut(Box(offsets=tuple(offsets), sizes=tuple(sizes)), item_bytes, limit_bytes)


def _place(value: Tensor, box: Box, part: Box) -> Tensor:
    """The view of ``value``, the numbers of ``box``, that is ``part``."""
    for dim, (offset, start, size) in enumerate(zip(part.offsets, box.offsets, part.sizes, strict=True)):
        value = value.narrow(dim, offset - start, size)
    return value
