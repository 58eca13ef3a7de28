"""A large tensor times a number that only the device knows, in place.

`tensor.mul_(factor)` of torch (2.11 - 2.13) rounds a factor of 0 dimensions that lies on a GPU to the tensor's dtype
before it multiplies (bf16: up to 0.4 % off, the same for every element), and reads element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.precision import at_least_fp32
from paceline.kernels.triton_found import has_triton

_SLICE = 2**24
"""Elements that are in fp32 at a time, where operations of torch do it."""


def scale_in_place(tensor: Tensor, factor: Tensor) -> None:
    """``tensor`` *= ``factor``, multiplied in at least fp32 and rounded once.

    Args:
        tensor: contiguous, any float dtype.
        factor: scalar of 0 dimensions, at least fp32, on the same device.
    """
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        tensor.mul_(factor)
    elif why_not_triton(tensor):
        scale_in_place_reference(tensor, factor)
    else:
        from paceline.kernels.scaling_triton import scale_in_place_triton

        scale_in_place_triton(tensor, factor)


def scale_in_place_reference(tensor: Tensor, factor: Tensor) -> None:
    """The same in operations of torch."""
    for part in tensor.view(-1).split(_SLICE):
        part.copy_(at_least_fp32(part) * factor)


def why_not_triton(tensor: Tensor) -> str:
    """The reason why the kernel cannot take it; empty if it can."""
    if not tensor.is_cuda:
        return "the kernel is for GPUs"
    return "" if has_triton() else "Triton is not installed"
