"""Frozen linears that read one input, multiplied in fp8, with their low-rank pairs in the input's own dtype: `lora.py`
over `fp8.py`.

    forward    y = fp8(x) @ fp8(W).T for all linears at once;  h = x @ A.T;  y_i += scale * h_i @ B_i.T in place
    backward   gh_i = scale * g_i @ B_i;  gB_i = scale * g_i.T @ h_i;  gA = gh.T @ x
               gx = fp8(g) @ fp8(W) for all linears at once, then gx += gh @ A in place

Nothing as large as an output or an input is written twice. The input and the gradient of the outputs are cast once, as
they lie: transposed copies are for gradients of weights, and frozen ones have none. No pair is rounded to fp8. Where
the input needs no gradient, as in a model's first layer, the gradient is not cast at all.

Kept between forward and backward: the input in its own dtype, once, since gA reads it, and h (R numbers a token).
Nothing in fp8 but the weights, of which there is one copy for all micro-batches (or none: then they are cast again).

Casts are outside of the operators, so that the compiler fuses them with what makes the input, such as the activation of
a gated MLP. Products and the sums on them are one operator forward and one backward: in compiled code, and for what
recomputation may store, nobody sees the sums half made.

Dims: M tokens, C inputs, N outputs of all linears together, R ranks of all pairs together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library

from paceline.kernels.fp8 import (
    CachedWeight,
    Casting,
    cast_gradient,
    cast_operand,
    delayed_of,
    fp8_linears,
    split_outputs,
    states_of,
    tensors_of,
    weight_columns,
)
from paceline.kernels.fp8_cast import E4M3, CastKernel, Fp8, Scaling, cast_rows, product
from paceline.kernels.fp8_delayed import DelayedPair
from paceline.kernels.lora import add_pairs, joined_downs, of_each, pair_gradients


def lora_fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scale: float,
    *,
    scaling: Scaling,
    cached: CachedWeight | None = None,
    kernel: CastKernel = "torch",
    delayed: DelayedPair | None = None,
) -> tuple[Tensor, ...]:
    """``x`` [..., C] times each frozen [D_i, C] weight, plus bias, plus ``scale`` times its pair's product.

    Gradients of ``x`` and of the pairs; weights get none. Outputs are parts of one tensor.

    Args:
        downs: [R_i, C] of each linear; None where a linear has no pair. One has.
        ups: [D_i, R_i].
        cached: `fp8.cast_weights` of these weights, which are then not read; otherwise they are cast here and again in
            the backward.
        delayed: see `fp8.fp8_linears`.
    """
    assert delayed is None or scaling == "tensorwise", "scales of earlier steps are of tensors"
    sizes = tuple(weight.shape[0] for weight in weights)
    if not torch.is_grad_enabled():
        x_MC = x.flatten(0, -2)
        rows = cast_rows(weights, E4M3, scaling) if cached is None else cached.rows
        operands = (*cast_rows([x_MC], E4M3, scaling), *rows, joined_downs(downs), list(ups), sizes, scale)
        joined = torch.ops.paceline.lora_fp8_forward.default(x_MC, *operands)[0].view(*x.shape[:-1], -1)
    else:
        tensors = (*states_of(delayed), *tensors_of(cached, scaling))
        matrices = (*downs, *ups, *(weights if cached is None else ()))
        joined = _LoraFp8Linears.apply(scaling, kernel, sizes, scale, *tensors, x, *matrices)
    return split_outputs(joined, weights, biases)


def lora_fp8_linears_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scale: float,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The same as products of their own, which autograd sums. ``options``: of `fp8.fp8_linears`."""
    outs = []
    for base, down, up in zip(fp8_linears(x, weights, biases, **options), downs, ups, strict=True):
        out = base
        if down is not None and up is not None:
            out = torch.addmm(base.flatten(0, -2), x.flatten(0, -2) @ down.T, up.T, alpha=scale).view_as(base)
        outs.append(out)
    return tuple(outs)


class _LoraFp8Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scaling: Scaling,
        kernel: CastKernel,
        sizes: tuple[int, ...],
        scale: float,
        x_state: Tensor | None,
        x_known: Tensor | None,
        grad_state: Tensor | None,
        grad_known: Tensor | None,
        cached_rows: Tensor | None,
        rows_scale: Tensor | None,
        cached_columns: Tensor | None,
        columns_scale: Tensor | None,
        x: Tensor,
        *matrices: Tensor | None,
    ) -> Tensor:
        number = len(sizes)
        downs, ups, weights = list(matrices[:number]), list(matrices[number : 2 * number]), matrices[2 * number :]
        x_MC = x.flatten(0, -2)
        how = Casting(scaling, kernel, None, delayed_of(x_state, x_known))
        x_rows, _ = cast_operand(x_MC, E4M3, how, rows=True, columns=False)
        assert x_rows is not None
        kept: tuple[Tensor | None, ...]
        if cached_rows is not None and rows_scale is not None:
            weight_rows = Fp8(cached_rows, rows_scale)
            kept = (cached_columns, rows_scale if columns_scale is None else columns_scale)
        else:
            frozen = [weight for weight in weights if weight is not None]
            weight_rows, kept = cast_rows(frozen, E4M3, scaling), tuple(frozen)
        out_MN, h_MR = torch.ops.paceline.lora_fp8_forward.default(
            x_MC, *x_rows, *weight_rows, joined_downs(downs), ups, sizes, scale
        )
        ctx.save_for_backward(x, h_MR, grad_state, grad_known, *downs, *ups, *kept)
        ctx.scaling, ctx.kernel, ctx.sizes, ctx.scale = scaling, kernel, sizes, scale
        ctx.is_cached = cached_rows is not None
        return out_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        number, wants_x = len(ctx.sizes), ctx.needs_input_grad[12]
        x, h_MR, state, known, *rest = ctx.saved_tensors
        downs, ups, weights = rest[:number], rest[number : 2 * number], rest[2 * number :]
        how = Casting(ctx.scaling, ctx.kernel, None, delayed_of(state, known))
        rows, _ = cast_gradient(grad, how, rows=wants_x, columns=False)
        operands: tuple[Tensor | None, ...] = (None,) * 4
        if rows is not None:
            operands = (*rows, *weight_columns(weights, ctx.scaling, None, is_cached=ctx.is_cached))
        grad_x_MC, grad_down_RC, *grad_ups = torch.ops.paceline.lora_fp8_backward.default(
            grad.flatten(0, -2), *operands, x.flatten(0, -2), h_MR, joined_downs(downs), ups, ctx.sizes, ctx.scale
        )
        grad_x = grad_x_MC.view_as(x) if wants_x else None
        unread = 0 if ctx.is_cached else number
        return *(None,) * 12, grad_x, *of_each(grad_down_RC, grad_ups, downs), *(None,) * unread


# ---- operators

library.define(
    "paceline::lora_fp8_forward",
    "(Tensor x, Tensor x_values, Tensor x_scale, Tensor weight_values, Tensor weight_scale, Tensor down, Tensor?[] ups,"
    " int[] sizes, float scale) -> (Tensor, Tensor)",
)
library.define(
    "paceline::lora_fp8_backward",
    "(Tensor grad, Tensor? grad_values, Tensor? grad_scale, Tensor? weight_values, Tensor? weight_scale, Tensor x,"
    " Tensor h, Tensor down, Tensor?[] ups, int[] sizes, float scale) -> Tensor[]",
)
library.define(
    "paceline::lora_fp8_input_backward",
    "(Tensor grad, Tensor grad_values, Tensor grad_scale, Tensor weight_values, Tensor weight_scale, Tensor h,"
    " Tensor down, Tensor up, float scale) -> (Tensor, Tensor, Tensor)",
)
FORWARD_OPERATION = torch.ops.paceline.lora_fp8_forward.default
"""What recomputation may store the outputs of."""


@library.impl("paceline::lora_fp8_forward", "default")
def _forward(
    x_MC: Tensor,
    x_values: Tensor,
    x_scale: Tensor,
    weight_values: Tensor,
    weight_scale: Tensor,
    down_RC: Tensor,
    ups: list[Tensor | None],
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """All outputs side by side, and h."""
    out_MN = product(Fp8(x_values, x_scale), Fp8(weight_values, weight_scale), x_MC.dtype, fast=True)
    h_MR = x_MC @ down_RC.T
    add_pairs(out_MN.split(sizes, dim=1), h_MR, ups, scale)
    return out_MN, h_MR


@library.register_fake("paceline::lora_fp8_forward")
def _forward_fake(
    x_MC: Tensor,
    x_values: Tensor,
    x_scale: Tensor,
    weight_values: Tensor,
    weight_scale: Tensor,
    down_RC: Tensor,
    ups: list[Tensor | None],
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    tokens = x_MC.shape[0]
    return x_MC.new_empty(tokens, weight_values.shape[0]), x_MC.new_empty(tokens, down_RC.shape[0])


@library.impl("paceline::lora_fp8_backward", "default")
def _backward(
    grad_MN: Tensor,
    grad_values: Tensor | None,
    grad_scale: Tensor | None,
    weight_values: Tensor | None,
    weight_scale: Tensor | None,
    x_MC: Tensor,
    h_MR: Tensor,
    down_RC: Tensor,
    ups: list[Tensor | None],
    sizes: list[int],
    scale: float,
) -> list[Tensor]:
    """Gradients of the input (empty without a cast gradient), of all first matrices of pairs, of each second one."""
    grad_h_MR, grad_ups = pair_gradients(grad_MN.split(sizes, dim=1), h_MR, ups, scale)
    grad_x = x_MC.new_empty(0)
    if grad_values is not None and grad_scale is not None and weight_values is not None and weight_scale is not None:
        weight_CN = Fp8(weight_values, weight_scale)
        grad_x = product(Fp8(grad_values, grad_scale), weight_CN, grad_MN.dtype, fast=False)
        grad_x.addmm_(grad_h_MR, down_RC)
    return [grad_x, grad_h_MR.T @ x_MC, *grad_ups]


@library.register_fake("paceline::lora_fp8_backward")
def _backward_fake(
    grad_MN: Tensor,
    grad_values: Tensor | None,
    grad_scale: Tensor | None,
    weight_values: Tensor | None,
    weight_scale: Tensor | None,
    x_MC: Tensor,
    h_MR: Tensor,
    down_RC: Tensor,
    ups: list[Tensor | None],
    sizes: list[int],
    scale: float,
) -> list[Tensor]:
    grad_x = x_MC.new_empty(0 if grad_values is None else x_MC.shape)
    return [grad_x, x_MC.new_empty(down_RC.shape), *(up.new_empty(up.shape) for up in ups if up is not None)]


@library.impl("paceline::lora_fp8_input_backward", "default")
def _input_backward(
    grad_MN: Tensor,
    grad_values: Tensor,
    grad_scale: Tensor,
    weight_values: Tensor,
    weight_scale: Tensor,
    h_MR: Tensor,
    down_RC: Tensor,
    up_NR: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one linear, all of the backward that does not read its input, which is yet to be computed again: the gradients
    of the input, of h, and of the pair's second matrix. That of the first one is gh.T @ x."""
    grad_h_MR, (grad_up,) = pair_gradients([grad_MN], h_MR, [up_NR], scale)
    weight_CN = Fp8(weight_values, weight_scale)
    grad_x = product(Fp8(grad_values, grad_scale), weight_CN, grad_MN.dtype, fast=False)
    return grad_x.addmm_(grad_h_MR, down_RC), grad_h_MR, grad_up


@library.register_fake("paceline::lora_fp8_input_backward")
def _input_backward_fake(
    grad_MN: Tensor,
    grad_values: Tensor,
    grad_scale: Tensor,
    weight_values: Tensor,
    weight_scale: Tensor,
    h_MR: Tensor,
    down_RC: Tensor,
    up_NR: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = grad_MN.new_empty(grad_MN.shape[0], down_RC.shape[1])
    return grad_x, h_MR.new_empty(h_MR.shape), up_NR.new_empty(up_NR.shape)
