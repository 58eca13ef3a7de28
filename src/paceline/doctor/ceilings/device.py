"""What does one device reach alone? Matrix products, attention, its memory, copies from and to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.doctor.ceilings.amounts import Amounts
from paceline.runtime.device import capability, synchronize
from paceline.runtime.gemm import product, sustained_gemm

Rates = dict[str, float]
Skipped = dict[str, str]

_ATTENTION = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_FP8 = (8, 9)


def device_rates(device: torch.device, amounts: Amounts) -> tuple[Rates, Skipped]:
    """Every rate of one device, in the units of `measured.record`, and what could not be measured."""
    rates, skipped = Rates(), Skipped()
    for measure in (_products, _attention, _copies):
        for name, value in measure(device, amounts):
            if isinstance(value, str):
                skipped[name] = value
            else:
                rates[name] = value
        if device.type == "cuda":
            # what one leaves behind must not shrink what the next can have
            torch.cuda.empty_cache()
    return rates, skipped


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int, *, warm_up: int = 3) -> float:
    """Median time of a call, after some that warm up."""
    for _ in range(warm_up):
        call()
    synchronize(device)
    if device.type != "cuda":
        return median(_timed(call) for _ in range(repeats))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    synchronize(device)
    return median(marks[index].elapsed_time(marks[index + 1]) for index in range(repeats)) * 1e-3


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _products(device: torch.device, amounts: Amounts) -> Iterator[tuple[str, float | str]]:
    if device.type != "cuda":
        yield "gemm_fp32", sustained_gemm(device, seconds=amounts.sustained_seconds).tflops
        return
    found = capability(device)
    for name, fp8 in (("gemm_bf16", False), ("gemm_fp8", True)):
        if fp8 and (found is None or found < _FP8):
            yield name, f"fp8 needs compute capability 8.9; this is {found}."
            continue
        try:
            yield f"{name}_burst", _burst(device, amounts, fp8=fp8)
            yield name, sustained_gemm(device, seconds=amounts.sustained_seconds, fp8=fp8).tflops
        except RuntimeError as error:
            yield name, _reason(error)


def _burst(device: torch.device, amounts: Amounts, *, fp8: bool) -> float:
    """TFLOP/s of the best of five short runs, each after a pause in which the device cools and clocks rise."""
    size, best = 8192, 0.0
    multiply, _ = product(device, size, fp8=fp8)
    for _ in range(5):
        time.sleep(0.2)
        seconds = seconds_of(multiply, device, amounts.burst_calls, warm_up=2)
        best = max(best, 2 * size**3 / seconds / 1e12)
    return best


def _attention(device: torch.device, amounts: Amounts) -> Iterator[tuple[str, float | str]]:
    """Causal attention by the fastest of torch's kernels. FLOPs: half of the scores; backward 2.5 times the forward."""
    batch, tokens, heads, width = amounts.attention
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(batch, heads, tokens, width, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")
    gradient = torch.randn(batch, heads, tokens, width, device=device, dtype=dtype)
    flops = 2 * batch * heads * tokens**2 * width
    kernels = _ATTENTION if device.type == "cuda" else {"torch": SDPBackend.MATH}
    forward, both = [], []
    refused = []
    for name, kernel in kernels.items():

        def ahead(kernel: SDPBackend = kernel) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def and_back(ahead: Callable[[], Tensor] = ahead) -> None:
            torch.autograd.grad(ahead(), (q, k, v), gradient)

        try:
            forward.append(flops / seconds_of(ahead, device, amounts.repeats) / 1e12)
            both.append(3.5 * flops / seconds_of(and_back, device, amounts.repeats) / 1e12)
        except RuntimeError as error:
            refused.append(f"{name}: {_reason(error)}")
    if both:
        yield "attention_forward", max(forward)
        yield "attention", max(both)
    else:
        yield "attention", "; ".join(refused)


def _copies(device: torch.device, amounts: Amounts) -> Iterator[tuple[str, float | str]]:
    count = amounts.copy_bytes
    try:
        source = torch.zeros(count, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy = seconds_of(lambda: target.copy_(source), device, amounts.repeats)
        yield "memory_copy", 2 * count / copy / 1e9
        if device.type != "cuda":
            return
        host = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
        down = seconds_of(lambda: source.copy_(host, non_blocking=True), device, amounts.repeats)
        yield "host_to_device", count / down / 1e9
        up = seconds_of(lambda: host.copy_(source, non_blocking=True), device, amounts.repeats)
        yield "device_to_host", count / up / 1e9
    except RuntimeError as error:
        yield "memory_copy", _reason(error)


def _reason(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
