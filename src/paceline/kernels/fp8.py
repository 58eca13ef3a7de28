"""Linear layers whose three products run in fp8, from weights and activations in bf16.

    forward            out_MN = x_MK    @ w_NK.T     e4m3, e4m3, fast accumulation
    input gradient     dx_MK  = grad_MN @ w_NK       gradient e5m2 (e4m3 with scales of rows), weight e4m3
    weight gradient    dw_NK  = grad_MN.T @ x_MK     the same, input e4m3

Scales are dynamic (`fp8_cast`): "tensorwise" has one for each tensor, "rowwise" one for each row of each product, so
that an operand of two products is cast twice. fp8 tensor cores want both operands contiguous along what is summed over,
so each tensor is needed as it lies and transposed.

Kept between forward and backward, in bytes:

| input, e4m3, transposed | M K |
| its scale | 4, or 4 K |
| weights | 0: the cache's (2 N K for all micro-batches), or the bf16 ones, which are there anyway and cast again |

The input is kept transposed: that copy is written beside the one that the forward reads, which goes at once. Turning it
in the backward would cost another 2 M K bytes of traffic for the same memory.

Layers that read the same input (queries, keys and values; gate and up) are one product here: the input is cast once,
their weights have one scale between them, and the gradient of the input is one sum in fp32.

Sources: formats and which of them where: arXiv:2209.05433. `torch._scaled_mm` has no public name that autograd or
`torch.compile` of torch 2.11 know; it is the operation behind `F.scaled_mm`.

Dims: M tokens, K input width, N output width, of all joined layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.fp8_cast import (
    E4M3,
    MULTIPLE,
    CastKernel,
    Fp8,
    Scaling,
    cast_both,
    cast_columns,
    cast_rows,
    cast_weights_both,
    gradient_dtype,
    product,
)


class CachedWeight(NamedTuple):
    """Joined weights in fp8, for both products that read them: 2 bytes an element."""

    rows: Fp8
    """[N, K]."""
    columns: Fp8
    """[K, N]."""


def why_not_fp8(weights: Sequence[Tensor]) -> str | None:
    """Why these joined weights cannot be multiplied in fp8, or None if they can."""
    outputs, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    odd = [f"{name} {size}" for name, size in (("input", inputs), ("output", outputs)) if size % MULTIPLE]
    if not odd:
        return None
    return f"its {' and '.join(odd)} {'is' if len(odd) == 1 else 'are'} not a multiple of {MULTIPLE}"


def cast_weights(weights: Sequence[Tensor], scaling: Scaling, kernel: CastKernel = "torch") -> CachedWeight:
    """What `fp8_linears` multiplies by, to be made once for each change of the weights."""
    return CachedWeight(*cast_weights_both([weight.detach() for weight in weights], scaling, kernel))


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scaling: Scaling,
    cached: CachedWeight | None = None,
    kernel: CastKernel = "torch",
) -> tuple[Tensor, ...]:
    """``x`` [..., K] times each of the [N, K] weights, plus biases: one fp8 product for all. See `why_not_fp8`.

    Args:
        cached: `cast_weights` of these weights as they are; otherwise they are cast here and again in the backward.
    """
    tensors: tuple[Tensor | None, ...] = (None,) * 4
    if cached is not None:
        # one scale for both is handed over once: the compiler (torch 2.13) does not take the same tensor twice
        columns_scale = None if scaling == "tensorwise" else cached.columns.scale
        tensors = (*cached.rows, cached.columns.values, columns_scale)
    if torch.is_grad_enabled():
        joined = _Products.apply(scaling, kernel, *tensors, x, *weights)
    else:
        # nobody will ask for gradients: nothing is transposed
        rows = cast_rows(weights, E4M3, scaling) if cached is None else cached.rows
        joined = _forward(cast_rows([x.flatten(0, -2)], E4M3, scaling), rows, x)
    outputs = joined.split([weight.shape[0] for weight in weights], dim=-1)
    return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))


def _forward(x_MK: Fp8, weight_NK: Fp8, x: Tensor) -> Tensor:
    return product(x_MK, weight_NK, x.dtype, fast=True).view(*x.shape[:-1], -1)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scaling: Scaling,
        kernel: CastKernel,
        cached_rows: Tensor | None,
        rows_scale: Tensor | None,
        cached_columns: Tensor | None,
        columns_scale: Tensor | None,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.scaling, ctx.kernel, ctx.is_cached = scaling, kernel, cached_rows is not None
        x_MK = x.flatten(0, -2)
        x_columns: tuple[Tensor | None, Tensor | None] = (None, None)
        if any(ctx.needs_input_grad[7:]):
            x_rows, x_columns = cast_both(x_MK, E4M3, scaling, kernel)
        else:
            x_rows = cast_rows([x_MK], E4M3, scaling)
        if cached_rows is not None and rows_scale is not None:
            weight_rows = Fp8(cached_rows, rows_scale)
            ctx.save_for_backward(*x_columns, cached_columns, rows_scale if columns_scale is None else columns_scale)
        else:
            weight_rows = cast_rows(weights, E4M3, scaling)
            ctx.save_for_backward(*x_columns, *weights)
        ctx.sizes = [weight.shape[0] for weight in weights]
        ctx.weight_dtype = weights[0].dtype
        return _forward(x_rows, weight_rows, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x_columns, x_scale, *weights = ctx.saved_tensors
        scaling, dtype, grad_MN = ctx.scaling, gradient_dtype(ctx.scaling), grad.flatten(0, -2)
        wants_x, wants_weight = ctx.needs_input_grad[6], any(ctx.needs_input_grad[7:])
        rows = columns = None
        if wants_x and wants_weight:
            rows, columns = cast_both(grad_MN, dtype, scaling, ctx.kernel)
        elif wants_x:
            rows = cast_rows([grad_MN], dtype, scaling)
        elif wants_weight:
            columns = cast_columns([grad_MN], dtype, scaling)

        grad_x = None
        if rows is not None:
            weight_KN = Fp8(*weights) if ctx.is_cached else cast_columns(weights, E4M3, scaling)
            grad_x = product(rows, weight_KN, grad.dtype, fast=False).view(*grad.shape[:-1], -1)
        grad_weights: Sequence[Tensor | None] = [None] * len(ctx.sizes)
        if columns is not None:
            grad_NK = product(columns, Fp8(x_columns, x_scale), ctx.weight_dtype, fast=False)
            grad_weights = grad_NK.split(ctx.sizes)
        return None, None, None, None, None, None, grad_x, *grad_weights


# ---- the plain twin


def fp8_linear_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, scaling: Scaling
) -> tuple[Tensor, ...]:
    """What `fp8_linears` computes, to the rounding of sums: operands are rounded to fp8, then multiplied in fp32."""
    joined: Tensor = _Reference.apply(scaling, x, torch.cat(list(weights)))
    outputs = joined.split([weight.shape[0] for weight in weights], dim=-1)
    return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))


def rounded(x_RC: Tensor, dtype: torch.dtype, scaling: Scaling, *, over: int) -> Tensor:
    """fp32 [R, C]: what is multiplied in place of ``x_RC`` in a product that sums over the dim ``over``."""
    dim = None if scaling == "tensorwise" else over
    largest = x_RC.float().abs()
    largest = largest.amax() if dim is None else largest.amax(dim, keepdim=True)
    # any power of two would do but for overflow and denormals: the largest that fits
    factor = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest.double()))).float()
    factor = torch.where(largest == 0, 1.0, factor)
    return (x_RC.float() * factor).to(dtype).float() / factor


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scaling: Scaling, x: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.scaling = scaling
        ctx.save_for_backward(x, weight_NK)
        x_MK = x.flatten(0, -2)
        out_MN = rounded(x_MK, E4M3, scaling, over=1) @ rounded(weight_NK, E4M3, scaling, over=1).T
        return out_MN.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight_NK = ctx.saved_tensors
        scaling, dtype = ctx.scaling, gradient_dtype(ctx.scaling)
        x_MK, grad_MN = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x_MK = rounded(grad_MN, dtype, scaling, over=1) @ rounded(weight_NK, E4M3, scaling, over=0)
        grad_weight_NK = rounded(grad_MN, dtype, scaling, over=0).T @ rounded(x_MK, E4M3, scaling, over=0)
        return None, grad_x_MK.to(x.dtype).view_as(x), grad_weight_NK.to(weight_NK.dtype)
