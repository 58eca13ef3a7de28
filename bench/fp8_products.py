"""Times of linears in fp8: products, casts, and what compiling leaves of the casts.

    python bench/fp8_products.py [--json FILE] [--blocks]

Needs one NVIDIA GPU with fp8 and about a minute; ``--blocks`` (whole blocks of both models, compiled) another one. For
the linears of Llama-3-8B at 8,192 tokens and GPT-13B at 4 x 2,048, those that read the same input joined, forward and
both backward products together, weights cast before (once a step, as in training): medians of 20, in milliseconds, and
TFLOP/s of 6 M N K.

    bf16            what a run in bf16 does, each linear by itself
    products        the three fp8 products alone, operands ready: what no cast can beat
    torch, triton   with casts, outside of compiled code, by `train.fp8_cast_kernel`
    compiled ...    the linear by itself compiled: nothing makes its input here that casts could be fused with
    weights         casting the weights, once a step

``--shrink 64 --device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cut_off
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.load import resolve
from paceline.kernels.fp8 import cast_weights, fp8_linears
from paceline.kernels.fp8_cast import E4M3, Scaling, cast_both, gradient_dtype, product
from paceline.models.transformer import Transformer
from paceline.parallel.compile import compile_blocks
from paceline.parallel.low_precision import Fp8Options, Fp8Weights, use_fp8
from paceline.report.console import make_console, print_table
from paceline.report.table import Column, Table
from paceline.runtime.device import device_name, synchronize, versions

TOKENS = 8192
REPEATS, WARM_UP = 20, 3
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise")


class Linears(NamedTuple):
    """Widths of linears that read the same input."""

    name: str
    inputs: int
    outputs: tuple[int, ...]


MODELS: Mapping[str, tuple[Linears, ...]] = {
    "llama3_8b": (
        Linears("q k v", 4096, (4096, 1024, 1024)),
        Linears("o", 4096, (4096,)),
        Linears("gate up", 4096, (14336, 14336)),
        Linears("down", 14336, (4096,)),
    ),
    "gpt_13b": (
        Linears("q k v", 5120, (5120, 5120, 5120)),
        Linears("o", 5120, (5120,)),
        Linears("up", 5120, (20480,)),
        Linears("down", 20480, (5120,)),
    ),
}
SEQUENCES = {"llama3_8b": 1, "gpt_13b": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--blocks", action="store_true", help="time whole compiled blocks instead")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes by this")
    options = parser.parse_args()
    device = torch.device(options.device)
    began = time.perf_counter()
    rows = of_blocks(device) if options.blocks else of_linears(device, options.shrink)
    notes = [f"{device_name(device)}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s"]
    names = list(rows[0])
    columns = tuple(Column(name=name, align="left" if name in ("model", "what", "way") else "right") for name in names)
    cells = tuple(tuple(_cell(row[name]) for name in names) for row in rows)
    print_table(make_console(), Table(columns=columns, rows=cells, notes=tuple(notes)))
    if options.json:
        options.json.write_text(json.dumps({"versions": versions(), "device": notes[0], "rows": rows}, indent=1) + "\n")


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def milliseconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median of the time that the device needs; the queue is never empty, so launches do not count."""
    for _ in range(WARM_UP):
        run()
    synchronize(device)
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    synchronize(device)
    return statistics.median(one.elapsed_time(other) for one, other in itertools.pairwise(marks))


# ---- linears


def of_linears(device: torch.device, shrink: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model, members in MODELS.items():
        for linears in members:
            made = _Made(linears, device, shrink)
            ways: dict[str, Callable[[], object]] = {"bf16": made.bf16}
            for scaling in SCALINGS:
                ways |= {f"{scaling}, {way}": run for way, run in made.fp8(scaling).items()}
            for way, run in ways.items():
                took = _tried(functools.partial(milliseconds, device, run))
                rate = took if isinstance(took, str) else made.flops / took / 1e9
                if "weights" in way:
                    rate = ""
                rows.append({"model": model, "what": linears.name, "way": way, "ms": took, "TFLOP/s": rate})
    return rows


def _tried(measure: Callable[[], float]) -> float | str:
    """A combination that this torch or this GPU has no kernel for is a finding, not the end."""
    try:
        return measure()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


class _Made:
    """Inputs, weights and gradients of some linears."""

    def __init__(self, linears: Linears, device: torch.device, shrink: int) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        tokens, inputs = TOKENS // shrink, linears.inputs // shrink

        def draw(*shape: int, std: float = 1.0) -> Tensor:
            drawn = torch.randn(shape, device=device, generator=generator) * std
            return drawn.bfloat16()

        self.x = draw(tokens, inputs).requires_grad_()
        self.weights = [draw(size // shrink, inputs, std=0.02).requires_grad_() for size in linears.outputs]
        self.grads = [draw(tokens, len(weight), std=1e-6) for weight in self.weights]
        self.flops = 6 * tokens * inputs * sum(len(weight) for weight in self.weights)

    def _back(self, outputs: tuple[Tensor, ...]) -> object:
        return torch.autograd.grad(outputs, [self.x, *self.weights], self.grads)

    def bf16(self) -> object:
        return self._back(tuple(F.linear(self.x, weight) for weight in self.weights))

    def fp8(self, scaling: Scaling) -> dict[str, Callable[[], object]]:
        biases = [None] * len(self.weights)
        cached = cast_weights(self.weights, scaling)

        def linear(x: Tensor, *weights: Tensor, kernel: Any = "torch") -> tuple[Tensor, ...]:
            return fp8_linears(x, weights, biases, scaling=scaling, cached=cached, kernel=kernel)

        torch.compiler.reset()  # otherwise the ninth shape of the same function stays eager
        compiled = torch.compile(linear, dynamic=False, fullgraph=True)
        x_rows, x_columns = cast_both(self.x.detach(), E4M3, scaling)
        grad_rows, grad_columns = cast_both(torch.cat(self.grads, dim=1), gradient_dtype(scaling), scaling)

        def products() -> None:
            product(x_rows, cached.rows, torch.bfloat16, fast=True)
            product(grad_rows, cached.columns, torch.bfloat16, fast=False)
            product(grad_columns, x_columns, torch.bfloat16, fast=False)

        ways: dict[str, Callable[[], object]] = {
            "products": products,
            "torch": lambda: self._back(linear(self.x, *self.weights)),
            "triton": lambda: self._back(linear(self.x, *self.weights, kernel="triton")),
            "compiled, torch": lambda: self._back(compiled(self.x, *self.weights)),
            "compiled, triton": lambda: self._back(compiled(self.x, *self.weights, kernel="triton")),
            "weights": lambda: cast_weights(self.weights, scaling),
        }
        if scaling == "rowwise":
            del ways["triton"], ways["compiled, triton"]  # the kernel is for one scale
        return ways


# ---- blocks


def of_blocks(device: torch.device) -> list[dict[str, Any]]:
    """One compiled block, forward and backward: here casts can be fused into what makes their inputs."""
    rows: list[dict[str, Any]] = []
    for name, sequences in SEQUENCES.items():
        length = TOKENS // sequences
        config = resolve({}, [f"model.preset={name}", "model.num_layers=1", f"train.seq_len={length}"]).config
        ways = {f"{scaling}, torch": Fp8Options(scaling=scaling) for scaling in SCALINGS}
        ways["tensorwise, triton"] = Fp8Options(kernel="triton")
        for way, fp8 in {"bf16": None, **ways}.items():
            torch.compiler.reset()
            model = Transformer(config.model, dtype=torch.bfloat16, device=device)
            model.init_weights(0)
            if fp8 is not None:
                use_fp8(model, fp8, Fp8Weights(), cached=True)
            (block,) = model.blocks.values()
            compile_blocks([block])
            took = _tried(functools.partial(_block_time, device, model, sequences, length))
            rows.append({"model": name, "what": "block", "way": way, "ms": took})
            del model, block
    return rows


def _block_time(device: torch.device, model: Transformer, sequences: int, length: int) -> float:
    (block,) = model.blocks.values()
    x = torch.randn(sequences, length, model.config.hidden_size, device=device).bfloat16().requires_grad_()
    grad = torch.randn_like(x) * 1e-6
    positions = torch.arange(length, device=device)[None]
    cos_sin = None if model.rope is None else model.rope(positions)
    leaves = [x, *block.parameters()]

    def run() -> None:
        out, _ = block(x, cos_sin, None)
        torch.autograd.grad(out, leaves, grad)

    return milliseconds(device, run)


if __name__ == "__main__":
    cut_off.run(main)
