"""`kernels/fp8_gated.py` as kernels. Imported only where they run: Triton does not come with a CPU build of torch.

Dims as there; R rows and C columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.expert_rows_triton import act_slope, act_value
from paceline.kernels.seen_triton import Seen, largest_of, no_nan, places_of, tell, within
from paceline.kernels.turned_triton import as_bits, in_pairs, turn_stored

_ROWS, _COLUMNS = 64, 64
"""Of a tile: rows of 64 bytes in fp8 are two sectors on either side. Not tuned yet."""
_WARPS = 4


def gated_largest(joined_MX: Tensor, function: str) -> Tensor:
    """See `fp8_gated.gated_largest`."""
    return _largest(joined_MX, joined_MX, function, backward=False)


def gated_backward_largest(joined_MX: Tensor, grad_MF: Tensor, function: str) -> Tensor:
    """See `fp8_gated.gated_backward_largest`."""
    return _largest(joined_MX, grad_MF, function, backward=True)


def _largest(joined_MX: Tensor, grad_MF: Tensor, function: str, *, backward: bool) -> Tensor:
    (tokens, both), width = joined_MX.shape, joined_MX.shape[1] // 2
    assert joined_MX.is_contiguous() and grad_MF.is_contiguous() and both == 2 * width
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(tokens, _ROWS))
    partial = joined_MX.new_empty(grid[::-1], dtype=torch.float32)
    _largest_kernel[grid](
        joined_MX, grad_MF, partial, tokens, width, function, backward, _ROWS, _COLUMNS, num_warps=_WARPS
    )
    return partial.amax()


def gated_cast(
    joined_MX: Tensor, factor: Tensor, values_MF: Tensor, turned_FP: Tensor, function: str, seen: Seen | None = None
) -> None:
    """See `fp8_gated.gated_cast`. ``seen``: where the largest number goes."""
    _cast(joined_MX, joined_MX, factor, values_MF, turned_FP, function, seen, backward=False)


def gated_backward_cast(
    joined_MX: Tensor,
    grad_MF: Tensor,
    factor: Tensor,
    values_MX: Tensor,
    turned_XP: Tensor,
    function: str,
    seen: Seen | None = None,
) -> None:
    """See `fp8_gated.gated_backward_cast`. ``seen``: where the largest number goes."""
    _cast(joined_MX, grad_MF, factor, values_MX, turned_XP, function, seen, backward=True)


def _cast(
    joined_MX: Tensor,
    grad_MF: Tensor,
    factor: Tensor,
    values: Tensor,
    turned: Tensor,
    function: str,
    seen: Seen | None,
    *,
    backward: bool,
) -> None:
    tokens, width, padded = joined_MX.shape[0], joined_MX.shape[1] // 2, turned.shape[1]
    assert all(tensor.is_contiguous() for tensor in (joined_MX, grad_MF, values, turned))
    # tiles of columns first: neighbouring programs then read neighbouring addresses
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(padded, _ROWS))
    _cast_kernel[grid](
        joined_MX, grad_MF, factor, values, as_bits(values), in_pairs(turned), *places_of(seen, factor), tokens, width,
        padded // 2, function, backward, largest_of(values.dtype), seen is not None, _ROWS, _COLUMNS, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _largest_kernel(  # type: ignore[no-untyped-def]
    joined,
    grad,
    partial,
    tokens,
    width,
    FUNCTION: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_R = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside_RC = (row_R < tokens)[:, None] & (column_C < width)[None, :]
    at_RC = row_R[:, None] * (2 * width) + column_C[None, :]
    gate_RC = tl.load(joined + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    up_RC = tl.load(joined + at_RC + width, mask=inside_RC, other=0.0).to(tl.float32)
    if BACKWARD:
        grad_RC = tl.load(grad + row_R[:, None] * width + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        first_RC = no_nan(tl.abs(grad_RC * up_RC * act_slope(gate_RC, FUNCTION)))
        second_RC = no_nan(tl.abs(grad_RC * act_value(gate_RC, FUNCTION)))
        largest_RC = tl.maximum(first_RC, second_RC)
    else:
        largest_RC = no_nan(tl.abs(act_value(gate_RC, FUNCTION) * up_RC))
    place = partial + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.max(tl.max(largest_RC, axis=1), axis=0))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    joined,
    grad,
    factor,
    values,
    bits,
    pairs,
    largest,
    scale,
    tokens,
    width,
    half,
    FUNCTION: tl.constexpr,
    BACKWARD: tl.constexpr,
    LIMIT: tl.constexpr,
    SEES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row_R = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside_RC = (row_R < tokens)[:, None] & (column_C < width)[None, :]
    tile, there_C = tl.program_id(1), column_C < width
    at_RC = row_R[:, None] * (2 * width) + column_C[None, :]
    gate_RC = tl.load(joined + at_RC, mask=inside_RC, other=0.0).to(tl.float32)
    up_RC = tl.load(joined + at_RC + width, mask=inside_RC, other=0.0).to(tl.float32)
    times = tl.load(factor)
    if BACKWARD:
        grad_RC = tl.load(grad + row_R[:, None] * width + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        wide_gate_RC = grad_RC * up_RC * act_slope(gate_RC, FUNCTION)
        wide_up_RC = grad_RC * act_value(gate_RC, FUNCTION)
        of_gate_RC, of_up_RC = wide_gate_RC * times, wide_up_RC * times
        if SEES:
            of_gate_RC = within(wide_gate_RC, of_gate_RC, LIMIT)
            of_up_RC = within(wide_up_RC, of_up_RC, LIMIT)
            # nan is no larger than anything: each is asked by itself
            tell(tl.maximum(no_nan(tl.abs(wide_gate_RC)), no_nan(tl.abs(wide_up_RC))), largest, factor, scale)
        tl.store(values + at_RC, of_gate_RC.to(values.dtype.element_ty, fp_downcast_rounding="rtne"), mask=inside_RC)
        tl.store(
            values + at_RC + width, of_up_RC.to(values.dtype.element_ty, fp_downcast_rounding="rtne"), mask=inside_RC
        )
        stride = 2 * width
        turn_stored(bits, stride, tokens, pairs, half, half, tile, column_C, there_C, ROWS)
        beyond = width.to(tl.int64) * half
        turn_stored(bits + width, stride, tokens, pairs + beyond, half, half, tile, column_C, there_C, ROWS)
    else:
        wide_RC = act_value(gate_RC, FUNCTION) * up_RC
        value_RC = wide_RC * times
        if SEES:
            value_RC = within(wide_RC, value_RC, LIMIT)
            tell(no_nan(tl.abs(wide_RC)), largest, factor, scale)
        to_RC = values + row_R[:, None] * width + column_C[None, :]
        tl.store(to_RC, value_RC.to(values.dtype.element_ty, fp_downcast_rounding="rtne"), mask=inside_RC)
        turn_stored(bits, width, tokens, pairs, half, half, tile, column_C, there_C, ROWS)
