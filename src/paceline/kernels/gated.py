"""What happens in a gated MLP between products whose operands are needed in wide numbers, as pairs beside fp8 do.

    forward    act(gate) * up, and its largest absolute number               [M, X] -> [M, F], []
    backward   gradients of gate and up beside each other, their largest     [M, X], [M, F] -> [M, X], [], [M, F]
               absolute number, and act(gate) * up once more

Everything in between is in at least fp32 and is rounded once, to the input's dtype. The largest number is that of what
was rounded, so a cast to fp8 by it gives the numbers that a cast of the tensor by itself would give.

Bytes an element of [M, F] in bf16: forward 4 + 2, backward 6 + 6 (6 + 4 without the product once more). Of operations
of torch a compiler makes a split and its backward, a concatenation, which reads the inputs once for each half, and
reads the result again for its largest number.

`gated_triton` has both as kernels; operations of torch are the plain twin, and what runs elsewhere.

Dims: M tokens, F width of the MLP, X twice that. Gate and up lie side by side.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, library

from paceline.kernels.fp8_cast import largest_number
from paceline.kernels.fp8_check import drawn, kernel_is_right
from paceline.kernels.fp8_gated import gated_backward_reference, gated_reference


def gated_forward(joined_MX: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """[M, F] in the input's dtype, and fp32 []: inf or nan if a number is not finite.

    Args:
        function: silu, gelu, gelu_tanh or relu.
    """
    found: tuple[Tensor, Tensor] = torch.ops.paceline.gated_forward.default(joined_MX, function)
    return found


def gated_backward(
    joined_MX: Tensor, grad_MF: Tensor, function: str, *, wants_hidden: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """[M, X] in the input's dtype, its largest number as `gated_forward`'s, and that one's [M, F], or an empty one."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.paceline.gated_backward.default(
        joined_MX, grad_MF, function, wants_hidden
    )
    return found


def gated_forward_reference(joined_MX: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """What `gated_forward` computes."""
    hidden_MF = gated_reference(joined_MX, function).to(joined_MX.dtype)
    return hidden_MF, largest_number(hidden_MF)


def gated_both_reference(
    joined_MX: Tensor, grad_MF: Tensor, function: str, *, wants_hidden: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What `gated_backward` computes."""
    grad_joined_MX = gated_backward_reference(joined_MX, grad_MF, function).to(joined_MX.dtype)
    again = gated_reference(joined_MX, function).to(joined_MX.dtype) if wants_hidden else joined_MX.new_empty(0)
    return grad_joined_MX, largest_number(grad_joined_MX), again


# ---- operators, by their schemas, as in `weight_gradient`: less time a call

library.define("paceline::gated_forward", "(Tensor joined_MX, str function) -> (Tensor, Tensor)")
library.define(
    "paceline::gated_backward",
    "(Tensor joined_MX, Tensor grad_MF, str function, bool wants_hidden) -> (Tensor, Tensor, Tensor)",
)


@library.impl("paceline::gated_forward", "default")
def _forward(joined_MX: Tensor, function: str) -> tuple[Tensor, Tensor]:
    if not by_triton(joined_MX):
        return gated_forward_reference(joined_MX, function)
    return forward_by_triton(joined_MX, function)


@library.register_fake("paceline::gated_forward")
def _forward_fake(joined_MX: Tensor, function: str) -> tuple[Tensor, Tensor]:
    return hidden_place(joined_MX), joined_MX.new_empty((), dtype=torch.float32)


@library.impl("paceline::gated_backward", "default")
def _backward(joined_MX: Tensor, grad_MF: Tensor, function: str, wants_hidden: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not by_triton(joined_MX):
        return gated_both_reference(joined_MX, grad_MF, function, wants_hidden=wants_hidden)
    return backward_by_triton(joined_MX, grad_MF, function, wants_hidden)


@library.register_fake("paceline::gated_backward")
def _backward_fake(
    joined_MX: Tensor, grad_MF: Tensor, function: str, wants_hidden: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden_place(joined_MX) if wants_hidden else joined_MX.new_empty(0)
    return joined_MX.new_empty(joined_MX.shape), joined_MX.new_empty((), dtype=torch.float32), hidden


def hidden_place(joined_MX: Tensor) -> Tensor:
    """For ``act(gate) * up``."""
    return joined_MX.new_empty(joined_MX.shape[0], joined_MX.shape[1] // 2)


def forward_by_triton(joined_MX: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """`gated_forward` as a kernel, asked or not."""
    from paceline.kernels import gated_triton

    hidden_MF = hidden_place(joined_MX)
    return hidden_MF, gated_triton.gated_forward(joined_MX.contiguous(), hidden_MF, function)


def backward_by_triton(
    joined_MX: Tensor, grad_MF: Tensor, function: str, wants_hidden: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`gated_backward` as a kernel, asked or not."""
    from paceline.kernels import gated_triton

    grad_joined_MX = joined_MX.new_empty(joined_MX.shape)
    hidden_MF = hidden_place(joined_MX) if wants_hidden else None
    largest = gated_triton.gated_backward(
        joined_MX.contiguous(), grad_MF.contiguous(), grad_joined_MX, hidden_MF, function
    )
    return grad_joined_MX, largest, joined_MX.new_empty(0) if hidden_MF is None else hidden_MF


# ---- is the kernel right?


def by_triton(joined_MX: Tensor) -> bool:
    """Whether the kernels take it."""
    takes = joined_MX.is_cuda and joined_MX.dtype != torch.float64 and joined_MX.numel() > 0
    return takes and _kernels_are_right(joined_MX.device)


def off_by_more_than_rounding(found: Tensor, wide: Tensor) -> str:
    """Of numbers in bf16 and what they are rounded from; empty if they are not."""
    # half a step, and what is lost where terms cancel
    off = (found.float() - wide).abs() - 1.01 * 2.0**-8 * wide.abs() - 2.0**-20
    return "" if bool((off <= 0).all()) else "computes other numbers"  # nan too


@cache
def _kernels_are_right(device: torch.device) -> bool:
    def check() -> str:
        joined, grad = drawn(device, wide=16), drawn(device, wide=8)  # wider than a tile
        hidden, largest = forward_by_triton(joined, "silu")
        wide = gated_reference(joined, "silu")
        if reason := off_by_more_than_rounding(hidden, wide) or _other(largest, hidden):
            return reason
        wide_grad = gated_backward_reference(joined, grad, "silu")
        for wants_hidden in (True, False):
            grad_joined, largest, again = backward_by_triton(joined, grad, "silu", wants_hidden)
            reason = off_by_more_than_rounding(grad_joined, wide_grad) or _other(largest, grad_joined)
            if reason or (wants_hidden and (reason := off_by_more_than_rounding(again, wide))):
                return reason
        return ""

    return kernel_is_right("kernels of gated MLPs in wide numbers", check)


def _other(largest: Tensor, rounded: Tensor) -> str:
    return "" if torch.equal(largest, largest_number(rounded)) else "finds another largest number"
