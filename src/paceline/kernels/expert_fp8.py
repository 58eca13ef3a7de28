"""Experts' operands in fp8: rows and matrices in e4m3, each row with a scale of its own.

Which products run in fp8: the two of the forward and the two for gradients of activations. Weight gradients stay in
bf16: with a few hundred tokens an expert they take as long to write as to compute, and fp8 tensor cores would want both
operands turned and every expert's rows padded.

Scales are powers of two, as in `fp8_cast`. fp8 tensor cores read both operands along what is summed over, so a stack of
matrices is needed as it lies, for the forward, and turned: 2 bytes an element for both.

Dims: R rows, C columns, E experts, Y and X the two widths of a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.fp8_cast import E4M3, multiplier


class Fp8Rows(NamedTuple):
    """``values * scale[..., None]`` is what was cast, but for rounding."""

    values: Tensor
    """e4m3 [..., C], contiguous."""
    scale: Tensor
    """fp32 [...]."""

    def wide(self) -> Tensor:
        """fp32."""
        return self.values.float() * self.scale[..., None]


class Fp8Matrices(NamedTuple):
    """A layer's experts in fp8, for both directions, flat for operators."""

    up: Tensor
    """e4m3 [E, H, C], H = M * F."""
    up_scale: Tensor
    up_turned: Tensor
    """e4m3 [E, C, H]."""
    up_turned_scale: Tensor
    down: Tensor
    """e4m3 [E, C, F]."""
    down_scale: Tensor
    down_turned: Tensor
    """e4m3 [E, F, C]."""
    down_turned_scale: Tensor


def cast_rows(x: Tensor) -> Fp8Rows:
    """Of [..., C] in any float dtype, each row by its own scale."""
    factor = multiplier(x.abs().amax(-1).float(), E4M3)
    return Fp8Rows((x.float() * factor[..., None]).to(E4M3), factor.reciprocal())


def cast_turned(matrix_EYX: Tensor) -> Fp8Rows:
    """`cast_rows` of [E, X, Y]."""
    return cast_rows(matrix_EYX.mT.contiguous())


def why_not_fp8(hidden: int, width: int) -> str:
    """The reason why experts of these widths cannot be multiplied in fp8; empty if they can."""
    odd = [f"{name} {size}" for name, size in (("hidden size", hidden), ("expert width", width)) if size % 16]
    return f"their {' and '.join(odd)} is not a multiple of 16" if odd else ""


def has_fp8(x: Tensor) -> bool:
    """Whether the device of ``x`` multiplies fp8 in its tensor cores; a CPU computes what would come out."""
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 9)
