"""RMSNorm and LayerNorm: statistics in at least fp32 whatever the input, output in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.precision import at_least_fp32


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Divides by the root mean square over the last dim, then scales.

    Args:
        x: [..., C], any float dtype.
        weight: [C]; may have another dtype than `x`.
        eps: added to the mean square.
        unit_offset: scale by (1 + weight), as Gemma does.
    """
    if weight.dtype == x.dtype and not unit_offset:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return rms_norm_reference(x, weight, eps, unit_offset=unit_offset)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """The same, written out; takes a weight of another dtype, and the unit offset in fp32."""
    wide = at_least_fp32(x)
    scale = at_least_fp32(weight) + 1.0 if unit_offset else at_least_fp32(weight)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Subtracts the mean and divides by the standard deviation over the last dim, then scales and shifts."""
    if weight.dtype == x.dtype and not unit_offset:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = at_least_fp32(x)
    scale = at_least_fp32(weight) + 1.0 if unit_offset else at_least_fp32(weight)
    return F.layer_norm(wide, x.shape[-1:], scale, at_least_fp32(bias), eps).to(x.dtype)
