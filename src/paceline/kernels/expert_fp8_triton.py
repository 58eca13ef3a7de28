"""`kernels/expert_fp8.py` in one pass for each cast. Imported only where it runs: Triton does not come with a CPU build
of torch.

Dims as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.expert_fp8 import Fp8Rows
from paceline.kernels.fp8_cast import E4M3

_NUMBERS = 4096
"""A program casts about so many, at least one row."""
_COLUMNS, _ROWS = 64, 64
"""Tile of a program that turns: 64 bytes a row on the way out."""


def cast_rows(x: Tensor) -> Fp8Rows:
    """See `expert_fp8.cast_rows`."""
    x_RC = x.contiguous().view(-1, x.shape[-1])
    R, C = x_RC.shape
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(C)
    rows = max(1, _NUMBERS // block)
    if R:
        warps = 4 if rows * block <= 8192 else 8
        _expert_cast_rows_kernel[(triton.cdiv(R, rows),)](x_RC, values, scale, R, C, rows, block, num_warps=warps)
    return Fp8Rows(values, scale)


def cast_turned(matrix_EYX: Tensor) -> Fp8Rows:
    """See `expert_fp8.cast_turned`. Each number is read twice, the second time from the cache."""
    matrix_EYX = matrix_EYX.contiguous()
    E, Y, X = matrix_EYX.shape
    values = torch.empty(E, X, Y, dtype=E4M3, device=matrix_EYX.device)
    scale = torch.empty(E, X, dtype=torch.float32, device=matrix_EYX.device)
    _expert_cast_turned_kernel[(triton.cdiv(X, _COLUMNS), E)](matrix_EYX, values, scale, Y, X, _ROWS, _COLUMNS)
    return Fp8Rows(values, scale)


@triton.jit
def _factor(largest):  # type: ignore[no-untyped-def]
    """`fp8_cast.multiplier` for e4m3: the largest power of two that leaves these within 448."""
    room = 448.0 / tl.maximum(largest, 7.888609052210118e-31)  # 2^-100
    return (room.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _expert_cast_rows_kernel(x, values, scale, rows, columns, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_C = tl.arange(0, C)
    inside_RC = (row_R < rows)[:, None] & (column_C < columns)[None, :]
    at_RC = row_R[:, None] * columns + column_C[None, :]
    x_RC = tl.load(x + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    factor_R = _factor(tl.max(tl.abs(x_RC), axis=1))
    tl.store(values + at_RC, (x_RC * factor_R[:, None]).to(values.dtype.element_ty), mask=inside_RC)
    tl.store(scale + row_R, 1.0 / factor_R, mask=row_R < rows)


@triton.jit
def _expert_cast_turned_kernel(matrix, values, scale, rows, columns, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    column_C = tl.program_id(0) * C + tl.arange(0, C)
    expert = tl.program_id(1).to(tl.int64)
    largest_C = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, rows, R):
        row_R = start + tl.arange(0, R)
        inside_RC = (row_R < rows)[:, None] & (column_C < columns)[None, :]
        at_RC = matrix + expert * rows * columns + row_R[:, None] * columns + column_C[None, :]
        x_RC = tl.load(at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        largest_C = tl.maximum(largest_C, tl.max(tl.abs(x_RC), axis=0))
    factor_C = _factor(largest_C)
    tl.store(scale + expert * columns + column_C, 1.0 / factor_C, mask=column_C < columns)
    for start in range(0, rows, R):
        row_R = start + tl.arange(0, R)
        inside_RC = (row_R < rows)[:, None] & (column_C < columns)[None, :]
        at_RC = matrix + expert * rows * columns + row_R[:, None] * columns + column_C[None, :]
        x_RC = tl.load(at_RC, mask=inside_RC, other=0.0).to(tl.float32)
        turned_CR = tl.trans((x_RC * factor_C[None, :]).to(values.dtype.element_ty))
        to_CR = values + expert * rows * columns + column_C[:, None] * rows + row_R[None, :]
        tl.store(to_CR, turned_CR, mask=(column_C < columns)[:, None] & (row_R < rows)[None, :])
