"""Turns a tile of fp8 numbers that this program has just stored. Imported only where it runs.

It is read back, from the cache, two rows at a time. To turn what a cast has left in registers is not safe: where the
result of a cast is stored packed and taken apart as well, the assembler that comes with Triton 3.6 takes apart for
sm_90 what is not there yet (`shr.u16` of a register that `cvt.rn.satfinite.e4m3x2` sets further down; the PTX is
right). On an H200 every fourth row of the result was garbage. Pairs of rows make 16-bit numbers, which also halves the
number of accesses.

Dims: R rows, C columns, P rows and what fills them up, H half the rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_bits(values_RC: Tensor) -> Tensor:
    """The same memory, as `turn_stored` reads it: fp8, or 16 bits, so that an interpreter without fp8 can run it."""
    return values_RC.view({1: torch.uint8, 2: torch.int16}[values_RC.itemsize])


def in_pairs(turned_CP: Tensor) -> Tensor:
    """[C, P / 2]: the same memory, as `turn_stored` writes it. P is even and lies side by side."""
    return turned_CP.view({1: torch.int16, 2: torch.int32}[turned_CP.itemsize])


@triton.jit
def turn_stored(  # type: ignore[no-untyped-def]
    bits, stride, rows, pairs, pairs_stride, half, tile, column_C, there_C, ROWS: tl.constexpr
):
    """From `as_bits`, rows ``stride`` apart, to `in_pairs`, rows of ``half`` numbers ``pairs_stride`` apart.

    Zeros from ``rows`` on. ``tile`` counts tiles of ``ROWS`` rows, an even number; this program has stored all numbers
    of this one before.
    """
    tl.debug_barrier()  # what other threads have stored is there
    pair_H = tile.to(tl.int64) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    even_H = 2 * pair_H
    at_HC = bits + even_H[:, None] * stride + column_C[None, :]
    low_HC = tl.load(at_HC, mask=(even_H < rows)[:, None] & there_C[None, :], other=0, volatile=True)
    high_HC = tl.load(at_HC + stride, mask=(even_H + 1 < rows)[:, None] & there_C[None, :], other=0, volatile=True)
    if bits.dtype.element_ty.primitive_bitwidth == 8:
        both_HC = (low_HC.to(tl.uint16) | (high_HC.to(tl.uint16) << 8)).to(tl.int16, bitcast=True)
    else:
        low_HC, high_HC = low_HC.to(tl.uint16, bitcast=True), high_HC.to(tl.uint16, bitcast=True)
        both_HC = (low_HC.to(tl.uint32) | (high_HC.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)
    to_CH = pairs + column_C.to(tl.int64)[:, None] * pairs_stride + pair_H[None, :]
    tl.store(to_CH, tl.trans(both_HC), mask=there_C[:, None] & (pair_H < half)[None, :])
