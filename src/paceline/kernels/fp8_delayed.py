"""Casts to fp8 by the largest numbers of earlier steps, which find the tensor's own on their way.

A scale of the very tensor is known only when all of it has been read, so it costs a reading of its own
(`fp8_cast`). Delayed scales (arXiv:2209.05433, section 4; Transformer Engine's `DelayedScaling`) are there before: the
cast reads once, and leaves the largest number for later steps. Numbers beyond the range that was expected become the
largest that fp8 has. Scales are powers of two, as everywhere here.

A tensor that nothing is known of yet, as in a run's first step, is cast by its own scale, with the reading that this
takes. The device decides that for each tensor. ``known`` tells the host that it need not ask any more; it may lag
behind, and changes no number.

inf and nan become nan, so that everything that is computed with them is nan too, and their tensor's largest number is
inf, which says that this step knows nothing.

Dims: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, library

from paceline.kernels.fp8_cast import (
    E4M3,
    E5M2,
    MULTIPLE,
    CastKernel,
    Fp8,
    by_triton,
    largest_number,
    multiplier,
    padded_and_turned,
)
from paceline.kernels.fp8_check import difference, drawn, kernel_is_right

FACTOR, SCALE, LARGEST, WIDTH = 0, 1, 2, 4
"""Places in `Delayed.state`, and its size: 16 bytes, so that the compiler never copies it for alignment."""


class Delayed(NamedTuple):
    """What is known of one tensor of every step, and what is being found out."""

    state: Tensor
    """fp32 [`WIDTH`]: the factor to cast by (0: unknown), its reciprocal, and the largest number since it was last set
    to 0.

    Casts write the last one behind the compiler's and autograd's back: said aloud, a tensor that is changed in the
    forward could not be kept for the backward, and graphs would copy it. Nothing in a graph reads it, and a maximum
    does not mind being taken twice (recomputation) or in another order."""
    known: Tensor
    """bool [], in host memory: the factor is not 0."""


class DelayedPair(NamedTuple):
    """Of a linear layer."""

    input: Delayed
    gradient: Delayed
    """Of the output."""


def cast_delayed(
    x_RC: Tensor, dtype: torch.dtype, delayed: Delayed, kernel: CastKernel, *, turned: bool
) -> tuple[Fp8, Fp8 | None]:
    """`fp8_cast.cast_rows`, and with ``turned`` `cast_columns` of the same, by one scale. One operator for the
    compiler, which does not see into it."""
    values, columns, scale = torch.ops.paceline.fp8_cast_delayed.default(
        x_RC, *delayed, dtype, turned, kernel == "triton"
    )
    return Fp8(values, scale), Fp8(columns, scale) if turned else None


_NAME = "paceline::fp8_cast_delayed"

# by its schema, as in `weight_gradient`: less time a call. What it writes is not in it: see `Delayed.state`
library.define(
    _NAME,
    "(Tensor x_RC, Tensor state, Tensor known, ScalarType dtype, bool turned, bool by_kernel)"
    " -> (Tensor, Tensor, Tensor)",
)


@library.impl(_NAME, "default")
def _cast(
    x_RC: Tensor, state: Tensor, known: Tensor, dtype: torch.dtype, turned: bool, by_kernel: bool
) -> tuple[Tensor, Tensor, Tensor]:
    by = factor_and_scale(state, known, lambda: largest_number(x_RC), dtype)
    if by_kernel and by_triton([x_RC]) and _kernel_is_right(x_RC.device):
        return _cast_by_triton(x_RC, by, state, dtype, turned)
    note(state, largest_number(x_RC))
    values = saturated(x_RC, x_RC * by[FACTOR].to(x_RC.dtype), dtype).contiguous()
    columns = padded_and_turned(values) if turned else values.new_empty(0)
    return values, columns, by[SCALE].clone()


@library.register_fake(_NAME)
def _fake(
    x_RC: Tensor, state: Tensor, known: Tensor, dtype: torch.dtype, turned: bool, by_kernel: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return *_outputs(x_RC, dtype, turned), state.new_empty(())


def _outputs(x_RC: Tensor, dtype: torch.dtype, turned: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x_RC.shape
    shape = (columns, rows + -rows % MULTIPLE) if turned else (0,)
    return x_RC.new_empty(rows, columns, dtype=dtype), x_RC.new_empty(shape, dtype=dtype)


def _cast_by_triton(
    x_RC: Tensor, by: Tensor, state: Tensor, dtype: torch.dtype, turned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from paceline.kernels import fp8_triton
    from paceline.kernels.seen_triton import Seen

    values, columns = _outputs(x_RC, dtype, turned)
    scale = state.new_empty(())
    x_RC = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
    seen = Seen(largest=state[LARGEST], scale=scale)
    fp8_triton.cast_transpose(x_RC, by[FACTOR], values, columns if turned else None, seen)
    return values, columns, scale


@cache
def _kernel_is_right(device: torch.device) -> bool:
    def check() -> str:
        x = drawn(device)
        for dtype in (E4M3, E5M2):
            state = torch.tensor([1.0, 1.0, 0.0, 0.0], device=device)
            values, turned, scale = _cast_by_triton(x, state, state, dtype, True)
            reason = difference(x.float(), values, turned) or tells_wrongly(state, scale, x)
            if reason:
                return reason
            alone, _, _ = _cast_by_triton(x, state, state, dtype, False)
            if not torch.equal(alone.float(), values.float()):
                return "casts differently where it does not turn"
        return ""

    return kernel_is_right("casts by earlier scales", check)


# ---- what all such casts have in common


def factor_and_scale(state: Tensor, known: Tensor, largest: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    """fp32, a factor to cast by and its reciprocal beside each other: those of ``state``, or of this ``largest``."""
    if bool(known):  # host memory: nobody waits
        return state
    own = multiplier(largest(), dtype)
    return torch.where(state[FACTOR] > 0, state[: SCALE + 1], torch.stack((own, own.reciprocal())))


def saturated(wide: Tensor, scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """``scaled`` in fp8, beyond its range the largest; nan where ``wide``, which it was made of, is not finite."""
    limit = torch.finfo(dtype).max
    return torch.where(wide.isfinite(), scaled.clamp(-limit, limit), torch.nan).to(dtype)


def note(state: Tensor, largest: Tensor) -> None:
    """Enters a tensor's largest number."""
    # .data: with a version counter of its own, see `Delayed.state`
    place = state.data[LARGEST]
    torch.maximum(place, largest.nan_to_num(nan=torch.inf, posinf=torch.inf), out=place)


def tells_wrongly(state: Tensor, scale: Tensor, wide: Tensor) -> str:
    """Of a kernel that was given a factor of 1; empty if it told the truth."""
    right = torch.isclose(state[LARGEST], largest_number(wide), rtol=1e-4) & (scale == 1)
    return "" if bool(right) else "finds another largest number"
