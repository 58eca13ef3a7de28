"""Which kernel is the fastest for attention within documents? Forward and backward, alone on one GPU.

    python bench/attention_documents.py --out docs/measured/attention_documents.json

Documents of drawn lengths fill a row of llama3_8b (8192 tokens, 32 heads of 128, 8 key heads). FlexAttention, what
`auto` takes, beside FlashAttention-4 with room for 64 documents and more. TFLOP/s count pairs within documents, causal,
once, and the backward as 2.5 x forward; errors are those of `bench/attention_kernels.py`, against FlexAttention.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_kernels
import cut_off
import torch
from torch import Tensor

from paceline.data.boundaries import ROOMS, document_boundaries
from paceline.kernels.attention import (
    AttentionCore,
    AttentionMask,
    RowDocuments,
    auto_attention,
    flash4_attention,
    mask_of,
)
from paceline.kernels.flash4 import why_no_flash4_here
from paceline.runtime.device import device_name, versions

TYPICAL, SPREAD = 700.0, 0.9
"""Tokens of a document: the middle one, and the deviation of the logarithm."""
SHAPE = attention_kernels.SHAPES[0]


def numbers_of(tokens: int, seed: int = 1) -> Tensor:
    """int32 [1, T]: the document of each token."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(tokens).log_normal_(torch.tensor(TYPICAL).log().item(), SPREAD, generator=generator)
    ends = drawn.round().clamp(min=16).long().cumsum(0)
    return torch.searchsorted(ends, torch.arange(tokens), right=True).int()[None]


def roomier(boundaries: Tensor, room: int) -> Tensor:
    """The same documents with room for more."""
    return torch.cat((boundaries, boundaries[-1:].expand(room + 1 - len(boundaries))))


def compiled(core: AttentionCore, mask: AttentionMask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """As a compiled layer has it."""

    def attend(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor) -> Tensor:
        return core(q_BTHD, k_BTGD, v_BTGD, mask, scale=SHAPE.width**-0.5)

    found: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(attend, fullgraph=True, dynamic=False)
    return found


def measure(attend: Callable[[Tensor, Tensor, Tensor], Tensor], flops: float, seconds: float) -> dict[str, Any]:
    """With what it computed, for `errors`."""
    leaves, gradient = attention_kernels.inputs(SHAPE)

    def both() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, gradient)

    found = [each.detach() for each in both()]
    with torch.no_grad():
        alone = attention_kernels.seconds_of(lambda: attend(*leaves), seconds)
    together = attention_kernels.seconds_of(both, seconds)
    return {
        "forward_ms": alone * 1e3,
        "forward_tflops": flops / alone / 1e12,
        "both_ms": together * 1e3,
        "both_tflops": 3.5 * flops / together / 1e12,
        "found": found,
    }


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    names = ("output", "grad_q", "grad_k", "grad_v")
    pairs = zip(names, found, expected, strict=True)
    return {f"error_{name}": float((a.float() - b.float()).norm() / b.float().norm()) for name, a, b in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    numbers = numbers_of(SHAPE.tokens)
    lengths = torch.bincount(numbers[0]).tolist()
    boundaries = document_boundaries(numbers)
    assert boundaries is not None
    flops = sum(4.0 * SHAPE.heads * SHAPE.width * length**2 / 2 for length in lengths)
    ways: dict[str, tuple[AttentionCore, RowDocuments]] = {"flex": (auto_attention, RowDocuments(numbers.cuda()))}
    for room in () if why_no_flash4_here() else ROOMS:
        roomy = RowDocuments(numbers.cuda(), roomier(boundaries, room).cuda())
        ways[f"flash4, room for {room}"] = (flash4_attention, roomy)
    if reason := why_no_flash4_here():
        print(f"flash4: left out: {reason}", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    expected: list[Tensor] = []
    for name, (core, documents) in ways.items():
        mask = mask_of(documents)
        row = measure(compiled(core, mask), flops, arguments.seconds)
        found = row.pop("found")
        expected = expected or found
        rows[name] = {**row, **errors(found, expected)}
        print(f"{name:20} " + " ".join(f"{key} {value:.4g}" for key, value in rows[name].items()), flush=True)
    about = {"devices": f"1 x {device_name(torch.device('cuda', 0))}", "versions": versions()}
    if arguments.out:
        out = {**about, "shape": SHAPE.name, "document_tokens": lengths, "ways": rows}
        arguments.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    cut_off.run(main)
