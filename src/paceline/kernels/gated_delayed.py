"""`gated`'s two results also in fp8, cast by the largest numbers of earlier steps: each in the one pass.

What nothing is known of yet has its own scale, and then takes a second pass, as `fp8_delayed` has it.

Bytes an element of [M, F] in bf16: forward 4 + 3, backward 6 + 8.

Dims as in `gated`: M tokens, F width of the MLP, X twice that.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, library

from paceline.kernels.fp8_cast import E4M3, E5M2, MULTIPLE, Fp8
from paceline.kernels.fp8_check import drawn, kernel_is_right
from paceline.kernels.fp8_delayed import FACTOR, LARGEST, Delayed, saturated, tells_wrongly
from paceline.kernels.fp8_gated import gated_backward_reference, gated_reference
from paceline.kernels.gated import by_triton, gated_backward, gated_forward, hidden_place, off_by_more_than_rounding


def gated_forward_delayed(joined_MX: Tensor, delayed: Delayed, dtype: torch.dtype, function: str) -> tuple[Tensor, Fp8]:
    """``act(gate) * up``, [M, F], in the input's dtype, and the same cast."""
    hidden, values, scale, _ = torch.ops.paceline.gated_cast_delayed.default(
        joined_MX, None, *delayed, dtype, function, False
    )
    return hidden, Fp8(values, scale)


def gated_backward_delayed(
    joined_MX: Tensor, grad_MF: Tensor, delayed: Delayed, dtype: torch.dtype, function: str, *, wants_hidden: bool
) -> tuple[Tensor, Fp8, Tensor]:
    """The gradients of gate and up beside each other, [M, X], in the input's dtype, the same cast, and
    ``act(gate) * up`` once more, or an empty one."""
    grad_joined, values, scale, hidden = torch.ops.paceline.gated_cast_delayed.default(
        joined_MX, grad_MF, *delayed, dtype, function, wants_hidden
    )
    return grad_joined, Fp8(values, scale), hidden


_NAME = "paceline::gated_cast_delayed"

# what it writes to the state is not in the schema: see `Delayed.state`
library.define(
    _NAME,
    "(Tensor joined_MX, Tensor? grad_MF, Tensor state, Tensor known, ScalarType dtype, str function, bool wants_hidden)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@library.impl(_NAME, "default")
def _cast(
    joined_MX: Tensor,
    grad_MF: Tensor | None,
    state: Tensor,
    known: Tensor,
    dtype: torch.dtype,
    function: str,
    wants_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    aligned = joined_MX.shape[1] % (2 * MULTIPLE) == 0  # see `fp8_cast.by_triton`
    # host memory: nobody waits
    if bool(known) and aligned and by_triton(joined_MX) and _kernels_are_right(joined_MX.device):
        return _cast_by_triton(joined_MX, grad_MF, state, dtype, function, wants_hidden)
    if grad_MF is None:
        (wide, _), hidden = gated_forward(joined_MX, function), joined_MX.new_empty(0)
    else:
        wide, _, hidden = gated_backward(joined_MX, grad_MF, function, wants_hidden=wants_hidden)
    values, _, scale = torch.ops.paceline.fp8_cast_delayed.default(wide, state, known, dtype, False, True)
    return wide, values, scale, hidden


@library.register_fake(_NAME)
def _fake(
    joined_MX: Tensor,
    grad_MF: Tensor | None,
    state: Tensor,
    known: Tensor,
    dtype: torch.dtype,
    function: str,
    wants_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = _wide_place(joined_MX, backward=grad_MF is not None)
    hidden = hidden_place(joined_MX) if wants_hidden else joined_MX.new_empty(0)
    return wide, wide.new_empty(wide.shape, dtype=dtype), state.new_empty(()), hidden


def _wide_place(joined_MX: Tensor, *, backward: bool) -> Tensor:
    return joined_MX.new_empty(joined_MX.shape) if backward else hidden_place(joined_MX)


def _cast_by_triton(
    joined_MX: Tensor, grad_MF: Tensor | None, state: Tensor, dtype: torch.dtype, function: str, wants_hidden: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from paceline.kernels import gated_triton
    from paceline.kernels.seen_triton import Seen

    wide = _wide_place(joined_MX, backward=grad_MF is not None)
    values, scale = wide.new_empty(wide.shape, dtype=dtype), state.new_empty(())
    cast = gated_triton.Cast(values, state[FACTOR], Seen(largest=state[LARGEST], scale=scale))
    hidden = hidden_place(joined_MX) if wants_hidden else None
    if grad_MF is None:
        gated_triton.gated_forward(joined_MX.contiguous(), wide, function, cast)
    else:
        gated_triton.gated_backward(joined_MX.contiguous(), grad_MF.contiguous(), wide, hidden, function, cast)
    return wide, values, scale, joined_MX.new_empty(0) if hidden is None else hidden


@cache
def _kernels_are_right(device: torch.device) -> bool:
    def check() -> str:
        joined, one_of = drawn(device, wide=16), drawn(device, wide=8)  # wider than a tile
        hidden = gated_reference(joined, "silu")
        for grad, dtype in ((None, E4M3), (one_of, E5M2)):
            expected = hidden if grad is None else gated_backward_reference(joined, grad, "silu")
            for wants_hidden in (False, grad is not None):
                state = torch.tensor([1.0, 1.0, 0.0, 0.0], device=device)
                wide, values, scale, again = _cast_by_triton(joined, grad, state, dtype, "silu", wants_hidden)
                reason = off_by_more_than_rounding(wide, expected) or tells_wrongly(state, scale, wide)
                if reason or (wants_hidden and (reason := off_by_more_than_rounding(again, hidden))):
                    return reason
                if not torch.equal(values.float(), saturated(wide, wide, dtype).float()):
                    return "casts wrongly"
        return ""

    return kernel_is_right("kernels of gated MLPs in wide numbers by earlier scales", check)
