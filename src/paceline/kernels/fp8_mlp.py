"""A whole gated MLP in fp8: `fp8.fp8_linears` twice, with `fp8_gated` between them.

    joined = x @ (gate; up).T      hidden = act(gate) * up, straight to fp8      out = hidden @ down.T

The numbers are those of the two layers one after the other, but for roundings to bf16 between them that are not made
here. Kept between forward and backward: the input and ``hidden`` in fp8, turned, and ``joined`` in bf16.

Scales of tensors only; no biases. Dims: M tokens, C hidden, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.fp8 import (
    NO_PLACE,
    CachedWeight,
    delayed_of,
    multiply,
    rounded,
    states_of,
    tensors_of,
    weight_columns,
    weight_gradients,
)
from paceline.kernels.fp8_cast import E4M3, E5M2, Fp8, cast_both, cast_rows, multiplier, product
from paceline.kernels.fp8_delayed import Delayed, DelayedPair, cast_delayed
from paceline.kernels.fp8_gated import (
    gated_backward_cast,
    gated_backward_largest,
    gated_backward_reference,
    gated_cast,
    gated_largest,
    gated_reference,
)
from paceline.kernels.fp8_gated_delayed import gated_backward_cast_delayed, gated_cast_delayed


def fp8_gated_mlp(
    x: Tensor,
    first: Sequence[Tensor],
    down_CF: Tensor,
    *,
    function: str,
    cached_first: CachedWeight | None = None,
    cached_down: CachedWeight | None = None,
    delayed_first: DelayedPair | None = None,
    delayed_down: DelayedPair | None = None,
    place_first: tuple[Tensor | None, Tensor | None] = NO_PLACE,
    place_down: tuple[Tensor | None, Tensor | None] = NO_PLACE,
) -> Tensor:
    """[..., C]: down(act(gate(x)) * up(x)). For training: ``x`` and all weights need gradients.

    Args:
        first: gate and up, [F, C] each.
        function: silu, gelu, gelu_tanh or relu.
        cached_first, cached_down: `fp8.cast_weights` of the weights as they are; both or neither.
        delayed_first, delayed_down: see `fp8.fp8_linears`; both or neither.
        place_first, place_down: the same.
    """
    assert len(first) == 2 and (cached_first is None) == (cached_down is None)
    assert (delayed_first is None) == (delayed_down is None)
    cached = (*tensors_of(cached_first, "tensorwise")[:3], *tensors_of(cached_down, "tensorwise")[:3])
    delayed = (*states_of(delayed_first), *states_of(delayed_down))
    out: Tensor = _GatedMlp.apply(function, *cached, *delayed, *place_first, *place_down, x, *first, down_CF)
    return out


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: str,
        first_rows: Tensor | None,
        first_scale: Tensor | None,
        first_columns: Tensor | None,
        down_rows: Tensor | None,
        down_scale: Tensor | None,
        down_columns: Tensor | None,
        x_state: Tensor | None,
        x_known: Tensor | None,
        grad_first_state: Tensor | None,
        grad_first_known: Tensor | None,
        hidden_state: Tensor | None,
        hidden_known: Tensor | None,
        grad_out_state: Tensor | None,
        grad_out_known: Tensor | None,
        first_place: Tensor | None,
        first_fresh: Tensor | None,
        down_place: Tensor | None,
        down_fresh: Tensor | None,
        x: Tensor,
        gate_FC: Tensor,
        up_FC: Tensor,
        down_CF: Tensor,
    ) -> Tensor:
        ctx.function, ctx.weight_dtype, ctx.width = function, gate_FC.dtype, gate_FC.shape[0]
        ctx.is_cached = first_rows is not None
        if first_rows is not None and first_scale is not None and down_rows is not None and down_scale is not None:
            first, down = Fp8(first_rows, first_scale), Fp8(down_rows, down_scale)
            weights: tuple[Tensor | None, ...] = (first_columns, first_scale, down_columns, down_scale)
        else:
            first, down = cast_rows([gate_FC, up_FC], E4M3, "tensorwise"), cast_rows([down_CF], E4M3, "tensorwise")
            weights = (gate_FC, up_FC, down_CF)
        x_rows, x_columns = _cast_both(x.flatten(0, -2), E4M3, delayed_of(x_state, x_known))
        joined_MX = product(x_rows, first, x.dtype, fast=True)
        values, turned, hidden_scale = _cast_hidden(joined_MX, function, delayed_of(hidden_state, hidden_known))
        states = (grad_first_state, grad_first_known, grad_out_state, grad_out_known)
        places = (first_place, first_fresh, down_place, down_fresh)
        ctx.save_for_backward(*states, *places, *x_columns, joined_MX, turned, hidden_scale, *weights)
        return multiply(Fp8(values, hidden_scale), down, x.dtype, x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        saved = ctx.saved_tensors  # once: what is computed again is handed out only once
        states, places, weights = saved[:4], saved[4:8], saved[13:]
        x_columns, x_scale, joined_MX, turned, hidden_scale = saved[8:13]
        cut = 2  # where the weights of the first product end, in either form
        first_KX = weight_columns(weights[:cut], "tensorwise", None, is_cached=ctx.is_cached)
        down_FC = weight_columns(weights[cut:], "tensorwise", None, is_cached=ctx.is_cached)
        rows, columns = _cast_both(grad.flatten(0, -2), E5M2, delayed_of(*states[2:]))
        grad_hidden_MF = product(rows, down_FC, grad.dtype, fast=False)
        hidden, dtype, width = Fp8(turned, hidden_scale), ctx.weight_dtype, ctx.width
        grad_down = weight_gradients(columns, hidden, [grad.shape[-1]], dtype, *places[2:])
        delayed = delayed_of(*states[:2])
        values, both_turned, scale = _cast_gradients(joined_MX, grad_hidden_MF, ctx.function, delayed)
        grad_x = product(Fp8(values, scale), first_KX, grad.dtype, fast=False).view(*grad.shape[:-1], -1)
        x_CM = Fp8(x_columns, x_scale)
        grad_first = weight_gradients(Fp8(both_turned, scale), x_CM, [width, width], dtype, *places[:2])
        return *(None for _ in range(19)), grad_x, *grad_first, *grad_down


def _cast_both(x_RC: Tensor, dtype: torch.dtype, delayed: Delayed | None) -> tuple[Fp8, Fp8]:
    if delayed is None:
        return cast_both(x_RC, dtype, "tensorwise", "triton")
    rows, columns = cast_delayed(x_RC, dtype, delayed, "triton", turned=True)
    assert columns is not None
    return rows, columns


def _cast_hidden(joined_MX: Tensor, function: str, delayed: Delayed | None) -> tuple[Tensor, Tensor, Tensor]:
    """Values, the same turned, and their scale."""
    if delayed is not None:
        return gated_cast_delayed(joined_MX, delayed, E4M3, function)
    factor = multiplier(gated_largest(joined_MX, function), E4M3)
    return *gated_cast(joined_MX, factor, E4M3, function), factor.reciprocal()


def _cast_gradients(
    joined_MX: Tensor, grad_MF: Tensor, function: str, delayed: Delayed | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of gate's and up's."""
    if delayed is not None:
        return gated_backward_cast_delayed(joined_MX, grad_MF, delayed, E5M2, function)
    factor = multiplier(gated_backward_largest(joined_MX, grad_MF, function), E5M2)
    return *gated_backward_cast(joined_MX, grad_MF, factor, E5M2, function), factor.reciprocal()


# ---- the plain twin


def fp8_gated_mlp_reference(x: Tensor, first: Sequence[Tensor], down_CF: Tensor, *, function: str) -> Tensor:
    """What `fp8_gated_mlp` computes, to the rounding of sums: operands are rounded to fp8, then multiplied in fp32."""
    out: Tensor = _Reference.apply(function, x, torch.cat(list(first)), down_CF)
    return out


class _Reference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: str, x: Tensor, first_XC: Tensor, down_CF: Tensor) -> Tensor:
        joined_MX = (_fp8(x.flatten(0, -2)) @ _fp8(first_XC).T).to(x.dtype)
        hidden_MF = rounded(gated_reference(joined_MX, function), E4M3, "tensorwise", over=1)
        ctx.function = function
        ctx.save_for_backward(x, first_XC, down_CF, joined_MX, hidden_MF)
        return (hidden_MF @ _fp8(down_CF).T).to(x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, first_XC, down_CF, joined_MX, hidden_MF = ctx.saved_tensors
        grad_MC = rounded(grads[0].flatten(0, -2), E5M2, "tensorwise", over=1)
        grad_hidden_MF = (grad_MC @ _fp8(down_CF)).to(x.dtype)
        wide_MX = gated_backward_reference(joined_MX, grad_hidden_MF, ctx.function)
        grad_MX = rounded(wide_MX, E5M2, "tensorwise", over=1)
        grad_x = (grad_MX @ _fp8(first_XC)).to(x.dtype).view_as(x)
        grad_first = (grad_MX.T @ _fp8(x.flatten(0, -2))).to(first_XC.dtype)
        return None, grad_x, grad_first, (grad_MC.T @ hidden_MF).to(down_CF.dtype)


def _fp8(matrix: Tensor) -> Tensor:
    return rounded(matrix, E4M3, "tensorwise", over=1)
