"""Frozen linears that read one input, with their low-rank pairs: one operation forward, one backward.

    forward    h = x @ A.T (all pairs at once);  y_i = x @ W_i.T + b_i, then y_i += scale * h_i @ B_i.T
    backward   gh_i = scale * g_i @ B_i;  gB_i = scale * g_i.T @ h_i
               gA = gh.T @ x;  gx = sum of g_i @ W_i, then gx += gh @ A

Each sum is made by a product that adds to what is there: nothing as large as an output or an input is written twice.
No gradient of a frozen weight is computed. Kept between forward and backward: the input, once, and h (R numbers a
token).

In code that is being compiled, and for what recomputation may store, both are one operator each, so nobody sees the
sums half made.

Dims: M tokens, C inputs, D_i outputs, R_i ranks, R all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, library


def lora_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scale: float,
) -> tuple[Tensor, ...]:
    """``x`` [..., C] times each frozen [D_i, C] weight, plus bias, plus ``scale`` times its pair's product.

    Gradients of ``x`` and of the pairs; weights and biases get none.

    Args:
        downs: [R_i, C] of each linear; None where a linear has no pair.
        ups: [D_i, R_i].
    """
    pairs = [*downs, *ups]
    outs: tuple[Tensor, ...] = _LoraLinears.apply(len(weights), scale, x, *weights, *biases, *pairs)
    return outs


def lora_linears_reference(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    downs: Sequence[Tensor | None],
    ups: Sequence[Tensor | None],
    scale: float,
) -> tuple[Tensor, ...]:
    """The same by its definition."""
    outs = []
    for weight, bias, down, up in zip(weights, biases, downs, ups, strict=True):
        out = x @ weight.T
        out = out if bias is None else out + bias
        outs.append(out if down is None or up is None else out + scale * (x @ down.T @ up.T))
    return tuple(outs)


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, scale: float, x: Tensor, *matrices: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases, downs, ups = (list(matrices[i * number : (i + 1) * number]) for i in range(4))
        x_MC = x.flatten(0, -2)
        down_RC = joined_downs(downs)
        *outs, h_MR = torch.ops.paceline.lora_forward.default(x_MC, weights, biases, down_RC, ups, scale)
        ctx.save_for_backward(x, h_MR, *weights, *downs, *ups)
        ctx.number, ctx.scale = number, scale
        return tuple(out.view(*x.shape[:-1], -1) for out in outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        number = ctx.number
        x, h_MR, *rest = ctx.saved_tensors
        weights, downs, ups = (list(rest[i * number : (i + 1) * number]) for i in range(3))
        down_RC = joined_downs(downs)
        grads_MD = [grad.flatten(0, -2) for grad in grads]
        wants_x = ctx.needs_input_grad[2]
        grad_x_MC, grad_down_RC, *grad_ups = torch.ops.paceline.lora_backward.default(
            grads_MD, x.flatten(0, -2), h_MR, weights, down_RC, ups, ctx.scale, wants_x
        )
        return (
            None,
            None,
            grad_x_MC.view_as(x) if wants_x else None,
            *(None for _ in range(2 * number)),
            *of_each(grad_down_RC, grad_ups, downs),
        )


# ---- what linears with pairs have in common, whatever multiplies the frozen ones


def joined_downs(downs: Sequence[Tensor | None]) -> Tensor:
    """[R, C]: the first matrices of all pairs, one under the other."""
    found = [down for down in downs if down is not None]
    return found[0] if len(found) == 1 else torch.cat(found)


def of_each(grad_down_RC: Tensor, grad_ups: Sequence[Tensor], downs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """For autograd, gradients of the first matrix of each linear's pair, then of each second one; None for a linear
    without a pair."""
    found_downs = iter(grad_down_RC.split([down.shape[0] for down in downs if down is not None]))
    found_ups = iter(grad_ups)
    return [None if down is None else next(found) for found in (found_downs, found_ups) for down in downs]


def add_pairs(outs: Sequence[Tensor], h_MR: Tensor, ups: Sequence[Tensor | None], scale: float) -> None:
    """Adds ``scale`` times the second product of each pair to its output [M, D_i], in place."""
    for out, up, h in zip(outs, ups, _parts(h_MR, ups), strict=True):
        if up is not None and h is not None:
            out.addmm_(h, up.T, alpha=scale)


def pair_gradients(
    grads_MD: Sequence[Tensor], h_MR: Tensor, ups: Sequence[Tensor | None], scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of h [M, R], and of the second matrix of each pair, from those of the outputs [M, D_i]."""
    grad_h_MR, grad_ups = torch.empty_like(h_MR), []
    for grad, up, h, grad_h in zip(grads_MD, ups, _parts(h_MR, ups), _parts(grad_h_MR, ups), strict=True):
        if up is not None and h is not None and grad_h is not None:
            torch.mm(grad, up, out=grad_h)
            # of few columns: as this side, rows of the gradient are read as they lie
            grad_ups.append((grad.T @ h).mul_(scale))
    return grad_h_MR.mul_(scale), grad_ups


def _parts(wide_MR: Tensor, ups: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Of the columns of all pairs, those of each linear; None where it has no pair."""
    parts = iter(wide_MR.split([up.shape[1] for up in ups if up is not None], dim=1))
    return [None if up is None else next(parts) for up in ups]


# ---- operators

library.define(
    "paceline::lora_forward",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor down, Tensor?[] ups, float scale) -> Tensor[]",
)
library.define(
    "paceline::lora_backward",
    "(Tensor[] grads, Tensor x, Tensor h, Tensor[] weights, Tensor down, Tensor?[] ups, float scale, bool wants_x)"
    " -> Tensor[]",
)
FORWARD_OPERATION = torch.ops.paceline.lora_forward.default
"""What recomputation may store the outputs of."""


@library.impl("paceline::lora_forward", "default")
def _forward(
    x_MC: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    down_RC: Tensor,
    ups: list[Tensor | None],
    scale: float,
) -> list[Tensor]:
    """The outputs, and h."""
    h_MR = x_MC @ down_RC.T
    outs = [
        x_MC @ weight.T if bias is None else torch.addmm(bias, x_MC, weight.T)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    add_pairs(outs, h_MR, ups, scale)
    return [*outs, h_MR]


@library.register_fake("paceline::lora_forward")
def _forward_fake(
    x_MC: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    down_RC: Tensor,
    ups: list[Tensor | None],
    scale: float,
) -> list[Tensor]:
    tokens = x_MC.shape[0]
    return [*(x_MC.new_empty(tokens, weight.shape[0]) for weight in weights), x_MC.new_empty(tokens, down_RC.shape[0])]


@library.impl("paceline::lora_backward", "default")
def _backward(
    grads_MD: list[Tensor],
    x_MC: Tensor,
    h_MR: Tensor,
    weights: list[Tensor],
    down_RC: Tensor,
    ups: list[Tensor | None],
    scale: float,
    wants_x: bool,
) -> list[Tensor]:
    """Gradients of the input (empty where it is not wanted), of all first matrices of pairs, and of each second one."""
    grad_h_MR, grad_ups = pair_gradients(grads_MD, h_MR, ups, scale)
    grad_x = x_MC.new_empty(0)
    if wants_x:
        grad_x = grads_MD[0] @ weights[0]
        for grad, weight in zip(grads_MD[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        grad_x.addmm_(grad_h_MR, down_RC)
    return [grad_x, grad_h_MR.T @ x_MC, *grad_ups]


@library.register_fake("paceline::lora_backward")
def _backward_fake(
    grads_MD: list[Tensor],
    x_MC: Tensor,
    h_MR: Tensor,
    weights: list[Tensor],
    down_RC: Tensor,
    ups: list[Tensor | None],
    scale: float,
    wants_x: bool,
) -> list[Tensor]:
    grad_x = x_MC.new_empty(x_MC.shape if wants_x else 0)
    return [grad_x, x_MC.new_empty(down_RC.shape), *(x_MC.new_empty(up.shape) for up in ups if up is not None)]
