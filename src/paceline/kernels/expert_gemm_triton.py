"""`kernels/expert_gemm.py` over index lists: tokens are picked in the load, and never lie in memory K times; weight
gradients are added to their sums in the store.

Which tiles there are follows from the ends of the experts' rows, on the device: each program makes the table in
registers and looks its tiles up. The grid is bounded by the worst case (every expert ends inside a tile), or is as many
programs as fit the device at once, each with several tiles.

Imported only where it runs: Triton does not come with a CPU build of torch.

Dims as in `expert_gemm`; H = M * F hidden numbers of a row, M = 2 if gated. A tile is P rows times Q columns, summed
over S numbers at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.expert_gemm import Rows
from paceline.kernels.expert_rows import ActivationFunction
from paceline.kernels.expert_rows_triton import act_value


class Tiles(NamedTuple):
    """How a product is cut up. Not tuned while training: the order of sums, and with it the last bit, is then the same
    on every rank and in every run."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    together: int = 8
    """Tiles of rows that go through the columns side by side: what they read of the matrix stays in the L2 cache."""
    waves: int = 0
    """Programs for each multiprocessor, each with many tiles; 0 = a program for each tile."""
    atomic: bool = True
    """fp32 sums of weight gradients are added to in the L2 cache: the program neither waits for what it adds to nor has
    registers for it (with 8 warps 128 a thread instead of 188, so that two programs fit a multiprocessor). Nobody else
    adds to the same numbers, so that the order of sums is fixed all the same."""
    bulk: bool = False
    """Weight gradients are stored, and added to their sums, by the bulk copy engine (TMA), where sizes allow: the
    program hands a whole tile over and goes on to the next one. In bf16 it rounds a product before it adds it."""
    descriptors: bool = False
    """Matrices, and rows that are not picked, are loaded by the bulk copy engine (TMA), where sizes allow."""
    registers: int = 0
    """At most so many a thread, by spilling the rest; 0 = no limit. 128 with 8 warps lets two programs share a
    multiprocessor."""


WITH_ACTIVATION = Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)
PRODUCT = Tiles(rows=128, columns=256, depth=64, warps=8, stages=3)
FP8_WITH_ACTIVATION = Tiles(rows=128, columns=128, depth=128, warps=8, stages=3)
FP8_PRODUCT = Tiles(rows=128, columns=256, depth=128, warps=8, stages=3)
# two accumulators: tiles of 128 x 256 would spill registers
FP8_EXACT_PRODUCT = Tiles(rows=128, columns=128, depth=128, warps=8, stages=3)
WEIGHT = Tiles(rows=128, columns=128, depth=64, warps=8, stages=3)
WEIGHT_STORED = WEIGHT._replace(registers=128)
"""Where the program itself adds or writes: on an H200 1.37 ms in the place of 1.84 for the first sums of 128 x 1536 x
2048 numbers in fp32, over 65,536 rows."""


def product_with_activation(
    rows: Rows,
    matrix_EXH: Tensor,
    weights_NK: Tensor,
    function: ActivationFunction,
    scale_EH: Tensor | None = None,
    *,
    gated: bool,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """(`product`, `activate` of it): [A, H], [A, F].

    A program has the same columns of gate and up, so that a tile has twice as many columns as ``tiles`` says.
    """
    A, H, F = rows.number, matrix_EXH.shape[2], matrix_EXH.shape[2] // (2 if gated else 1)
    dtype = rows.values.dtype if scale_EH is None else torch.bfloat16
    hidden_AH, act_AF = rows.values.new_empty(A, H, dtype=dtype), rows.values.new_empty(A, F, dtype=dtype)
    _launch_rows(
        rows,
        matrix_EXH,
        F,
        hidden_AH,
        tiles or (WITH_ACTIVATION if scale_EH is None else FP8_WITH_ACTIVATION),
        scale=scale_EH,
        act=act_AF,
        weights=weights_NK,
        function=function,
        gated=gated,
    )
    return hidden_AH, act_AF


def product(
    rows: Rows, matrix_EXY: Tensor, scale_EY: Tensor | None = None, *, fast: bool = True, tiles: Tiles | None = None
) -> Tensor:
    """See `expert_gemm.product`."""
    dtype = rows.values.dtype if scale_EY is None else torch.bfloat16
    out_AY = rows.values.new_empty(rows.number, matrix_EXY.shape[2], dtype=dtype)
    if tiles is None:
        tiles = PRODUCT if scale_EY is None else FP8_PRODUCT if fast else FP8_EXACT_PRODUCT
    _launch_rows(rows, matrix_EXY, matrix_EXY.shape[2], out_AY, tiles, scale=scale_EY, fast=fast)
    return out_AY


def _launch_rows(
    rows: Rows,
    matrix_EXY: Tensor,
    columns: int,
    out: Tensor,
    tiles: Tiles,
    *,
    scale: Tensor | None = None,
    fast: bool = True,
    act: Tensor | None = None,
    weights: Tensor | None = None,
    function: ActivationFunction = "silu",
    gated: bool = False,
) -> None:
    E, X, _ = matrix_EXY.shape
    values = rows.values.contiguous()
    assert values.shape[1] == X and values.dtype == matrix_EXY.dtype, (values.shape, matrix_EXY.shape)
    if rows.number == 0:
        return
    deep = matrix_EXY.stride(1) == 1  # depth is what lies side by side
    described = tiles.descriptors and X % tiles.depth == 0 and _describable(values, matrix_EXY)
    from_matrix, from_values = matrix_EXY, values
    if described:
        flat = (matrix_EXY.mT if deep else matrix_EXY).flatten(0, 1)
        from_matrix = _described(flat, (tiles.columns, tiles.depth) if deep else (tiles.depth, tiles.columns))
        if not rows.picked:
            from_values = _described(values, (tiles.rows, tiles.depth))
    tiles_of_rows = triton.cdiv(rows.number, tiles.rows) + min(E, rows.number)
    grid = _grid(tiles_of_rows * triton.cdiv(columns, tiles.columns), tiles, out)
    _expert_product_kernel[grid](
        from_values,
        rows.order.order,
        rows.order.ends,
        from_matrix,
        out,
        out if act is None else act,
        rows.order.ends if weights is None else weights.contiguous(),
        rows.order.ends if rows.scale is None else rows.scale.contiguous(),
        rows.order.ends if scale is None else scale.contiguous(),
        X,
        columns,
        out.shape[1],
        E,
        rows.top_k,
        *matrix_EXY.stride(),
        PICKED=rows.picked,
        ACTIVATE=act is not None,
        FUNCTION=function,
        GATED=gated,
        EVEN_DEPTH=X % tiles.depth == 0,
        EVEN_COLUMNS=columns % tiles.columns == 0,
        SCALED=scale is not None,
        FAST=fast,
        DESCRIBED=described,
        DEEP=deep,
        **_blocks(tiles, E),
    )


def _describable(values: Tensor, matrix_EXY: Tensor) -> bool:
    """What the copy engine takes: each row begins at a multiple of 16 bytes."""
    deep = matrix_EXY.mT.is_contiguous()
    aligned = matrix_EXY.data_ptr() % 16 == values.data_ptr() % 16 == 0 and all(
        size * matrix_EXY.itemsize % 16 == 0 for size in (*matrix_EXY.shape[1:], values.shape[1])
    )
    return aligned and (deep or matrix_EXY.is_contiguous())


def _described(matrix: Tensor, block: tuple[int, int]) -> Any:
    return TensorDescriptor.from_tensor(matrix, list(block))


def weight_product(grad: Rows, x: Rows, out_EDX: Tensor, *, first: bool, tiles: Tiles | None = None) -> None:
    """See `expert_gemm.weight_product`."""
    E, D, X = out_EDX.shape
    tiles = tiles or (WEIGHT if out_EDX.dtype == torch.float32 and not first else WEIGHT_STORED)
    assert out_EDX.is_contiguous() and grad.values.dtype == x.values.dtype
    assert grad.width == D and x.width == X, (grad.width, x.width, out_EDX.shape)
    if grad.number == 0:
        if first:
            out_EDX.zero_()
        return
    grid = _grid(E * triton.cdiv(D, tiles.rows) * triton.cdiv(X, tiles.columns), tiles, out_EDX)
    blocks = _blocks(tiles, E)
    del blocks["PADDED"]
    even = D % tiles.rows == 0 and X % tiles.columns == 0
    bulk = tiles.bulk and even and out_EDX.data_ptr() % 16 == 0 and X * out_EDX.itemsize % 16 == 0
    _expert_weight_kernel[grid](
        grad.values.contiguous(),
        x.values.contiguous(),
        grad.order.order,
        grad.order.ends,
        _described(out_EDX.flatten(0, 1), (tiles.rows, tiles.columns)) if bulk else out_EDX,
        D,
        X,
        E,
        max(grad.top_k, x.top_k),
        GRAD_PICKED=grad.picked,
        X_PICKED=x.picked,
        FIRST=first,
        ATOMIC=tiles.atomic and not first and out_EDX.dtype == torch.float32,
        BULK=bulk,
        EVEN=even,
        **blocks,
    )


def _grid(number_of_tiles: int, tiles: Tiles, place: Tensor) -> tuple[int]:
    if not tiles.waves:
        return (number_of_tiles,)
    at_once = 2 if not place.is_cuda else torch.cuda.get_device_properties(place.device).multi_processor_count
    return (min(number_of_tiles, at_once * tiles.waves),)


def _blocks(tiles: Tiles, num_experts: int) -> dict[str, Any]:
    return {
        "P": tiles.rows,
        "Q": tiles.columns,
        "S": tiles.depth,
        "TOGETHER": tiles.together,
        "PADDED": max(128, triton.next_power_of_2(num_experts)),  # one kernel for most numbers of experts
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **({"maxnreg": tiles.registers} if tiles.registers else {}),
    }


@triton.jit
def _expert_product_kernel(  # type: ignore[no-untyped-def]
    values,
    order,
    ends,
    matrix,
    out,
    act,
    weights,
    row_scale,
    column_scale,
    depth,
    columns,
    out_width,
    num_experts,
    top_k,
    matrix_stride,
    depth_stride,
    column_stride,
    PICKED: tl.constexpr,
    ACTIVATE: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    FAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    TOGETHER: tl.constexpr,
    PADDED: tl.constexpr,
):
    column_tiles = tl.cdiv(columns, Q)
    # tiles of rows of each expert, and how many there are up to its last one
    number_E = tl.arange(0, PADDED)
    is_expert_E = number_E < num_experts
    end_E = tl.load(ends + number_E, mask=is_expert_E, other=0)
    start_E = tl.load(ends + number_E - 1, mask=is_expert_E & (number_E > 0), other=0)
    tiles_E = tl.where(is_expert_E, (end_E - start_E + P - 1) // P, 0)
    until_E = tl.cumsum(tiles_E, 0)
    for tile in range(tl.program_id(0), tl.sum(tiles_E) * column_tiles, tl.num_programs(0)):
        past_E = is_expert_E & (until_E * column_tiles <= tile)
        expert = tl.sum(past_E.to(tl.int32)).to(tl.int64)
        within = tile - tl.sum(tl.where(past_E, tiles_E, 0)) * column_tiles
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        # down some tiles of rows, then on to the next columns
        run = TOGETHER * column_tiles
        first_tile = within // run * TOGETHER
        height = tl.minimum((end - start + P - 1) // P - first_tile, TOGETHER)
        row_tile = first_tile + within % run % height
        first_column = within % run // height * Q
        column_Q = first_column + tl.arange(0, Q)

        first_row = start + row_tile * P
        row_P = first_row + tl.arange(0, P)
        inside_P = row_P < end
        row_P = tl.where(inside_P, row_P, start)  # a row that there is; what comes out is not stored
        source_P = row_P
        if PICKED:
            source_P = tl.load(order + row_P) // top_k
        depth_S = tl.arange(0, S)
        if PICKED or not DESCRIBED:
            from_PS = values + source_P.to(tl.int64)[:, None] * depth + depth_S[None, :]
        if not DESCRIBED:
            matrix_SQ = (
                matrix + expert * matrix_stride + column_Q[None, :] * column_stride + depth_S[:, None] * depth_stride
            )
            gate_to_up = columns * column_stride
        number = expert.to(tl.int32)
        sum_PQ = tl.zeros((P, Q), dtype=tl.float32)
        if GATED:
            up_PQ = tl.zeros((P, Q), dtype=tl.float32)
        for done in range(0, depth, S):
            if DESCRIBED and not PICKED:
                x_PS = values.load([first_row, done])  # rows of the next expert too, which are not stored
            else:
                if EVEN_DEPTH:
                    x_PS = tl.load(from_PS)
                else:
                    x_PS = tl.load(from_PS, mask=(depth_S < depth - done)[None, :], other=0.0)
                from_PS += S
            if DESCRIBED:
                if DEEP:
                    first_SQ = matrix.load([number * out_width + first_column, done]).T
                    if GATED:
                        second_SQ = matrix.load([number * out_width + columns + first_column, done]).T
                else:
                    first_SQ = matrix.load([number * depth + done, first_column])
            else:
                if EVEN_DEPTH and EVEN_COLUMNS:
                    first_SQ = tl.load(matrix_SQ)
                    if GATED:
                        second_SQ = tl.load(matrix_SQ + gate_to_up)
                else:
                    there_SQ = (depth_S < depth - done)[:, None] & (column_Q < columns)[None, :]
                    first_SQ = tl.load(matrix_SQ, mask=there_SQ, other=0.0)
                    if GATED:
                        second_SQ = tl.load(matrix_SQ + gate_to_up, mask=there_SQ, other=0.0)
                matrix_SQ += S * depth_stride
            if SCALED and not FAST:
                # what the tensor cores add up in their own accumulator is moved to fp32 every so many numbers
                sum_PQ = tl.dot(x_PS, first_SQ, sum_PQ, max_num_imprecise_acc=S)
                if GATED:
                    up_PQ = tl.dot(x_PS, second_SQ, up_PQ, max_num_imprecise_acc=S)
            else:
                sum_PQ = tl.dot(x_PS, first_SQ, sum_PQ, input_precision="ieee")
                if GATED:
                    up_PQ = tl.dot(x_PS, second_SQ, up_PQ, input_precision="ieee")

        inside_PQ = inside_P[:, None] & (column_Q < columns)[None, :]
        if SCALED:
            scale_P = tl.load(row_scale + source_P)
            scale_Q = column_scale + number * out_width + column_Q
            there_Q = column_Q < columns
            sum_PQ *= scale_P[:, None] * tl.load(scale_Q, mask=there_Q, other=0.0)[None, :]
            if GATED:
                up_PQ *= scale_P[:, None] * tl.load(scale_Q + columns, mask=there_Q, other=0.0)[None, :]
        rounded_PQ = sum_PQ.to(out.dtype.element_ty)
        to_PQ = row_P.to(tl.int64)[:, None] * out_width + column_Q[None, :]
        tl.store(out + to_PQ, rounded_PQ, mask=inside_PQ)
        if ACTIVATE:
            # of what backward will find stored
            value_PQ = act_value(rounded_PQ.to(tl.float32), FUNCTION)
            if GATED:
                up_rounded_PQ = up_PQ.to(out.dtype.element_ty)
                tl.store(out + to_PQ + columns, up_rounded_PQ, mask=inside_PQ)
                value_PQ *= up_rounded_PQ.to(tl.float32)
            weight_P = tl.load(weights + tl.load(order + row_P)).to(tl.float32)
            act_PQ = (value_PQ * weight_P[:, None]).to(act.dtype.element_ty)
            tl.store(act + row_P.to(tl.int64)[:, None] * columns + column_Q[None, :], act_PQ, mask=inside_PQ)


@triton.jit
def _expert_weight_kernel(  # type: ignore[no-untyped-def]
    grad,
    x,
    order,
    ends,
    out,
    height,
    width,
    num_experts,
    top_k,
    GRAD_PICKED: tl.constexpr,
    X_PICKED: tl.constexpr,
    FIRST: tl.constexpr,
    ATOMIC: tl.constexpr,
    BULK: tl.constexpr,
    EVEN: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(height, P), tl.cdiv(width, Q)
    tiles = row_tiles * column_tiles
    for tile in range(tl.program_id(0), num_experts * tiles, tl.num_programs(0)):
        expert = (tile // tiles).to(tl.int64)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        # a sum that nothing is added to is not touched
        if FIRST or end > start:
            within, run = tile % tiles, TOGETHER * column_tiles
            first_tile = within // run * TOGETHER
            tall = tl.minimum(row_tiles - first_tile, TOGETHER)
            first_row, first_column = (first_tile + within % run % tall) * P, within % run // tall * Q
            row_P, column_Q = first_row + tl.arange(0, P), first_column + tl.arange(0, Q)
            sum_PQ = tl.zeros((P, Q), dtype=tl.float32)
            PICKED: tl.constexpr = GRAD_PICKED or X_PICKED
            picked_S = start + tl.arange(0, S)
            if PICKED:
                picked_S = tl.load(order + picked_S, mask=picked_S < end, other=0) // top_k
            for at in range(start, end, S):
                token_S = at + tl.arange(0, S)
                inside_S = token_S < end
                if not PICKED:
                    picked_S = token_S
                grad_S = picked_S if GRAD_PICKED else token_S
                x_S = picked_S if X_PICKED else token_S
                from_SP = grad + grad_S.to(tl.int64)[:, None] * height + row_P[None, :]
                from_SQ = x + x_S.to(tl.int64)[:, None] * width + column_Q[None, :]
                if EVEN:
                    grad_SP = tl.load(from_SP, mask=inside_S[:, None], other=0.0)
                    x_SQ = tl.load(from_SQ, mask=inside_S[:, None], other=0.0)
                else:
                    grad_SP = tl.load(from_SP, mask=inside_S[:, None] & (row_P < height)[None, :], other=0.0)
                    x_SQ = tl.load(from_SQ, mask=inside_S[:, None] & (column_Q < width)[None, :], other=0.0)
                sum_PQ = tl.dot(tl.trans(grad_SP), x_SQ, sum_PQ, input_precision="ieee")
                if PICKED:
                    # one round ahead: a load that waited for another in the same round would not be pipelined as deep
                    picked_S = tl.load(order + token_S + S, mask=token_S + S < end, other=0) // top_k
            if BULK:
                # nobody else adds here either
                at, sum_PQ = expert.to(tl.int32) * height + first_row, sum_PQ.to(out.dtype)
                if FIRST:
                    out.store([at, first_column], sum_PQ)
                else:
                    out.atomic_add([at, first_column], sum_PQ)
            else:
                to_PQ = out + expert * height * width + row_P.to(tl.int64)[:, None] * width + column_Q[None, :]
                inside_PQ = (row_P < height)[:, None] & (column_Q < width)[None, :]
                if ATOMIC:
                    # nobody else adds here: atomics only so that the program need not wait for what it adds to
                    tl.atomic_add(to_PQ, sum_PQ, mask=inside_PQ, sem="relaxed")
                else:
                    if not FIRST:
                        sum_PQ += tl.load(to_PQ, mask=inside_PQ, other=0.0).to(tl.float32)
                    tl.store(to_PQ, sum_PQ.to(out.dtype.element_ty), mask=inside_PQ)
