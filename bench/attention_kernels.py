"""Which attention kernel is the fastest for which shape? Forward and backward of each provider, alone on one GPU.

    python bench/attention_kernels.py --out docs/measured/attention_kernels.json
    python bench/attention_kernels.py --seconds 0.5 --only llama3_8b

TFLOP/s of both directions count the backward's own recomputation (3.5 x forward), causal pairs once: the count of a
kernel's ceiling. Errors are relative to fp32 scores and softmax of the first two heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cut_off
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.kernels.attention import AttentionMask, reference_attention
from paceline.kernels.flash4 import flash4, why_no_flash4_here
from paceline.runtime.device import device_name, versions


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one call: causal, in bf16."""

    name: str
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int

    @property
    def forward_flops(self) -> float:
        return 4.0 * self.batch * self.heads * self.width * self.tokens**2 / 2


SHAPES = (
    Shape(name="llama3_8b", batch=1, tokens=8192, heads=32, kv_heads=8, width=128),
    Shape(name="llama3_1b", batch=2, tokens=8192, heads=32, kv_heads=8, width=64),
    Shape(name="gpt_13b", batch=3, tokens=2048, heads=40, kv_heads=40, width=128),
    Shape(name="qwen3_30b_a3b", batch=2, tokens=4096, heads=32, kv_heads=4, width=128),
)
CALLS = 10
"""Between two readings of the clock."""


def sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=q_BHTD.shape[1] != k_BGTD.shape[1]
            )

    return attend


def seconds_of(call: Callable[[], object], seconds: float) -> float:
    """Median seconds of one call, over ``seconds`` of them without a pause."""
    call()
    torch.cuda.synchronize()
    found: list[float] = []
    while sum(found) * CALLS < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(found)


def inputs(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """q, k, v as a model makes them ([B, T, H, D] in memory, heads in front), and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        size = (shape.batch, shape.tokens, heads, shape.width)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (draw(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    return [q, k, v], draw(shape.heads)


def measure(shape: Shape, attend: Callable[[Tensor, Tensor, Tensor], Tensor], seconds: float) -> dict[str, float]:
    leaves, gradient = inputs(shape)

    def forward() -> Tensor:
        return attend(*(leaf.transpose(1, 2) for leaf in leaves)).transpose(1, 2)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, gradient)

    with torch.no_grad():
        alone = seconds_of(forward, seconds)
    together = seconds_of(both, seconds)
    return {
        "forward_ms": alone * 1e3,
        "forward_tflops": shape.forward_flops / alone / 1e12,
        "both_ms": together * 1e3,
        "both_tflops": 3.5 * shape.forward_flops / together / 1e12,
        "backward_tflops": 2.5 * shape.forward_flops / (together - alone) / 1e12,
        **errors(shape, forward, leaves, gradient),
    }


def errors(shape: Shape, forward: Callable[[], Tensor], leaves: list[Tensor], gradient: Tensor) -> dict[str, float]:
    """Relative to the same in fp32, of the last 1024 tokens' output and of the queries' gradient there."""
    last = slice(shape.tokens - min(1024, shape.tokens), shape.tokens)
    out = forward()
    (grad_q,) = torch.autograd.grad(out, leaves[:1], gradient)
    group = shape.heads // shape.kv_heads
    q = leaves[0].detach()[:1, last, :group].float().requires_grad_()
    k, v = (leaf.detach()[:1, :, :1].float() for leaf in leaves[1:])
    expected = reference_attention(q, k, v, AttentionMask(), scale=shape.width**-0.5)
    (expected_q,) = torch.autograd.grad(expected, [q], gradient[:1, last, :group].float())
    pairs = {"output": (out[:1, last, :group], expected), "grad_q": (grad_q[:1, last, :group], expected_q)}
    return {f"error_{name}": float(((a.float() - b).norm() / b.norm()).detach()) for name, (a, b) in pairs.items()}


def flash4_transposed(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BHTD, k_BGTD, v_BGTD))
    return flash4(q, k, v, causal=True, scale=q.shape[-1] ** -0.5).transpose(1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", default=[], metavar="SHAPE")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    shapes = [shape for shape in SHAPES if not arguments.only or shape.name in arguments.only]
    found: dict[str, Any] = {"devices": f"1 x {device_name(torch.device('cuda', 0))}", "versions": versions()}
    rows: dict[str, dict[str, Any]] = {shape.name: {} for shape in shapes}
    for provider, attend in (
        ("cudnn", sdpa(SDPBackend.CUDNN_ATTENTION)),
        ("flash4", flash4_transposed),
        ("flash2", sdpa(SDPBackend.FLASH_ATTENTION)),
    ):
        if provider == "flash4" and (reason := why_no_flash4_here()):
            print(f"flash4: left out: {reason}", flush=True)
            continue
        for shape in shapes:
            try:
                rows[shape.name][provider] = measured = measure(shape, attend, arguments.seconds)
            except (RuntimeError, TypeError, AssertionError, ValueError) as error:
                rows[shape.name][provider] = {"failed": f"{type(error).__name__}: {error}"[:500]}
                print(f"{shape.name:14} {provider:7} failed: {error}"[:500], flush=True)
                continue
            print(
                f"{shape.name:14} {provider:7} " + " ".join(f"{name} {value:.4g}" for name, value in measured.items()),
                flush=True,
            )
    found["shapes"] = rows
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    cut_off.run(main)
