"""`fp8_gated`'s two casts by the largest numbers of earlier steps, as `fp8_delayed` has it: each in one reading.

Bytes an element of [M, F]: forward 4 + 2, backward 6 + 4; without the readings for the largest numbers.

Dims as in `fp8_gated`: M tokens, F width of the MLP, X twice that.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, library

from paceline.kernels.fp8_cast import E4M3, E5M2, padded_and_turned
from paceline.kernels.fp8_check import difference, drawn, kernel_is_right
from paceline.kernels.fp8_delayed import (
    FACTOR,
    LARGEST,
    SCALE,
    Delayed,
    factor_and_scale,
    note,
    saturated,
    tells_wrongly,
)
from paceline.kernels.fp8_gated import (
    by_triton,
    gated_backward_largest,
    gated_backward_reference,
    gated_largest,
    gated_reference,
    places,
)


def gated_cast_delayed(
    joined_MX: Tensor, delayed: Delayed, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    """``act(gate) * up`` in fp8, [M, F] and turned, and its scale."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.paceline.fp8_gated_cast_delayed.default(
        joined_MX, None, *delayed, dtype, function
    )
    return found


def gated_backward_cast_delayed(
    joined_MX: Tensor, grad_MF: Tensor, delayed: Delayed, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up beside each other in fp8, [M, X] and turned, and their scale."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.paceline.fp8_gated_cast_delayed.default(
        joined_MX, grad_MF, *delayed, dtype, function
    )
    return found


_NAME = "paceline::fp8_gated_cast_delayed"

# what it writes to the state is not in the schema: see `Delayed.state`
library.define(
    _NAME,
    "(Tensor joined_MX, Tensor? grad_MF, Tensor state, Tensor known, ScalarType dtype, str function)"
    " -> (Tensor, Tensor, Tensor)",
)


@library.impl(_NAME, "default")
def _cast(
    joined_MX: Tensor, grad_MF: Tensor | None, state: Tensor, known: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    def largest() -> Tensor:
        if grad_MF is None:
            return gated_largest(joined_MX, function)
        return gated_backward_largest(joined_MX, grad_MF, function)

    by = factor_and_scale(state, known, largest, dtype)
    if by_triton(joined_MX) and _kernels_are_right(joined_MX.device):
        return _cast_by_triton(joined_MX, grad_MF, by, state, dtype, function)
    wide = _reference(joined_MX, grad_MF, function)
    note(state, torch.linalg.vector_norm(wide, float("inf")).float())
    values = saturated(wide, wide * by[FACTOR], dtype)
    return values, padded_and_turned(values), by[SCALE].clone()


def _reference(joined_MX: Tensor, grad_MF: Tensor | None, function: str) -> Tensor:
    if grad_MF is None:
        return gated_reference(joined_MX, function)
    return gated_backward_reference(joined_MX, grad_MF, function)


@library.register_fake(_NAME)
def _fake(
    joined_MX: Tensor, grad_MF: Tensor | None, state: Tensor, known: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    return *places(joined_MX, dtype, backward=grad_MF is not None), state.new_empty(())


def _cast_by_triton(
    joined_MX: Tensor, grad_MF: Tensor | None, by: Tensor, state: Tensor, dtype: torch.dtype, function: str
) -> tuple[Tensor, Tensor, Tensor]:
    from paceline.kernels import fp8_gated_triton as kernels
    from paceline.kernels.seen_triton import Seen

    values, turned = places(joined_MX, dtype, backward=grad_MF is not None)
    seen = Seen(largest=state[LARGEST], scale=state.new_empty(()))
    if grad_MF is None:
        kernels.gated_cast(joined_MX, by[FACTOR], values, turned, function, seen)
    else:
        kernels.gated_backward_cast(joined_MX, grad_MF, by[FACTOR], values, turned, function, seen)
    return values, turned, seen.scale


@cache
def _kernels_are_right(device: torch.device) -> bool:
    def check() -> str:
        joined, one_of = drawn(device, wide=2), drawn(device)
        for grad, dtype in ((None, E4M3), (one_of, E5M2)):
            state = torch.tensor([1.0, 1.0, 0.0, 0.0], device=device)
            values, turned, scale = _cast_by_triton(joined, grad, state, state, dtype, "silu")
            wide = _reference(joined, grad, "silu")
            if reason := difference(wide, values, turned) or tells_wrongly(state, scale, wide):
                return reason
        return ""

    return kernel_is_right("kernels of gated MLPs by earlier scales", check)
