"""`kernels/expert_rows.py` with one pass over memory for each. Imported only where it runs: Triton does not come with a
CPU build of torch.

Traffic in bf16, bytes: `spread` reads 2 N C and writes 2 A C, `combine` the mirror image; `activate` reads 2 A M F and
writes 2 A F; `activate_backward` reads 2 A (M + 1) F and writes as much.

Nobody's rows (from `ends[-1]` on) are neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.expert_order import ExpertOrder
from paceline.kernels.expert_rows import ActivationFunction

_WIDE = 2048
"""Columns of a program that copies: 16 bytes a thread, twice."""
_ROWS, _COLUMNS = 4, 256
"""Tile of a program that activates; a guess, not tuned yet."""


def spread(x_NC: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """See `expert_rows.spread`. Each token is read once."""
    x_NC = x_NC.contiguous()
    N, C = x_NC.shape
    rows_AC = x_NC.new_empty(len(order.place), C)
    block = min(_WIDE, triton.next_power_of_2(C))
    if rows_AC.numel():
        _expert_spread_kernel[(N, triton.cdiv(C, block))](x_NC, order.place, rows_AC, C, top_k, block)
    return rows_AC


def combine(rows_AC: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """See `expert_rows.combine`. In the order of the token's choices, so that repeats are bit-equal."""
    C = rows_AC.shape[1]
    out_NC = rows_AC.new_empty(len(order.place) // top_k, C)
    block = min(_WIDE, triton.next_power_of_2(C))
    if out_NC.numel():
        _expert_combine_kernel[(len(out_NC), triton.cdiv(C, block))](rows_AC, order.place, out_NC, C, top_k, block)
    return out_NC


def activate(hidden_AMF: Tensor, weights_NK: Tensor, order: ExpertOrder, function: ActivationFunction) -> Tensor:
    """See `expert_rows.activate`."""
    A, M, F = hidden_AMF.shape
    act_AF = hidden_AMF.new_empty(A, F)
    grid, block = _tiles(A, F)
    if act_AF.numel():
        _expert_activate_kernel[grid](
            hidden_AMF.contiguous(), weights_NK.contiguous(), order.order, order.ends, act_AF, F, len(order.ends),
            FUNCTION=function, GATED=M == 2, ROWS=_ROWS, COLUMNS=block,
        )  # fmt: skip
    return act_AF


def activate_backward(
    hidden_AMF: Tensor, grad_AF: Tensor, weights_NK: Tensor, order: ExpertOrder, function: ActivationFunction
) -> tuple[Tensor, Tensor, Tensor]:
    """See `expert_rows.activate_backward`. One program has whole rows, so their sums need no atomics."""
    A, M, F = hidden_AMF.shape
    grad_hidden, act_AF = torch.empty_like(hidden_AMF, memory_format=torch.contiguous_format), grad_AF.new_empty(A, F)
    grad_weights = torch.zeros_like(weights_NK, memory_format=torch.contiguous_format)  # of dropped assignments
    grid, block = _tiles(A, F)
    if act_AF.numel():
        _expert_activate_backward_kernel[grid[:1]](
            hidden_AMF.contiguous(), grad_AF.contiguous(), weights_NK.contiguous(), order.order, order.ends,
            grad_hidden, act_AF, grad_weights, F, len(order.ends),
            FUNCTION=function, GATED=M == 2, ROWS=_ROWS, COLUMNS=block,
        )  # fmt: skip
    return grad_hidden, act_AF, grad_weights


def _tiles(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    return (triton.cdiv(rows, _ROWS), triton.cdiv(columns, block)), block


@triton.jit
def _expert_spread_kernel(x, place, rows, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_C = column_C < columns
    x_C = tl.load(x + token * columns + column_C, mask=inside_C)
    for choice in tl.static_range(TOP_K):  # unrolled: all loads are under way at once
        row = tl.load(place + token * TOP_K + choice).to(tl.int64)
        tl.store(rows + row * columns + column_C, x_C, mask=inside_C & (row >= 0))


@triton.jit
def _expert_combine_kernel(rows, place, out, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_C = column_C < columns
    sum_C = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled: all loads are under way at once
        row = tl.load(place + token * TOP_K + choice).to(tl.int64)
        sum_C += tl.load(rows + row * columns + column_C, mask=inside_C & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * columns + column_C, sum_C.to(out.dtype.element_ty), mask=inside_C)


@triton.jit
def act_value(x, FUNCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activation of fp32 numbers."""
    if FUNCTION == "silu":
        value = x * tl.sigmoid(x)
    elif FUNCTION == "gelu":
        value = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        value = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        value = tl.maximum(x, 0.0)
    return value


@triton.jit
def act_slope(x, FUNCTION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of `act_value`."""
    if FUNCTION == "silu":
        sigmoid = tl.sigmoid(x)
        slope = sigmoid * (1 + x * (1 - sigmoid))
    elif FUNCTION == "gelu":
        slope = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif FUNCTION == "gelu_tanh":
        # tanh(u) = 2 sigmoid(2 u) - 1
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = sigmoid + x * sigmoid * (1 - sigmoid) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        slope = tl.where(x > 0, 1.0, 0.0)
    return slope


@triton.jit
def _expert_activate_kernel(  # type: ignore[no-untyped-def]
    hidden,
    weights,
    order,
    ends,
    act,
    width,
    num_experts,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    total = tl.load(ends + num_experts - 1)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_F = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_RF = (row_R < total)[:, None] & (column_F < width)[None, :]
    stride = 2 * width if GATED else width
    at_RF = row_R[:, None] * stride + column_F[None, :]
    value_RF = act_value(tl.load(hidden + at_RF, mask=inside_RF, other=0.0).to(tl.float32), FUNCTION)
    if GATED:
        value_RF *= tl.load(hidden + at_RF + width, mask=inside_RF, other=0.0).to(tl.float32)
    assignment_R = tl.load(order + row_R, mask=row_R < total, other=0)
    weight_R = tl.load(weights + assignment_R, mask=row_R < total, other=0.0).to(tl.float32)
    act_RF = (value_RF * weight_R[:, None]).to(act.dtype.element_ty)
    tl.store(act + row_R[:, None] * width + column_F[None, :], act_RF, mask=inside_RF)


@triton.jit
def _expert_activate_backward_kernel(  # type: ignore[no-untyped-def]
    hidden,
    grad,
    weights,
    order,
    ends,
    grad_hidden,
    act,
    grad_weights,
    width,
    num_experts,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    total = tl.load(ends + num_experts - 1)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    assignment_R = tl.load(order + row_R, mask=row_R < total, other=0)
    weight_R = tl.load(weights + assignment_R, mask=row_R < total, other=0.0).to(tl.float32)
    sum_R = tl.zeros((ROWS,), dtype=tl.float32)
    stride = 2 * width if GATED else width
    for start in range(0, width, COLUMNS):
        column_F = start + tl.arange(0, COLUMNS)
        inside_RF = (row_R < total)[:, None] & (column_F < width)[None, :]
        hidden_RF = row_R[:, None] * stride + column_F[None, :]
        act_RF = row_R[:, None] * width + column_F[None, :]
        first_RF = tl.load(hidden + hidden_RF, mask=inside_RF, other=0.0).to(tl.float32)
        grad_RF = tl.load(grad + act_RF, mask=inside_RF, other=0.0).to(tl.float32)
        value_RF = act_value(first_RF, FUNCTION)
        grad_first_RF = grad_RF * weight_R[:, None] * act_slope(first_RF, FUNCTION)
        if GATED:
            up_RF = tl.load(hidden + hidden_RF + width, mask=inside_RF, other=0.0).to(tl.float32)
            grad_up_RF = grad_RF * weight_R[:, None] * value_RF
            tl.store(grad_hidden + hidden_RF + width, grad_up_RF.to(grad_hidden.dtype.element_ty), mask=inside_RF)
            grad_first_RF *= up_RF
            value_RF *= up_RF
        tl.store(grad_hidden + hidden_RF, grad_first_RF.to(grad_hidden.dtype.element_ty), mask=inside_RF)
        tl.store(act + act_RF, (value_RF * weight_R[:, None]).to(act.dtype.element_ty), mask=inside_RF)
        sum_R += tl.sum(grad_RF * value_RF, axis=1)
    tl.store(grad_weights + assignment_R, sum_R.to(grad_weights.dtype.element_ty), mask=row_R < total)
