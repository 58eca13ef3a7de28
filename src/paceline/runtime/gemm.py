"""What do this device's matrix units sustain, right now? The ceiling that every other figure is read against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.runtime.device import synchronize


@dataclass(frozen=True, kw_only=True)
class GemmRate:
    """A square matrix product, repeated without pause."""

    size: int
    dtype: str
    seconds: float
    tflops: float


def sustained_gemm(device: torch.device, *, seconds: float | None = None, fp8: bool = False) -> GemmRate:
    """Multiplies random matrices for ``seconds`` and counts 2 n^3 FLOPs each.

    On a GPU: bf16, n = 8192, 5 s, long enough for the power limit to set the clock, as it does in training. On the CPU:
    fp32, n = 1024, 0.5 s.

    Args:
        fp8: E4M3 operands with one scale each, fp32 sums, a bf16 result: what the products of an fp8 run are.
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    wanted = seconds if seconds is not None else (5.0 if on_gpu else 0.5)
    multiply, dtype = product(device, size, fp8=fp8)
    multiply()
    synchronize(device)
    repeats, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < wanted:
        for _ in range(20 if on_gpu else 1):
            multiply()
        synchronize(device)
        repeats += 20 if on_gpu else 1
    elapsed = time.perf_counter() - began
    return GemmRate(
        size=size,
        dtype=dtype,
        seconds=elapsed,
        tflops=2 * size**3 * repeats / elapsed / 1e12,
    )


def product(device: torch.device, size: int, *, fp8: bool = False) -> tuple[Callable[[], object], str]:
    """(the product of two random square matrices, its precision): bf16 on a GPU, fp32 on the CPU, or fp8."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=torch.float32, generator=generator).to(dtype) for _ in "ab")
    if fp8:
        return _fp8_product(a, b), "float8_e4m3fn"
    out = torch.empty(size, size, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out), str(dtype).removeprefix("torch.")


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The product of both in fp8. The second matrix is column-major, the only order that the hardware takes."""
    dtype = torch.float8_e4m3fn
    a8, b8 = a.to(dtype), b.to(dtype).t().contiguous().t()
    one = torch.ones((), dtype=torch.float32, device=a.device)
    return lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
