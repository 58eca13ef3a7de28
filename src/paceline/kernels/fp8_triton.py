"""Cast and transpose in one reading: bf16 in, fp8 as it lies and turned out, 4 bytes of traffic an element.

Operations of torch take 2 + 1 for the cast and 1 + 1 for the turn, one after the other. The plain twin is
`fp8_cast.cast_rows` and `transposed`, which this equals bit for bit. Imported only where it runs: Triton does not come
with a CPU build of torch.

Dims: R rows, C columns, P rows filled up to a multiple.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_ROWS, _BLOCK_COLUMNS = 64, 64
"""A guess: rows of 64 bytes are two sectors on either side. Not tuned yet."""


def cast_transpose(x_RC: Tensor, factor: Tensor, dtype: torch.dtype, *, multiple: int) -> tuple[Tensor, Tensor]:
    """(``x * factor`` in ``dtype`` [R, C], the same turned [C, P], zero where there is no row).

    Args:
        x_RC: bf16 or fp32, contiguous along C.
        factor: fp32 scalar, a power of two that leaves all numbers within ``dtype``.
        multiple: of what P is to be one.
    """
    rows, columns = x_RC.shape
    assert x_RC.stride(1) == 1, f"strides {x_RC.stride()}"
    padded = rows + -rows % multiple
    values_RC = torch.empty(rows, columns, dtype=dtype, device=x_RC.device)
    turned_CP = torch.empty(columns, padded, dtype=dtype, device=x_RC.device)
    # tiles of columns first: neighbouring programs then read neighbouring addresses
    grid = (triton.cdiv(columns, _BLOCK_COLUMNS), triton.cdiv(padded, _BLOCK_ROWS))
    _cast_transpose_kernel[grid](
        x_RC, factor, values_RC, turned_CP, rows, columns, padded, x_RC.stride(0), _BLOCK_ROWS, _BLOCK_COLUMNS
    )
    return values_RC, turned_CP


@triton.jit
def _cast_transpose_kernel(  # type: ignore[no-untyped-def]
    x,
    factor,
    values,
    turned,
    rows,
    columns,
    padded,
    x_stride,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row_R = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_C = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside_RC = (row_R < rows)[:, None] & (column_C < columns)[None, :]
    x_RC = tl.load(x + row_R[:, None] * x_stride + column_C[None, :], mask=inside_RC, other=0.0)
    cast_RC = (x_RC.to(tl.float32) * tl.load(factor)).to(values.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(values + row_R[:, None] * columns + column_C[None, :], cast_RC, mask=inside_RC)
    turned_CR = tl.trans(cast_RC)
    inside_CR = (column_C < columns)[:, None] & (row_R < padded)[None, :]
    tl.store(turned + column_C[:, None] * padded + row_R[None, :], turned_CR, mask=inside_CR)
