"""Where does each parameter lie in the flat buffers, and which part of them is this rank's?

    buffer   | bucket 0 .................. | bucket 1 ......... | ...
    slots    | head | norm | block N ...pad| block N-1 ...   pad|
    shards   | rank 0 | rank 1 | rank 2 |..| rank 0 | rank 1 |..|

Parameters lie in the reverse of the order of their use, so that backward fills the buckets one after the other. Every
bucket is cut into equal shards, so each of them is one reduce-scatter and one all-gather; of a parameter a rank owns
one range of elements, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64
"""Elements. Slots and shards begin at multiples of 128 bytes (bf16): what vectorised kernels and NCCL like."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter's place: elements ``[start, end)`` of the buffer, all in one bucket."""

    name: str
    shape: torch.Size
    start: int
    end: int
    bucket: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Elements ``[start, end)`` of the buffer that are reduced and gathered together."""

    index: int
    start: int
    end: int
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All buckets of one flat buffer, cut over ``shard_degree`` ranks."""

    buckets: tuple[Bucket, ...]
    shard_degree: int

    @property
    def size(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1].end

    @property
    def slots(self) -> dict[str, Slot]:
        """In the order of the buffer."""
        return {slot.name: slot for bucket in self.buckets for slot in bucket.slots}

    def shard_size(self, bucket: Bucket) -> int:
        return bucket.size // self.shard_degree

    def shard_start(self, bucket: Bucket, shard: int) -> int:
        """First element of the buffer in shard number ``shard`` of the bucket."""
        return bucket.start + shard * self.shard_size(bucket)

    def owned(self, slot: Slot, shard: int) -> tuple[int, int]:
        """The range ``[start, end)`` of the buffer that belongs to both; empty where start == end."""
        bucket = self.buckets[slot.bucket]
        begin = self.shard_start(bucket, shard)
        start, end = max(slot.start, begin), min(slot.end, begin + self.shard_size(bucket))
        return (start, end) if start < end else (begin, begin)


def plan_buckets(
    shapes: Mapping[str, torch.Size],
    *,
    shard_degree: int,
    bucket_elements: int,
    together: Sequence[Sequence[str]] = (),
) -> Layout:
    """Lays parameters out in the reverse of ``shapes``'s order, in buckets of at least ``bucket_elements``.

    ``together``: names of parameters that are used at the same time, and lie side by side in the order that is given.

    A bucket is closed by the parameter that fills it, so a parameter larger than a bucket has one of its own or ends
    one. Fewer than ``64 * shard_degree`` elements a bucket are padding.
    """
    assert shapes, "no parameters"
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    start = position = 0
    names = _reversed(shapes, together)
    for name in names:
        shape = shapes[name]
        end = position + math.prod(shape)
        slots.append(Slot(name=name, shape=shape, start=position, end=end, bucket=len(buckets)))
        position = _round_up(end, _ALIGNMENT)
        if position - start >= bucket_elements or name == names[-1]:
            position = start + _round_up(position - start, _ALIGNMENT * shard_degree)
            buckets.append(Bucket(index=len(buckets), start=start, end=position, slots=tuple(slots)))
            start, slots = position, []
    return Layout(buckets=tuple(buckets), shard_degree=shard_degree)


def _reversed(names: Iterable[str], together: Sequence[Sequence[str]]) -> list[str]:
    by_last = {group[-1]: group for group in together}
    inside = {name for group in together for name in group}
    found: list[str] = []
    for name in reversed(list(names)):
        found += by_last.get(name, () if name in inside else (name,))
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
