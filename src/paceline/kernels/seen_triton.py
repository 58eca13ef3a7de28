"""The largest number of a tensor, found by the kernel that casts it. Imported only where it runs.

Each program compares the largest number of its tile with what others have found, which may be old and then is too
small, and adds its own where that is larger: most programs have nothing to add. Non-negative floats are ordered as
their bits are, so integers are compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Seen(NamedTuple):
    """What a cast tells beside its values. The factor that it casts by may then be too large for some of them."""

    largest: Tensor
    """fp32 []: becomes the larger of itself, not negative, and the tensor's largest absolute number."""
    scale: Tensor
    """fp32 []: becomes the number that lies in memory behind the factor: its reciprocal."""


def places_of(seen: Seen | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """As a kernel takes them; ``other`` stands for what is not wanted."""
    return (other, other) if seen is None else (seen.largest.view(torch.int32), seen.scale)


def largest_of(dtype: torch.dtype) -> float:
    """What a cast to ``dtype`` saturates at."""
    return torch.finfo(dtype).max


@triton.jit
def no_nan(size):  # type: ignore[no-untyped-def]
    """A maximum may lose a nan, but not inf, which spoils the tensor as well."""
    return tl.where(size == size, size, float("inf"))


@triton.jit
def within(wide, scaled, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``scaled`` within fp8's range; nan where ``wide``, which it was made of, is not finite."""
    inside = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
    return tl.where(tl.abs(wide) < float("inf"), inside, float("nan"))


@triton.jit
def tell(size_RC, largest, factor, scale):  # type: ignore[no-untyped-def]
    """To `Seen`, of a tile of absolute numbers without nan. ``largest``: the bits."""
    before = tl.load(largest, volatile=True)
    found = tl.max(tl.max(size_RC, axis=1), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest, found, mask=found > before, sem="relaxed")
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale, tl.load(factor + 1))
