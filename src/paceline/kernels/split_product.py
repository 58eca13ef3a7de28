"""x @ w.T in fp32 from bf16 x and fp32 w, on bf16 tensor cores and without an fp32 copy of x: what a router computes.

A number in fp32 is the sum of three in bf16, 8 bits of mantissa each, and a product of two bf16 numbers is exact in
fp32. So w is cut into three matrices, one under the other; one product accumulated in fp32 gives three partial sums for
each output. A product in fp32 itself would read x twice as wide and run outside of the tensor cores. Those cut off
where an FPU rounds: over 2048 inputs the result is 2e-6 off on an H200, one in fp32 4e-7, one in bf16 2e-3.

    forward    x @ (w1, w2, w3).T                        three partial sums
    dw         (g1, g2, g3).T @ x                        the same
    dx         g1 @ w1 + g1 @ w2 + g2 @ w1, in bf16      what is left out is 2^-16 of it, and the result has 2^-9

Dims: N tokens, E outputs, C inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library


def split_product(x_NC: Tensor, weight_EC: Tensor) -> Tensor:
    """fp32 [N, E]. See `why_not_split`."""
    out: Tensor = _SplitProduct.apply(x_NC, weight_EC)
    return out


def why_not_split(x_NC: Tensor, weight_EC: Tensor) -> str:
    """The reason why these cannot be multiplied so; empty if they can."""
    if x_NC.dtype != torch.bfloat16 or weight_EC.dtype not in (torch.bfloat16, torch.float32):
        return f"the input is {x_NC.dtype}, the matrix {weight_EC.dtype}"
    return f"{weight_EC.shape[0]} outputs are no multiple of 8" if weight_EC.shape[0] % 8 else ""


class _SplitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_EC: Tensor) -> Tensor:
        ctx.save_for_backward(x_NC, weight_EC)
        out: Tensor = torch.ops.paceline.split_product.default(x_NC, weight_EC)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad_NE,) = grads
        grad_x, grad_weight = torch.ops.paceline.split_product_backward.default(grad_NE, *ctx.saved_tensors)
        return grad_x, grad_weight


def _parts(x: Tensor, number: int) -> list[Tensor]:
    """In bf16: their sum is ``x``, as far as they go."""
    parts, rest = [], x.float()
    for _ in range(number):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return parts


def _product(a: Tensor, b: Tensor) -> Tensor:
    """fp32, of bf16 matrices."""
    # the CPU has no product with an output of another dtype (torch 2.11 - 2.13)
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _number(weight_EC: Tensor) -> int:
    return 1 if weight_EC.dtype == torch.bfloat16 else 3


library.define("paceline::split_product", "(Tensor x, Tensor weight) -> Tensor")
library.define("paceline::split_product_backward", "(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)")


@library.impl("paceline::split_product", "default")
def _forward(x_NC: Tensor, weight_EC: Tensor) -> Tensor:
    parts = _parts(weight_EC, _number(weight_EC))
    return _product(x_NC, torch.cat(parts).t()).unflatten(1, (len(parts), -1)).sum(1)


@library.register_fake("paceline::split_product")
def _forward_fake(x_NC: Tensor, weight_EC: Tensor) -> Tensor:
    return x_NC.new_empty(x_NC.shape[0], weight_EC.shape[0], dtype=torch.float32)


@library.impl("paceline::split_product_backward", "default")
def _backward(grad_NE: Tensor, x_NC: Tensor, weight_EC: Tensor) -> tuple[Tensor, Tensor]:
    grads, weights = _parts(grad_NE, 3), _parts(weight_EC, min(_number(weight_EC), 2))
    grad_weight = _product(torch.cat(grads, dim=1).t(), x_NC).unflatten(0, (3, -1)).sum(0)
    pairs = [(0, 0), (1, 0)] if len(weights) == 1 else [(0, 0), (0, 1), (1, 0)]
    left = torch.cat([grads[one] for one, _ in pairs], dim=1)
    right = torch.cat([weights[other] for _, other in pairs])
    return left @ right, grad_weight.to(weight_EC.dtype)


@library.register_fake("paceline::split_product_backward")
def _backward_fake(grad_NE: Tensor, x_NC: Tensor, weight_EC: Tensor) -> tuple[Tensor, Tensor]:
    return x_NC.new_empty(x_NC.shape), weight_EC.new_empty(weight_EC.shape)
