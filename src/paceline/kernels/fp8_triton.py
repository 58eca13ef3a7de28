"""Cast and transpose in one reading: bf16 in, fp8 as it lies and turned out, 4 bytes of traffic an element.

Operations of torch take 2 + 1 for the cast and 1 + 1 for the turn, one after the other. The plain twin is
`fp8_cast.cast_rows` and `transposed`, which this equals bit for bit. Imported only where it runs: Triton does not come
with a CPU build of torch.

Dims: R rows, C columns, P rows and what fills them up.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.seen_triton import Seen, largest_of, no_nan, places_of, tell, within
from paceline.kernels.turned_triton import as_bits, in_pairs, turn_stored

_BLOCK_ROWS, _BLOCK_COLUMNS = 64, 64
"""A guess: rows of 64 bytes are two sectors on either side. Not tuned yet."""


def cast_transpose(
    x_RC: Tensor, factor: Tensor, values_RC: Tensor, turned_CP: Tensor | None, seen: Seen | None = None
) -> None:
    """Writes ``x * factor`` in fp8, and the same turned, with zeros where there is no row.

    Args:
        x_RC: bf16 or fp32, contiguous along C.
        factor: fp32 scalar, a power of two that leaves all numbers within fp8's range, unless ``seen`` is given.
        values_RC: contiguous, or rows of a larger matrix. As Triton 3.6 compiles it for an H200, numbers get mixed up
            where its rows are not aligned to 16 bytes and those of ``x_RC`` are.
        turned_CP: P at least R, and even; contiguous along P, or columns of a larger matrix. None: not wanted.
        seen: where the largest number goes; see there.
    """
    (rows, columns), turns = x_RC.shape, turned_CP is not None
    assert x_RC.stride(1) == values_RC.stride(1) == 1, "each is contiguous along its rows"
    assert turned_CP is None or turned_CP.stride(1) == 1, "each is contiguous along its rows"
    bits = as_bits(values_RC)
    pairs, padded = (bits, rows) if turned_CP is None else (in_pairs(turned_CP), turned_CP.shape[1])
    # tiles of columns first: neighbouring programs then read neighbouring addresses
    grid = (triton.cdiv(columns, _BLOCK_COLUMNS), triton.cdiv(padded, _BLOCK_ROWS))
    strides = (x_RC.stride(0), values_RC.stride(0), pairs.stride(0))
    _cast_transpose_kernel[grid](
        x_RC,
        factor,
        values_RC,
        bits,
        pairs,
        *places_of(seen, factor),
        rows,
        columns,
        padded // 2,
        *strides,
        largest_of(values_RC.dtype),
        seen is not None,
        turns,
        _BLOCK_ROWS,
        _BLOCK_COLUMNS,
    )


@triton.jit
def _cast_transpose_kernel(  # type: ignore[no-untyped-def]
    x,
    factor,
    values,
    bits,
    pairs,
    largest,
    scale,
    rows,
    columns,
    half,
    x_stride,
    values_stride,
    pairs_stride,
    LIMIT: tl.constexpr,
    SEES: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row_R = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_C = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_RC = (row_R < rows)[:, None] & (column_C < columns)[None, :]
    x_RC = tl.load(x + row_R[:, None] * x_stride + column_C[None, :], mask=inside_RC, other=0.0)
    wide_RC = x_RC.to(tl.float32)
    scaled_RC = wide_RC * tl.load(factor)
    if SEES:
        scaled_RC = within(wide_RC, scaled_RC, LIMIT)
        tell(no_nan(tl.abs(wide_RC)), largest, factor, scale)
    cast_RC = scaled_RC.to(values.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(values + row_R[:, None] * values_stride + column_C[None, :], cast_RC, mask=inside_RC)
    if TURNS:
        turn_stored(
            bits, values_stride, rows, pairs, pairs_stride, half, tl.program_id(1), column_C,
            column_C < columns, BLOCK_R,
        )  # fmt: skip
