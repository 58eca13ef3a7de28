"""Products with frozen weights that are kept in 4 bits: NF4 with double quantisation, QLoRA's.

    forward    y = x @ wide(W).T        backward    gx = g @ wide(W)

The weight is widened for each product and given up after it: beside its 4 bits there is one wide matrix at a time.
Quantised by torchao (extra `qlora`), which also says what a number stands for. Source: QLoRA, arXiv:2305.14314.

Dims: M tokens, D outputs, C inputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BLOCK = 64
"""Numbers that share a scale."""
_SCALES = 256
"""Scales that share one, or fewer where a small matrix has no multiple of it."""


def why_not_nf4(weight: Tensor) -> str | None:
    """Why this matrix cannot be kept in NF4, or None if it can."""
    if weight.numel() % BLOCK:
        return f"its {weight.numel()} numbers are not a multiple of {BLOCK}"
    return None


def quantizer() -> Any:
    """torchao's function. Raises ImportError where it is missing."""
    try:
        from torchao.quantization import to_nf4
    except ImportError:
        from torchao.dtypes.nf4tensor import to_nf4  # where older torchao has it
    return to_nf4


class Nf4Weight:
    """A matrix in NF4."""

    def __init__(self, weight_DC: Tensor) -> None:
        assert why_not_nf4(weight_DC) is None
        scales = math.gcd(weight_DC.numel() // BLOCK, _SCALES)
        self._kept = quantizer()(weight_DC.detach().contiguous(), BLOCK, scales)
        self.shape = weight_DC.shape

    def wide(self, dtype: torch.dtype) -> Tensor:
        """[D, C]: what the 4 bits stand for."""
        weight: Tensor = self._kept.get_original_weight()
        return weight.view(self.shape).to(dtype)

    @property
    def nbytes(self) -> int:
        kept = self._kept
        return sum(
            tensor.nbytes
            for tensor in (kept.quantized_data, kept.quantized_scalers, kept.quantization_factor, kept.scaler_mean)
        )


def nf4_linear(x: Tensor, weight: Nf4Weight, bias_D: Tensor | None = None) -> Tensor:
    """``x`` [..., C] times the matrix, plus bias: [..., D]. Gradient of ``x`` alone."""
    out: Tensor = _Product.apply(x, weight)
    return out if bias_D is None else out + bias_D


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Nf4Weight) -> Tensor:
        ctx.weight = weight
        return x @ weight.wide(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.weight.wide(grad.dtype), None
