"""Do the compiled fp8 kernels compute what their twins do? Asked before the first use, once a process and device.

An assembler has built one of them wrongly before (`turned_triton`), without an error and in a quarter of a gradient.
Who trains cannot see that; a comparison of some thousand numbers can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.triton_found import has_triton

log = logging.getLogger(__name__)

_TOKENS, _WIDTH = 128, 192
"""Multiples of all tiles and alignments: what large tensors are compiled for."""


def kernel_is_right(what: str, check: Callable[[], str]) -> bool:
    """Whether Triton is there and ``check`` finds nothing; what it finds is logged. For a cached function."""
    if not has_triton():
        return False
    try:
        reason = check()
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, torch can do the work
        reason = f"does not compile or run ({type(error).__name__}: {str(error).strip()[:200]})"
    if reason:
        log.warning(f"fp8 {what} are made of operations of torch: the Triton kernel {reason} here")
    return not reason


def drawn(device: torch.device, *, wide: int = 1) -> Tensor:
    """bf16 [128, 192 * ``wide``]."""
    rows, columns = _TOKENS, _WIDTH * wide
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


def places(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For ``wide`` cast, as it lies and turned."""
    rows, columns = wide.shape
    return wide.new_empty(rows, columns, dtype=dtype), wide.new_empty(columns, rows, dtype=dtype)


def difference(wide: Tensor, values: Tensor, turned: Tensor) -> str:
    """Of a cast and its turned copy, from what was cast; empty if there is none beyond rounding."""
    half_a_step = 2.0**-4 if values.dtype == torch.float8_e4m3fn else 2.0**-3
    off = (values.float() - wide).abs() - 1.01 * half_a_step * wide.abs() - 2.0**-9
    if not bool((off <= 0).all()):  # nan too
        return "casts wrongly"
    return "" if torch.equal(turned.float(), values.float().t()) else "turns wrongly"
