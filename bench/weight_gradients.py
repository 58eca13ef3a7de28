"""Times of weight gradients: a product and an addition, against a product that adds (`kernels/weight_gradient.py`).

    python bench/weight_gradients.py [--json FILE]

Needs one NVIDIA GPU and under a minute. For the matrices of Llama-3-8B at 8,192 tokens and GPT-13B at 4 x 2,048: what
the usual way does in a micro-batch (bf16 product, then `add_` to the sum), the product that adds, and the bf16 product
alone, which no way can beat; medians of 20, in milliseconds. The last rows are whole models: all blocks of a
micro-batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cut_off
import torch
from torch import Tensor

from paceline.kernels.weight_gradient import accumulate_product


class Matrix(NamedTuple):
    """A weight [D, C] and how many of it a block has."""

    name: str
    D: int
    C: int
    number: int = 1


class Shape(NamedTuple):
    tokens: int
    blocks: int
    matrices: tuple[Matrix, ...]


SHAPES = {
    "llama3_8b": Shape(
        tokens=8192,
        blocks=32,
        matrices=(
            Matrix("q, o", 4096, 4096, 2),
            Matrix("k, v", 1024, 4096, 2),
            Matrix("gate, up", 14336, 4096, 2),
            Matrix("down", 4096, 14336),
        ),
    ),
    "gpt_13b": Shape(
        tokens=8192,
        blocks=40,
        matrices=(Matrix("q, k, v, o", 5120, 5120, 4), Matrix("up", 20480, 5120), Matrix("down", 5120, 20480)),
    ),
}
REPEATS = 20
WARM_UP = 3


def milliseconds(run: Callable[[], object]) -> float:
    """Median time on the device. Between two runs the L2 cache is overwritten, as the rest of a backward would."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    times = []
    for repeat in range(WARM_UP + REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(matrix: Matrix, tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of each way, with sums in ``dtype``."""
    grad_MD = torch.randn(tokens, matrix.D, device="cuda", dtype=torch.bfloat16)
    x_MC = torch.randn(tokens, matrix.C, device="cuda", dtype=torch.bfloat16)
    place_DC = torch.zeros(matrix.D, matrix.C, device="cuda", dtype=dtype)

    def product() -> Tensor:
        return grad_MD.T @ x_MC

    return {
        "product": milliseconds(product),
        "first usual": milliseconds(lambda: place_DC.copy_(product())),
        "first fused": milliseconds(lambda: accumulate_product(place_DC, grad_MD, x_MC, first=True)),
        "usual": milliseconds(lambda: place_DC.add_(product())),
        "fused": milliseconds(lambda: accumulate_product(place_DC, grad_MD, x_MC, first=False)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/weight_gradients.py needs an NVIDIA GPU")
    names = ("product", "first usual", "first fused", "usual", "fused")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds")
    print(f"{'':28} {'sums':>5} " + " ".join(f"{name:>12}" for name in names) + f" {'saved':>7} {'TFLOP/s':>8}")
    found = []
    for model, shape in SHAPES.items():
        for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            total = dict.fromkeys(names, 0.0)
            flops = 0.0
            for matrix in shape.matrices:
                times = measure(matrix, shape.tokens, dtype)
                own = 2.0 * shape.tokens * matrix.D * matrix.C
                _print(f"{model} {matrix.name}", label, times, own)
                found.append({"model": model, "matrix": matrix.name, "sums": label, **times})
                flops += own * matrix.number * shape.blocks
                total = {name: value + times[name] * matrix.number * shape.blocks for name, value in total.items()}
            _print(f"{model}, a micro-batch", label, total, flops)
            found.append({"model": model, "matrix": "all", "sums": label, **total})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _print(name: str, sums: str, times: dict[str, float], flops: float) -> None:
    numbers = " ".join(f"{value:12.3f}" for value in times.values())
    saved = times["usual"] - times["fused"]
    print(f"{name:28} {sums:>5} {numbers} {saved:7.3f} {flops / times['fused'] / 1e9:8.0f}")


if __name__ == "__main__":
    cut_off.run(main)
