"""`kernels/scaling.py` as one kernel. Imported only where it runs: Triton does not come with a CPU build of torch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Elements of a program: two loads of 16 bytes a thread."""


def scale_in_place_triton(tensor: Tensor, factor: Tensor) -> None:
    """See `scaling.scale_in_place`."""
    assert tensor.is_contiguous() and factor.numel() == 1
    if size := tensor.numel():
        _scale_kernel[(triton.cdiv(size, _BLOCK),)](tensor, factor, size, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _scale_kernel(tensor, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    value = tl.load(tensor + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(tensor + place, value.to(tensor.dtype.element_ty), mask=inside)
