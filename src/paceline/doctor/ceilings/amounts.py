"""How much is measured? Enough on a GPU for clocks and ramps to settle, in about a minute; little on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Amounts:
    sustained_seconds: float
    """Of each matrix product."""
    burst_calls: int
    repeats: int
    """Of what is timed call by call; the median counts."""
    attention: tuple[int, int, int, int]
    """Batch, tokens, heads, width of a head."""
    copy_bytes: int
    """In device memory, and to and from the host."""
    collective_bytes: tuple[int, ...]
    """Sizes of full tensors."""
    pair_bytes: int
    storage_bytes: int
    """Most that is read and written, for each rank."""
    storage_seconds: float
    """Most time that reading, writing and the loader take, each."""


GPU = Amounts(
    sustained_seconds=5.0,
    burst_calls=10,
    repeats=10,
    attention=(1, 8192, 32, 128),
    copy_bytes=2**30,
    collective_bytes=(2**20, 2**24, 2**26, 2**28, 2**30),
    pair_bytes=2**28,
    storage_bytes=2**30,
    storage_seconds=3.0,
)

CPU = Amounts(
    sustained_seconds=0.3,
    burst_calls=1,
    repeats=3,
    attention=(1, 256, 4, 32),
    copy_bytes=2**24,
    collective_bytes=(2**16, 2**20),
    pair_bytes=2**20,
    storage_bytes=2**24,
    storage_seconds=0.5,
)
