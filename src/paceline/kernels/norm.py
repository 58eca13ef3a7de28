"""RMSNorm and LayerNorm: statistics in fp32 whatever the input, output in the input's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    x32 = x.float()
    scale = weight.float() + 1.0 if unit_offset else weight.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Subtracts the mean and divides by the standard deviation over the last dim, then scales and shifts."""
    if weight.dtype == x.dtype and not unit_offset:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    scale = weight.float() + 1.0 if unit_offset else weight.float()
    return F.layer_norm(x.float(), x.shape[-1:], scale, bias.float(), eps).to(x.dtype)
