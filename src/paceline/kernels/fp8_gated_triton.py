"""`kernels/fp8_gated.py` as kernels. Imported only where they run: Triton does not come with a CPU build of torch.

Dims as there; R rows and C columns of a tile, H half its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.expert_rows_triton import act_slope, act_value
from paceline.kernels.turned_triton import in_pairs, pair_rows, store_turned

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


def gated_cast(joined_MX: Tensor, factor: Tensor, values_MF: Tensor, turned_FP: Tensor, function: str) -> None:
    """See `fp8_gated.gated_cast`."""
    _cast(joined_MX, joined_MX, factor, values_MF, turned_FP, function, backward=False)


def gated_backward_cast(
    joined_MX: Tensor, grad_MF: Tensor, factor: Tensor, values_MX: Tensor, turned_XP: Tensor, function: str
) -> None:
    """See `fp8_gated.gated_backward_cast`."""
    _cast(joined_MX, grad_MF, factor, values_MX, turned_XP, function, backward=True)


def _cast(
    joined_MX: Tensor,
    grad_MF: Tensor,
    factor: Tensor,
    values: Tensor,
    turned: Tensor,
    function: str,
    *,
    backward: bool,
) -> None:
    tokens, width, padded = joined_MX.shape[0], joined_MX.shape[1] // 2, turned.shape[1]
    assert all(tensor.is_contiguous() for tensor in (joined_MX, grad_MF, values, turned))
    # tiles of columns first: neighbouring programs then read neighbouring addresses
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(padded, _ROWS))
    _cast_kernel[grid](
        joined_MX, grad_MF, factor, values, in_pairs(turned), tokens, width, padded, function, backward, _ROWS,
        _COLUMNS, num_warps=_WARPS,
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
        first_RC = tl.abs(grad_RC * up_RC * act_slope(gate_RC, FUNCTION))
        second_RC = tl.abs(grad_RC * act_value(gate_RC, FUNCTION))
        # a maximum may lose a nan, but not inf, which spoils the tensor as well
        first_RC = tl.where(first_RC == first_RC, first_RC, float("inf"))
        second_RC = tl.where(second_RC == second_RC, second_RC, float("inf"))
        largest_RC = tl.maximum(first_RC, second_RC)
    else:
        largest_RC = tl.abs(act_value(gate_RC, FUNCTION) * up_RC)
        largest_RC = tl.where(largest_RC == largest_RC, largest_RC, float("inf"))
    place = partial + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(place, tl.max(tl.max(largest_RC, axis=1), axis=0))


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    joined,
    grad,
    factor,
    values,
    pairs,
    tokens,
    width,
    padded,
    FUNCTION: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    even_H, odd_H = pair_rows(tl.program_id(1) * ROWS, ROWS)
    column_C = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    times = tl.load(factor)
    # what fills up: rows that were not loaded are zero
    inside_CH = (column_C < width)[:, None] & (even_H < padded)[None, :]
    if BACKWARD:
        even_HC, even_up_HC = _cast_gradients(joined, grad, values, even_H, column_C, tokens, width, times, FUNCTION)
        odd_HC, odd_up_HC = _cast_gradients(joined, grad, values, odd_H, column_C, tokens, width, times, FUNCTION)
        store_turned(even_HC, odd_HC, pairs, padded // 2, even_H, column_C, inside_CH)
        store_turned(even_up_HC, odd_up_HC, pairs, padded // 2, even_H, column_C + width, inside_CH)
    else:
        even_HC = _cast_products(joined, values, even_H, column_C, tokens, width, times, FUNCTION)
        odd_HC = _cast_products(joined, values, odd_H, column_C, tokens, width, times, FUNCTION)
        store_turned(even_HC, odd_HC, pairs, padded // 2, even_H, column_C, inside_CH)


@triton.jit
def _load_both(joined, row_H, column_C, tokens, width):  # type: ignore[no-untyped-def]
    inside_HC = (row_H < tokens)[:, None] & (column_C < width)[None, :]
    at_HC = row_H[:, None] * (2 * width) + column_C[None, :]
    gate_HC = tl.load(joined + at_HC, mask=inside_HC, other=0.0).to(tl.float32)
    up_HC = tl.load(joined + at_HC + width, mask=inside_HC, other=0.0).to(tl.float32)
    return gate_HC, up_HC, inside_HC


@triton.jit
def _cast_products(joined, values, row_H, column_C, tokens, width, times, FUNCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    gate_HC, up_HC, inside_HC = _load_both(joined, row_H, column_C, tokens, width)
    value_HC = act_value(gate_HC, FUNCTION) * up_HC * times
    cast_HC = value_HC.to(values.dtype.element_ty, fp_downcast_rounding="rtne")
    tl.store(values + row_H[:, None] * width + column_C[None, :], cast_HC, mask=inside_HC)
    return cast_HC


@triton.jit
def _cast_gradients(  # type: ignore[no-untyped-def]
    joined, grad, values, row_H, column_C, tokens, width, times, FUNCTION: tl.constexpr
):
    gate_HC, up_HC, inside_HC = _load_both(joined, row_H, column_C, tokens, width)
    grad_HC = tl.load(grad + row_H[:, None] * width + column_C[None, :], mask=inside_HC, other=0.0).to(tl.float32)
    of_gate_HC = grad_HC * up_HC * act_slope(gate_HC, FUNCTION) * times
    of_up_HC = grad_HC * act_value(gate_HC, FUNCTION) * times
    first_HC = of_gate_HC.to(values.dtype.element_ty, fp_downcast_rounding="rtne")
    second_HC = of_up_HC.to(values.dtype.element_ty, fp_downcast_rounding="rtne")
    to_HC = values + row_H[:, None] * (2 * width) + column_C[None, :]
    tl.store(to_HC, first_HC, mask=inside_HC)
    tl.store(to_HC + width, second_HC, mask=inside_HC)
    return first_HC, second_HC
