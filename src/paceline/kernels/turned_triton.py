"""Stores a tile of fp8 numbers turned, two at a time. Imported only where it runs.

On its way a tile is exchanged between threads through shared memory. In fp8 that is done by stores of several bytes at
once (`st.shared.v2.b8`) from registers whose upper halves hold something else, and the assembler that comes with
Triton 3.6 puts such bytes together wrongly for sm_90: every fourth row came out as garbage on an H200, while the PTX is
right. Pairs of rows make 16-bit numbers, which fill their registers; they also halve the number of accesses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def in_pairs(turned_CP: Tensor) -> Tensor:
    """[C, P / 2]: the same memory, as `store_turned` takes it. P is even and lies side by side."""
    return turned_CP.view({1: torch.int16, 2: torch.int32}[turned_CP.itemsize])


@triton.jit
def pair_rows(first, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 [ROWS / 2] each: the even and the odd rows of a tile, of which ``first``, an even one, is the first."""
    even_H = first.to(tl.int64) + 2 * tl.arange(0, ROWS // 2)
    return even_H, even_H + 1


@triton.jit
def store_turned(even_HC, odd_HC, pairs, stride, even_H, column_C, inside_CH):  # type: ignore[no-untyped-def]
    """To `in_pairs`, whose columns lie ``stride`` (in pairs) apart.

    ``even_HC``, ``odd_HC``: what rows 2 h and 2 h + 1 hold, in the precision of the memory (fp8; or 16 bits, so that
    an interpreter without fp8 can run it).
    """
    if even_HC.dtype.primitive_bitwidth == 8:
        low_HC = even_HC.to(tl.uint8, bitcast=True).to(tl.uint16)
        high_HC = odd_HC.to(tl.uint8, bitcast=True).to(tl.uint16)
        both_HC = (low_HC | (high_HC << 8)).to(tl.int16, bitcast=True)
    else:
        low_HC = even_HC.to(tl.uint16, bitcast=True).to(tl.uint32)
        high_HC = odd_HC.to(tl.uint16, bitcast=True).to(tl.uint32)
        both_HC = (low_HC | (high_HC << 16)).to(tl.int32, bitcast=True)
    to_CH = pairs + column_C.to(tl.int64)[:, None] * stride + (even_H // 2)[None, :]
    tl.store(to_CH, tl.trans(both_HC), mask=inside_CH)
