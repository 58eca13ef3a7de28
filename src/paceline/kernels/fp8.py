"""Linear layers whose three products run in fp8, from weights and activations in bf16.

    forward            out_MN = x_MK    @ w_NK.T     e4m3, e4m3, fast accumulation
    input gradient     dx_MK  = grad_MN @ w_NK       gradient e5m2 (e4m3 with scales of rows), weight e4m3
    weight gradient    dw_NK  = grad_MN.T @ x_MK     the same, input e4m3

Scales are dynamic (`fp8_cast`): "tensorwise" has one for each tensor, "rowwise" one for each row of each product, so
that an operand of two products is cast twice. Those of inputs and gradients may also be of earlier steps
(`DelayedPair`); without gradients, as in evaluation, they are the tensors' own. fp8 tensor cores want both operands
contiguous along what is summed over, so each tensor is needed as it lies and transposed.

Kept between forward and backward, in bytes:

| input, e4m3, transposed | M K |
| its scale | 4, or 4 K |
| weights | 0: the cache's (2 N K for all micro-batches), or the bf16 ones, which are there anyway and cast again |

The input is kept transposed: that copy is written beside the one that the forward reads, which goes at once. Turning it
in the backward would cost another 2 M K bytes of traffic for the same memory.

Layers that read the same input (queries, keys and values; gate and up) are one product here: the input is cast once,
their weights have one scale between them, and the gradient of the input is one sum in fp32.

Where ranks hold parts of these matrices (`Cut`), scales are those of the whole ones, and every rank rounds as one
process with all of them does.

Sources: formats and which of them where: arXiv:2209.05433. `torch._scaled_mm` has no public name that autograd or
`torch.compile` of torch 2.11 know; it is the operation behind `F.scaled_mm`.

Dims: M tokens, K input width, N output width, of all joined layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.kernels.fp8_cast import (
    E4M3,
    MULTIPLE,
    CastKernel,
    Fp8,
    Parted,
    Scaling,
    cast_both,
    cast_columns,
    cast_rows,
    cast_weights_both,
    gradient_dtype,
    product,
)
from paceline.kernels.fp8_delayed import Delayed, DelayedPair, cast_delayed
from paceline.kernels.fp8_weight_gradient import accumulate_fp8_weight_gradient

NO_PLACE: tuple[Tensor | None, Tensor | None] = (None, None)


class Cut(NamedTuple):
    """This rank's products are a part of larger ones."""

    over: Literal["inputs", "outputs"]
    """Which width of the weights is cut: K, and each rank has a part of the sum; or N."""
    widen: Callable[[Tensor], Tensor]
    """See `Parted`."""

    @property
    def weight(self) -> Parted:
        return Parted(dim=1 if self.over == "inputs" else 0, widen=self.widen)

    @property
    def input(self) -> Parted | None:
        return Parted(dim=1, widen=self.widen) if self.over == "inputs" else None

    @property
    def gradient(self) -> Parted | None:
        return Parted(dim=1, widen=self.widen) if self.over == "outputs" else None


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


def cast_weights(weights: Sequence[Tensor], scaling: Scaling, cut: Cut | None = None) -> CachedWeight:
    """What `fp8_linears` multiplies by, to be made once for each change of the weights."""
    parted = None if cut is None else cut.weight
    return CachedWeight(*cast_weights_both([weight.detach() for weight in weights], scaling, parted))


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scaling: Scaling,
    cached: CachedWeight | None = None,
    kernel: CastKernel = "torch",
    cut: Cut | None = None,
    delayed: DelayedPair | None = None,
    place: tuple[Tensor | None, Tensor | None] = NO_PLACE,
) -> tuple[Tensor, ...]:
    """``x`` [..., K] times each of the [N, K] weights, plus biases: one fp8 product for all. See `why_not_fp8`.

    Args:
        cached: `cast_weights` of these weights as they are; otherwise they are cast here and again in the backward.
        cut: what ranks hold parts of, if they do. Outputs, and the gradient of ``x``, are this rank's products alone.
        delayed: what scales of earlier steps are made of, for ``x`` and the gradient of the outputs; ``scaling`` is
            then "tensorwise", for weights. Of a part of a matrix that nothing is known of, the scale is the part's own.
        place: where the gradient of all weights is summed, and whether nothing is there yet: see
            `fp8_weight_gradient`. They then get none from autograd.
    """
    assert delayed is None or scaling == "tensorwise", "scales of earlier steps are of tensors"
    if torch.is_grad_enabled():
        tensors = (*states_of(delayed), *tensors_of(cached, scaling), *place)
        joined = _Products.apply(scaling, kernel, cut, *tensors, x, *weights)
    else:
        joined = products_without_gradients(x, weights, scaling, cached, cut)
    return split_outputs(joined, weights, biases)


def tensors_of(cached: CachedWeight | None, scaling: Scaling) -> tuple[Tensor | None, ...]:
    """Four arguments for an autograd function: rows, their scale, columns, and their scale if it is another one."""
    if cached is None:
        return (None,) * 4
    # one scale for both is handed over once: the compiler (torch 2.13) does not take the same tensor twice
    return (*cached.rows, cached.columns.values, None if scaling == "tensorwise" else cached.columns.scale)


def states_of(delayed: DelayedPair | None) -> tuple[Tensor | None, ...]:
    """Four arguments for an autograd function: input's state and whether it is known, and the gradient's."""
    return (None,) * 4 if delayed is None else (*delayed.input, *delayed.gradient)


def delayed_of(state: Tensor | None, known: Tensor | None) -> Delayed | None:
    """Of two of these."""
    return None if state is None or known is None else Delayed(state, known)


def products_without_gradients(
    x: Tensor, weights: Sequence[Tensor], scaling: Scaling, cached: CachedWeight | None, cut: Cut | None
) -> Tensor:
    """All outputs as one, [..., N]. Nothing is transposed."""
    rows = cast_rows(weights, E4M3, scaling, cut and cut.weight) if cached is None else cached.rows
    return multiply(cast_rows([x.flatten(0, -2)], E4M3, scaling, cut and cut.input), rows, x.dtype, x.shape)


def split_outputs(joined: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    outputs = joined.split([weight.shape[0] for weight in weights], dim=-1)
    return tuple(out if bias is None else out + bias for out, bias in zip(outputs, biases, strict=True))


def multiply(x_MK: Fp8, weight_NK: Fp8, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The forward's product for an input of that ``shape``."""
    return product(x_MK, weight_NK, dtype, fast=True).view(*shape[:-1], -1)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scaling: Scaling,
        kernel: CastKernel,
        cut: Cut | None,
        x_state: Tensor | None,
        x_known: Tensor | None,
        grad_state: Tensor | None,
        grad_known: Tensor | None,
        cached_rows: Tensor | None,
        rows_scale: Tensor | None,
        cached_columns: Tensor | None,
        columns_scale: Tensor | None,
        place: Tensor | None,
        fresh: Tensor | None,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.scaling, ctx.kernel, ctx.cut, ctx.is_cached = scaling, kernel, cut, cached_rows is not None
        how = Casting(scaling, kernel, cut and cut.input, delayed_of(x_state, x_known))
        x_rows, x_columns = cast_operand(x.flatten(0, -2), E4M3, how, rows=True, columns=any(ctx.needs_input_grad[14:]))
        assert x_rows is not None
        kept = (grad_state, grad_known, place, fresh, *(x_columns or (None, None)))
        if cached_rows is not None and rows_scale is not None:
            weight_rows = Fp8(cached_rows, rows_scale)
            ctx.save_for_backward(*kept, cached_columns, rows_scale if columns_scale is None else columns_scale)
        else:
            weight_rows = cast_rows(weights, E4M3, scaling, cut and cut.weight)
            ctx.save_for_backward(*kept, *weights)
        ctx.sizes = [weight.shape[0] for weight in weights]
        ctx.weight_dtype = weights[0].dtype
        return multiply(x_rows, weight_rows, x.dtype, x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        state, known, place, fresh, x_columns, x_scale, *weights = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[13], any(ctx.needs_input_grad[14:])
        how = Casting(ctx.scaling, ctx.kernel, ctx.cut and ctx.cut.gradient, delayed_of(state, known))
        rows, columns = cast_gradient(grad, how, rows=wants_x, columns=wants_weight)
        grad_x = None
        if rows is not None:
            weight_KN = weight_columns(weights, ctx.scaling, ctx.cut, is_cached=ctx.is_cached)
            grad_x = product(rows, weight_KN, grad.dtype, fast=False).view(*grad.shape[:-1], -1)
        grad_weights: Sequence[Tensor | None] = [None] * len(ctx.sizes)
        if columns is not None:
            grad_weights = weight_gradients(columns, Fp8(x_columns, x_scale), ctx.sizes, ctx.weight_dtype, place, fresh)
        return *(None for _ in range(13)), grad_x, *grad_weights


def weight_gradients(
    columns: Fp8, x_KM: Fp8, sizes: Sequence[int], dtype: torch.dtype, place: Tensor | None, fresh: Tensor | None
) -> Sequence[Tensor | None]:
    """For autograd, of each joined weight: its part of one product, or nothing where that goes to a place."""
    if place is None or fresh is None:
        return product(columns, x_KM, dtype, fast=False).split(sizes)
    accumulate_fp8_weight_gradient(place, fresh, columns, x_KM)
    return [None] * len(sizes)


class Casting(NamedTuple):
    """How one operand becomes fp8."""

    scaling: Scaling
    kernel: CastKernel
    parted: Parted | None = None
    delayed: Delayed | None = None


def cast_operand(
    x_RC: Tensor, dtype: torch.dtype, how: Casting, *, rows: bool, columns: bool
) -> tuple[Fp8 | None, Fp8 | None]:
    """(`fp8_cast.cast_rows`, `fp8_cast.cast_columns`), as far as they are wanted."""
    scaling, kernel, parted, delayed = how
    if delayed is not None and (rows or columns):
        as_it_lies, other = cast_delayed(x_RC, dtype, delayed, kernel, turned=columns)
        return as_it_lies if rows else None, other
    if rows and columns:
        return cast_both(x_RC, dtype, scaling, kernel, parted)
    return (
        cast_rows([x_RC], dtype, scaling, parted) if rows else None,
        cast_columns([x_RC], dtype, scaling, parted) if columns else None,
    )


def cast_gradient(grad: Tensor, how: Casting, *, rows: bool, columns: bool) -> tuple[Fp8 | None, Fp8 | None]:
    """The gradient of the joined outputs, [..., N], for the product with the weights and that with the input."""
    return cast_operand(grad.flatten(0, -2), gradient_dtype(how.scaling), how, rows=rows, columns=columns)


def weight_columns(saved: Sequence[Tensor], scaling: Scaling, cut: Cut | None, *, is_cached: bool) -> Fp8:
    """Joined weights for the product with the gradient: what the forward cast, or the weights themselves."""
    return Fp8(*saved) if is_cached else cast_columns(saved, E4M3, scaling, cut and cut.weight)


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
