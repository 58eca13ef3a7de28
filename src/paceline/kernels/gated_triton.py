"""`kernels/gated.py` and `gated_delayed.py` as kernels. Imported only where they run: Triton does not come with a CPU
build of torch.

Each number is read once and written once, in rows of `_COLUMNS` that are loaded 16 bytes a thread. Nothing is turned,
so a program needs no columns of another row.

Dims as there; R rows and C columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.expert_rows_triton import act_slope, act_value
from paceline.kernels.seen_triton import Seen, largest_of, no_nan, places_of, tell, within

_ROWS, _COLUMNS = 4, 1024
"""Of a tile: 16 numbers of each input a thread. Not tuned yet."""
_WARPS = 8


class Cast(NamedTuple):
    """What is written in fp8 beside the wide numbers."""

    values: Tensor
    """As the wide numbers."""
    factor: Tensor
    """fp32 []; its reciprocal lies behind it in memory."""
    seen: Seen


def gated_forward(joined_MX: Tensor, hidden_MF: Tensor, function: str, cast: Cast | None = None) -> Tensor:
    """Writes ``hidden``, and returns its largest number; with ``cast`` it is told there."""
    tokens, width, grid = _launch(joined_MX, hidden_MF)
    found, values, factor, scale = _places(joined_MX, grid, cast)
    _gated_forward_kernel[grid](
        joined_MX, hidden_MF, found, values, factor, scale, tokens, width,
        function, cast is not None, _limit(cast), _ROWS, _COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return found.amax() if cast is None else cast.seen.largest


def gated_backward(
    joined_MX: Tensor,
    grad_MF: Tensor,
    grad_joined_MX: Tensor,
    hidden_MF: Tensor | None,
    function: str,
    cast: Cast | None = None,
) -> Tensor:
    """Writes ``grad_joined``, and ``hidden`` where it is wanted; returns the former's largest number as above."""
    tokens, width, grid = _launch(joined_MX, grad_MF)
    assert grad_joined_MX.is_contiguous() and (hidden_MF is None or hidden_MF.is_contiguous())
    found, values, factor, scale = _places(joined_MX, grid, cast)
    _gated_backward_kernel[grid](
        joined_MX, grad_MF, grad_joined_MX, grad_joined_MX if hidden_MF is None else hidden_MF,
        found, values, factor, scale, tokens, width,
        function, hidden_MF is not None, cast is not None, _limit(cast), _ROWS, _COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return found.amax() if cast is None else cast.seen.largest


def _launch(joined_MX: Tensor, narrow_MF: Tensor) -> tuple[int, int, tuple[int]]:
    """Tokens, width, and a program for each tile. In one dim: others end at 65,535."""
    (tokens, both), width = joined_MX.shape, joined_MX.shape[1] // 2
    assert joined_MX.is_contiguous() and narrow_MF.is_contiguous() and both == 2 * width
    return tokens, width, (triton.cdiv(tokens, _ROWS) * triton.cdiv(width, _COLUMNS),)


def _places(joined_MX: Tensor, grid: tuple[int], cast: Cast | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For largest numbers, fp8 values, and by what they are cast; of tiles, and stand-ins, where nothing is cast."""
    if cast is None:
        partial = joined_MX.new_empty(grid, dtype=torch.float32)
        return partial, joined_MX, partial, partial
    assert cast.values.is_contiguous()
    largest, scale = places_of(cast.seen, cast.factor)
    return largest, cast.values, cast.factor, scale


def _limit(cast: Cast | None) -> float:
    return 0.0 if cast is None else largest_of(cast.values.dtype)


@triton.jit
def _tile(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Its rows and columns; tiles of one row follow each other."""
    across = tl.cdiv(width, COLUMNS)
    row_R = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    return row_R, column_C


@triton.jit
def _in_fp8(wide_RC, times, values, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    return within(wide_RC, wide_RC * times, LIMIT).to(values.dtype.element_ty, fp_downcast_rounding="rtne")


@triton.jit
def _gated_forward_kernel(  # type: ignore[no-untyped-def]
    joined,
    hidden,
    found,
    values,
    factor,
    scale,
    tokens,
    width,
    FUNCTION: tl.constexpr,
    CASTS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_R, column_C = _tile(width, ROWS, COLUMNS)
    inside_RC = (row_R < tokens)[:, None] & (column_C < width)[None, :]
    at_RC = row_R[:, None] * (2 * width) + column_C[None, :]
    gate_RC = tl.load(joined + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    up_RC = tl.load(joined + at_RC + width, mask=inside_RC, other=0.0).to(tl.float32)
    hidden_RC = (act_value(gate_RC, FUNCTION) * up_RC).to(hidden.dtype.element_ty)
    to_RC = row_R[:, None] * width + column_C[None, :]
    tl.store(hidden + to_RC, hidden_RC, mask=inside_RC)
    # of what was rounded: whoever casts reads that
    wide_RC = hidden_RC.to(tl.float32)
    size_RC = no_nan(tl.abs(wide_RC))
    if CASTS:
        tl.store(values + to_RC, _in_fp8(wide_RC, tl.load(factor), values, LIMIT), mask=inside_RC)
        tell(size_RC, found, factor, scale)
    else:
        tl.store(found + tl.program_id(0), tl.max(tl.max(size_RC, axis=1), axis=0))


@triton.jit
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    joined,
    grad,
    grad_joined,
    hidden,
    found,
    values,
    factor,
    scale,
    tokens,
    width,
    FUNCTION: tl.constexpr,
    HIDDEN: tl.constexpr,
    CASTS: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_R, column_C = _tile(width, ROWS, COLUMNS)
    inside_RC = (row_R < tokens)[:, None] & (column_C < width)[None, :]
    at_RC = row_R[:, None] * (2 * width) + column_C[None, :]
    one_RC = row_R[:, None] * width + column_C[None, :]
    gate_RC = tl.load(joined + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    up_RC = tl.load(joined + at_RC + width, mask=inside_RC, other=0.0).to(tl.float32)
    grad_RC = tl.load(grad + one_RC, mask=inside_RC, other=0.0).to(tl.float32)
    value_RC = act_value(gate_RC, FUNCTION)
    of_gate_RC = (grad_RC * up_RC * act_slope(gate_RC, FUNCTION)).to(grad_joined.dtype.element_ty)
    of_up_RC = (grad_RC * value_RC).to(grad_joined.dtype.element_ty)
    tl.store(grad_joined + at_RC, of_gate_RC, mask=inside_RC)
    tl.store(grad_joined + at_RC + width, of_up_RC, mask=inside_RC)
    if HIDDEN:
        tl.store(hidden + one_RC, (value_RC * up_RC).to(hidden.dtype.element_ty), mask=inside_RC)
    wide_gate_RC, wide_up_RC = of_gate_RC.to(tl.float32), of_up_RC.to(tl.float32)
    # nan is no larger than anything: each is asked by itself
    size_RC = tl.maximum(no_nan(tl.abs(wide_gate_RC)), no_nan(tl.abs(wide_up_RC)))
    if CASTS:
        times = tl.load(factor)
        tl.store(values + at_RC, _in_fp8(wide_gate_RC, times, values, LIMIT), mask=inside_RC)
        tl.store(values + at_RC + width, _in_fp8(wide_up_RC, times, values, LIMIT), mask=inside_RC)
        tell(size_RC, found, factor, scale)
    else:
        tl.store(found + tl.program_id(0), tl.max(tl.max(size_RC, axis=1), axis=0))
