"""Which examples share a row?

Rows have a fixed number of tokens; a row holds whole examples. Packing is best-fit decreasing: the longest example
first, each into the fullest row that still has room. At worst it takes 11/9 of the fewest rows possible (Johnson et
al., 1974, doi:10.1137/0203025). It depends on lengths, capacity and seed alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Rows:
    """R rows of examples."""

    starts: NDArray[np.int64]
    """[R + 1]: row r holds members[starts[r] : starts[r + 1]]"""
    members: NDArray[np.int64]
    """places in the list of sizes that was packed"""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int) -> NDArray[np.int64]:
        return self.members[self.starts[number] : self.starts[number + 1]]

    @property
    def most(self) -> int:
        """Examples of the fullest row."""
        return int(np.diff(self.starts).max(initial=0))


def pack(sizes: NDArray[np.int64], capacity: int, *, seed: int) -> Rows:
    """Fills rows of ``capacity`` with examples of ``sizes`` tokens, none larger than a row."""
    assert not len(sizes) or int(sizes.max()) <= capacity
    shuffled = np.random.default_rng(seed).permutation(len(sizes))
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    row_of = np.empty(len(sizes), dtype=np.int64)
    rooms: list[int] = []  # how much room open rows have, ascending, each value once
    open_rows: dict[int, list[int]] = {}  # room -> rows
    count = 0
    for example, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect_left(rooms, size)
        if place < len(rooms):
            room = rooms[place]
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms.pop(place)
        else:
            row, room, count = count, capacity, count + 1
        row_of[example] = row
        left = room - size
        if left:
            waiting = open_rows.setdefault(left, [])
            if not waiting:
                insort(rooms, left)
            waiting.append(row)
    # members of a row in the order of the shuffle, not by length
    members = shuffled[np.argsort(row_of[shuffled], kind="stable")]
    starts = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=count), dtype=np.int64)))
    return Rows(starts=starts, members=members)


def one_each(count: int) -> Rows:
    """A row for each example."""
    return Rows(starts=np.arange(count + 1, dtype=np.int64), members=np.arange(count, dtype=np.int64))
