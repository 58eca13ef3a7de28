"""A gated MLP of frozen linears, multiplied in fp8, with their low-rank pairs: `lora_fp8.lora_fp8_linears` twice, with
`gated` between them.

    forward    joined = (gate; up)(x)     hidden = act(gate) * up     out = down(hidden)
    backward   from the gradient of hidden, in one pass: those of gate and up, and hidden once more, for down's pair

The numbers are those of the two layers one after the other, with the activation and its gradients rounded once each.
Kept between forward and backward: the input, ``joined``, and what pairs keep (R numbers a token for each of the two
inputs). Not ``hidden``, neither in fp8 nor wide.

Scales of tensors only; no biases. Dims: M tokens, C hidden, F width of the MLP, X twice that, R rank of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.fp8 import (
    CachedWeight,
    Casting,
    cast_gradient,
    cast_operand,
    delayed_of,
    states_of,
    tensors_of,
    weight_columns,
)
from paceline.kernels.fp8_cast import E4M3, E5M2, Fp8, cast_by, cast_rows, multiplier, product
from paceline.kernels.fp8_delayed import Delayed, DelayedPair
from paceline.kernels.gated import gated_backward, gated_forward
from paceline.kernels.gated_delayed import gated_backward_delayed, gated_forward_delayed
from paceline.kernels.lora import joined_downs, of_each

Pair = tuple[Tensor, Tensor] | None
"""[R, C] and [D, R] beside a frozen [D, C] matrix, if there is one."""


def lora_fp8_gated_mlp(
    x: Tensor,
    first: Sequence[Tensor],
    down_CF: Tensor,
    pairs: Sequence[Pair],
    scale: float,
    *,
    function: str,
    cached_first: CachedWeight | None = None,
    cached_down: CachedWeight | None = None,
    delayed_first: DelayedPair | None = None,
    delayed_down: DelayedPair | None = None,
) -> Tensor:
    """[..., C]: down(act(gate(x)) * up(x)), each linear with ``scale`` times its pair's product.

    Gradients of ``x``, if it needs one, and of the pairs; weights get none.

    Args:
        first: gate and up, [F, C] each.
        pairs: of gate, up and down. ``x`` or a pair of the first two learns.
        function: silu, gelu, gelu_tanh or relu.
        cached_first, cached_down: `fp8.cast_weights` of the weights, which are then not read; both or neither.
        delayed_first, delayed_down: see `fp8.fp8_linears`; both or neither.
    """
    assert len(first) == 2 and len(pairs) == 3 and (cached_first is None) == (cached_down is None)
    assert (delayed_first is None) == (delayed_down is None)
    if not torch.is_grad_enabled():
        delayed_first = delayed_down = None  # as in `fp8.fp8_linears`
    states = (*states_of(delayed_first), *states_of(delayed_down))
    cached = (*tensors_of(cached_first, "tensorwise")[:3], *tensors_of(cached_down, "tensorwise")[:3])
    matrices = [None if pair is None else pair[side] for side in (0, 1) for pair in pairs]
    frozen = (*first, down_CF) if cached_first is None else ()
    width = first[0].shape[0]
    out: Tensor = _LoraFp8GatedMlp.apply(function, width, scale, x, *states, *cached, *matrices, *frozen)
    return out


class _LoraFp8GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: str, width: int, scale: float, x: Tensor, *tensors: Tensor | None) -> Tensor:
        # frozen weights follow where nothing is cached
        states, cached, matrices, frozen = tensors[:8], tensors[8:14], tensors[14:20], tensors[20:]
        first, down, kept = _weights(cached, frozen)
        x_MC = x.flatten(0, -2)
        x_rows, _ = cast_operand(x_MC, E4M3, _casting(states[:2]), rows=True, columns=False)
        assert x_rows is not None
        joined_MX, h_first = _multiplied(x_MC, x_rows, first, matrices[:2], matrices[3:5], scale)
        hidden_MF, rows = _hidden(joined_MX, function, delayed_of(*states[4:6]))
        out_MC, h_down = _multiplied(hidden_MF, rows, down, matrices[2:3], matrices[5:], scale)
        ctx.save_for_backward(x, joined_MX, h_first, h_down, *states[2:4], *states[6:], *matrices, *kept)
        ctx.function, ctx.width, ctx.scale, ctx.is_cached = function, width, scale, cached[0] is not None
        return out_MC.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        wants_x, function, scale = ctx.needs_input_grad[3], ctx.function, ctx.scale
        saved = ctx.saved_tensors  # once: what is computed again is handed out only once
        x, joined_MX, h_first, h_down = saved[:4]
        states, matrices, weights = saved[4:8], saved[8:14], saved[14:]
        down_a, down_b = matrices[2], matrices[5]
        rows, _ = cast_gradient(grad, _casting(states[2:]), rows=True, columns=False)
        assert rows is not None
        weight_FC = weight_columns(weights[2:], "tensorwise", None, is_cached=ctx.is_cached)
        grad_h, grad_down_b = None, None
        if h_down is None:
            grad_MF = product(rows, weight_FC, grad.dtype, fast=False)
        else:
            grad_MF, grad_h, grad_down_b = torch.ops.paceline.lora_fp8_input_backward.default(
                grad.flatten(0, -2), *rows, *weight_FC, h_down, down_a, down_b, scale
            )
        delayed = delayed_of(*states[:2])
        grad_MX, grad_rows, hidden_MF = _gradients(
            joined_MX, grad_MF, function, delayed, wants_hidden=grad_h is not None, wants_fp8=wants_x
        )
        grad_down_a = None if grad_h is None else grad_h.T @ hidden_MF
        first_CX = weight_columns(weights[:2], "tensorwise", None, is_cached=ctx.is_cached) if wants_x else None
        grad_x, of_first = _first_backward(ctx, x.flatten(0, -2), h_first, matrices, grad_MX, grad_rows, first_CX)
        of_pairs = (*of_first[:2], grad_down_a, *of_first[2:], grad_down_b)
        unread = 0 if ctx.is_cached else 3
        return *(None,) * 3, None if grad_x is None else grad_x.view_as(x), *(None,) * 14, *of_pairs, *(None,) * unread


def _weights(
    cached: Sequence[Tensor | None], frozen: Sequence[Tensor | None]
) -> tuple[Fp8, Fp8, tuple[Tensor | None, ...]]:
    """Gate and up together, and down, for the forward; and what the backward makes its operands of: the first two
    tensors are of gate and up."""
    first_rows, first_scale, first_columns, down_rows, down_scale, down_columns = cached
    if first_rows is not None and first_scale is not None and down_rows is not None and down_scale is not None:
        kept = (first_columns, first_scale, down_columns, down_scale)
        return Fp8(first_rows, first_scale), Fp8(down_rows, down_scale), kept
    matrices = [weight for weight in frozen if weight is not None]
    first, down = matrices[:2], matrices[2:]
    return cast_rows(first, E4M3, "tensorwise"), cast_rows(down, E4M3, "tensorwise"), tuple(matrices)


def _casting(state: Sequence[Tensor | None]) -> Casting:
    return Casting("tensorwise", "triton", None, delayed_of(*state))


def _multiplied(
    x_MC: Tensor,
    rows: Fp8,
    weight: Fp8,
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """The product with its pairs, and what they keep, if there are any."""
    if all(down is None for down in downs):
        return product(rows, weight, x_MC.dtype, fast=True), None
    width = weight.values.shape[0] // len(downs)
    out, h = torch.ops.paceline.lora_fp8_forward.default(
        x_MC, *rows, *weight, joined_downs(downs), list(ups), [width] * len(downs), scale
    )
    return out, h


def _hidden(joined_MX: Tensor, function: str, delayed: Delayed | None) -> tuple[Tensor, Fp8]:
    """``act(gate) * up``, wide and cast."""
    if delayed is not None:
        return gated_forward_delayed(joined_MX, delayed, E4M3, function)
    hidden_MF, largest = gated_forward(joined_MX, function)
    return hidden_MF, _cast(hidden_MF, largest, E4M3)


def _gradients(
    joined_MX: Tensor, grad_MF: Tensor, function: str, delayed: Delayed | None, *, wants_hidden: bool, wants_fp8: bool
) -> tuple[Tensor, Fp8 | None, Tensor]:
    """Gradients of gate and up, wide and cast; and what `_hidden` gave, wide. A cast is made, and its largest number
    noted, only where it is wanted."""
    if delayed is not None and wants_fp8:
        return gated_backward_delayed(joined_MX, grad_MF, delayed, E5M2, function, wants_hidden=wants_hidden)
    grad_MX, largest, hidden_MF = gated_backward(joined_MX, grad_MF, function, wants_hidden=wants_hidden)
    return grad_MX, _cast(grad_MX, largest, E5M2) if wants_fp8 else None, hidden_MF


def _cast(wide_RC: Tensor, largest: Tensor, dtype: torch.dtype) -> Fp8:
    scale = multiplier(largest, dtype).reciprocal()
    return Fp8(cast_by(wide_RC, scale, dtype), scale)


def _first_backward(
    ctx: Any,
    x_MC: Tensor,
    h_MR: Tensor | None,
    matrices: Sequence[Tensor | None],
    grad_MX: Tensor,
    rows: Fp8 | None,
    weight_CX: Fp8 | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of the input, if it is wanted, and of gate's and up's pairs: both first matrices, both second ones."""
    downs, ups = matrices[:2], matrices[3:5]
    if h_MR is None:
        assert rows is not None and weight_CX is not None, "x or a pair of the first two learns"
        return product(rows, weight_CX, grad_MX.dtype, fast=False), [None] * 4
    operands: tuple[Tensor | None, ...] = (None,) * 4
    if rows is not None and weight_CX is not None:
        operands = (*rows, *weight_CX)
    grad_x, grad_down_RC, *grad_ups = torch.ops.paceline.lora_fp8_backward.default(
        grad_MX, *operands, x_MC, h_MR, joined_downs(downs), list(ups), [ctx.width] * 2, ctx.scale
    )
    return grad_x if rows is not None else None, of_each(grad_down_RC, grad_ups, downs)
