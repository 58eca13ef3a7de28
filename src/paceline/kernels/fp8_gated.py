"""What happens in a gated MLP between its fp8 products, on the way from bf16 to fp8.

    largest            of act(gate) * up, absolute                                   [M, 2F] -> []
    cast               act(gate) * up in fp8, as it lies and turned                  [M, 2F] -> [M, F], [F, P]
    backward_largest   of the gradients of gate and up, absolute                     [M, 2F], [M, F] -> []
    backward_cast      both gradients beside each other in fp8, both ways            [M, 2F], [M, F] -> [M, 2F], [2F, P]

The numbers between are in fp32 and are rounded once, to fp8: neither the product of gate and up nor its gradients are
ever in memory in bf16. A tensor has one scale, which is known only when all of it has been seen, so each is computed
twice: that is no more traffic than to write it and to read it again. Bytes an element of [M, F]: forward 4 + 4 + 2,
backward 6 + 6 + 4.

`fp8_gated_triton` has them as kernels; operations of torch are the plain twin, and what runs elsewhere.

Dims: M tokens, P the same filled up to a multiple of 16, F width of the MLP. Gate and up lie side by side.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, library

from paceline.kernels.expert_rows import ActivationFunction, value_and_slope
from paceline.kernels.fp8_cast import E4M3, E5M2, MULTIPLE, padded_and_turned
from paceline.kernels.fp8_check import difference, drawn, kernel_is_right
from paceline.kernels.fp8_check import places as places_of
from paceline.kernels.precision import at_least_fp32


def gated_reference(joined_MX: Tensor, function: str) -> Tensor:
    """[M, F], at least fp32: the activation of the gate times the other half."""
    gate, up = at_least_fp32(joined_MX).chunk(2, dim=1)
    return value_and_slope(gate, _known(function))[0] * up


def gated_backward_reference(joined_MX: Tensor, grad_MF: Tensor, function: str) -> Tensor:
    """[M, 2F], at least fp32: the gradients of both halves."""
    gate, up = at_least_fp32(joined_MX).chunk(2, dim=1)
    value, slope = value_and_slope(gate, _known(function))
    grad = at_least_fp32(grad_MF)
    return torch.cat((grad * up * slope, grad * value), dim=1)


def _known(function: str) -> ActivationFunction:
    assert function in ("silu", "gelu", "gelu_tanh", "relu"), function
    return function  # type: ignore[return-value]


def _largest(wide: Tensor) -> Tensor:
    return torch.linalg.vector_norm(wide, float("inf")).float()


def _cast(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = (wide * factor).to(dtype)
    return values, padded_and_turned(values)


@library.custom_op("paceline::fp8_gated_largest", mutates_args=())
def gated_largest(joined_MX: Tensor, function: str) -> Tensor:
    """fp32 []; inf or nan if a number is not finite."""
    if not by_triton(joined_MX):
        return _largest(gated_reference(joined_MX, function))
    from paceline.kernels import fp8_gated_triton

    return fp8_gated_triton.gated_largest(joined_MX, function)


@library.custom_op("paceline::fp8_gated_cast", mutates_args=())
def gated_cast(joined_MX: Tensor, factor: Tensor, dtype: torch.dtype, function: str) -> tuple[Tensor, Tensor]:
    """Times ``factor``, a power of two that leaves all numbers within the range of ``dtype``."""
    if not by_triton(joined_MX):
        return _cast(gated_reference(joined_MX, function), factor, dtype)
    from paceline.kernels import fp8_gated_triton

    outputs = places(joined_MX, dtype, backward=False)
    fp8_gated_triton.gated_cast(joined_MX, factor, *outputs, function)
    return outputs


@library.custom_op("paceline::fp8_gated_backward_largest", mutates_args=())
def gated_backward_largest(joined_MX: Tensor, grad_MF: Tensor, function: str) -> Tensor:
    """As `gated_largest`."""
    if not by_triton(joined_MX):
        return _largest(gated_backward_reference(joined_MX, grad_MF, function))
    from paceline.kernels import fp8_gated_triton

    return fp8_gated_triton.gated_backward_largest(joined_MX, grad_MF, function)


@library.custom_op("paceline::fp8_gated_backward_cast", mutates_args=())
def gated_backward_cast(
    joined_MX: Tensor, grad_MF: Tensor, factor: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor]:
    """As `gated_cast`."""
    if not by_triton(joined_MX):
        return _cast(gated_backward_reference(joined_MX, grad_MF, function), factor, dtype)
    from paceline.kernels import fp8_gated_triton

    outputs = places(joined_MX, dtype, backward=True)
    fp8_gated_triton.gated_backward_cast(joined_MX, grad_MF, factor, *outputs, function)
    return outputs


def places(joined_MX: Tensor, dtype: torch.dtype, *, backward: bool) -> tuple[Tensor, Tensor]:
    """For what `gated_cast` gives, or `gated_backward_cast`."""
    tokens, width = joined_MX.shape[0], joined_MX.shape[1] // (1 if backward else 2)
    values = joined_MX.new_empty(tokens, width, dtype=dtype)
    return values, joined_MX.new_empty(width, tokens + -tokens % MULTIPLE, dtype=dtype)


@gated_largest.register_fake
def _(joined_MX: Tensor, function: str) -> Tensor:
    return joined_MX.new_empty((), dtype=torch.float32)


@gated_backward_largest.register_fake
def _(joined_MX: Tensor, grad_MF: Tensor, function: str) -> Tensor:
    return joined_MX.new_empty((), dtype=torch.float32)


@gated_cast.register_fake
def _(joined_MX: Tensor, factor: Tensor, dtype: torch.dtype, function: str) -> tuple[Tensor, Tensor]:
    return places(joined_MX, dtype, backward=False)


@gated_backward_cast.register_fake
def _(joined_MX: Tensor, grad_MF: Tensor, factor: Tensor, dtype: torch.dtype, function: str) -> tuple[Tensor, Tensor]:
    return places(joined_MX, dtype, backward=True)


def by_triton(tensor: Tensor) -> bool:
    """Whether the kernels take it."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and _kernels_are_right(tensor.device)


def _other(largest: Tensor, wide: Tensor) -> str:
    return "" if torch.isclose(largest, _largest(wide), rtol=1e-4) else "finds another largest number"


@cache
def _kernels_are_right(device: torch.device) -> bool:
    def check() -> str:
        from paceline.kernels import fp8_gated_triton as kernels

        joined, grad, one = drawn(device, wide=2), drawn(device), torch.ones((), device=device)
        wide = gated_reference(joined, "silu")
        values, turned = places_of(wide, E4M3)
        kernels.gated_cast(joined, one, values, turned, "silu")
        if reason := difference(wide, values, turned) or _other(kernels.gated_largest(joined, "silu"), wide):
            return reason
        wide = gated_backward_reference(joined, grad, "silu")
        values, turned = places_of(wide, E5M2)
        kernels.gated_backward_cast(joined, grad, one, values, turned, "silu")
        return difference(wide, values, turned) or _other(kernels.gated_backward_largest(joined, grad, "silu"), wide)

    return kernel_is_right("kernels of gated MLPs", check)
