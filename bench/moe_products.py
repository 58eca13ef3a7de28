"""Times of expert layers by `parallel.expert_kernels`, of each kernel alone, and of ways to cut products up.

    python bench/moe_products.py [--json docs/measured/moe_products.json] [--part layers kernels tiles] [--only qwen3]

Needs one NVIDIA GPU. ``layers`` and ``kernels`` take two or three minutes with what Triton compiles, ``tiles`` about
a minute and a half more for each model. Rows are written as they come; a second call with the same file goes on where
the first one stopped. Medians of 10, in milliseconds; TFLOP/s of model FLOPs (backward counts twice the forward), and
their share of what a bf16 product of 8192^3 sustains in the same run.

    layers    forward, and forward and backward with weight gradients summed in fp32, over balanced and skewed routing:
                  plain            operations of torch, torch's grouped products, gradients written and then added
                  grouped          our kernels around torch's grouped products; weight gradients are ours, and add
                  triton           our products too
                  ...              mixtures: what is named is Triton's (rows, forward, inputs' and weights' gradients)
                  ..., fp8         products of forward and inputs' gradients in fp8, matrices cast before
              "error" is how far output and token gradients are from the plain way's
    kernels   each kernel beside its twin in operations of torch: GB/s of the traffic it cannot avoid, or TFLOP/s
    tiles     each product of ours in a handful of shapes; the fastest belongs into `kernels/expert_gemm_triton.py`

``--tiny`` tries the script itself, on a CPU with small sizes and the kernels' twins.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cut_off
import torch
from torch import Tensor

from paceline.config.model import Activation, FeedForwardSpec, MoEConfig, MoESpec
from paceline.kernels import expert_gemm, expert_rows
from paceline.kernels.expert_fp8 import cast_rows
from paceline.kernels.expert_gemm import Rows
from paceline.kernels.expert_order import expert_order_reference
from paceline.kernels.experts import GROUPED, TRITON, ExpertKernels, cast_matrices
from paceline.models.moe import MoE
from paceline.models.router import Routing, count_per_sequence
from paceline.report.console import make_console, print_table
from paceline.report.table import Column, Table
from paceline.runtime.device import device_name, synchronize, versions

REPEATS, WARM_UP = 10, 2
Row = dict[str, Any]


class Shape(NamedTuple):
    """An expert layer of a model, and the tokens of a micro-batch."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    activation: Activation = "swiglu"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def matrices(self) -> int:
        return 2 if self.activation == "swiglu" else 1

    @property
    def flops(self) -> float:
        """Forward, backward is twice that."""
        return 2.0 * self.rows * self.hidden * self.width * (self.matrices + 1)


SHAPES: Mapping[str, Shape] = {
    "qwen3": Shape(8192, 2048, 768, 128, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "deepseek": Shape(8192, 2048, 1408, 64, 6),
    "switch": Shape(16384, 768, 3072, 64, 1, "relu"),
}
TINY = {name: Shape(64, 32, 48, min(s.experts, 8), min(s.top_k, 4), s.activation) for name, s in SHAPES.items()}
ROUTINGS = ("balanced", "random", "one expert 20 %")
WAYS: Mapping[str, ExpertKernels | None] = {
    "plain": None,
    "grouped": GROUPED,
    "triton": TRITON,
    "rows": ExpertKernels(weight_gradient="torch"),
    "rows, forward, weights": ExpertKernels(forward="triton"),
    "rows, inputs, weights": ExpertKernels(input_gradient="triton"),
    "grouped, fp8": GROUPED,
    "triton, fp8": TRITON,
}


class Found:
    """Rows by key, in a file if there is one."""

    def __init__(self, path: Path | None, device: str) -> None:
        self.path, self.device = path, device
        self.rows: dict[str, Row] = {}
        if path is not None and path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["device"] == device and before["versions"]["torch"] == torch.__version__:
                self.rows = before["rows"]

    def add(self, key: str, measure: Callable[[], Row]) -> Row:
        """Measures, unless that has been done. What this torch or GPU cannot do is a finding, not the end."""
        if key not in self.rows:
            try:
                row = measure()
            except (RuntimeError, ValueError, AssertionError) as error:
                row = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
            print(f"{key}: " + ", ".join(f"{name} {_cell(value)}" for name, value in row.items()), flush=True)
            self.rows[key] = row
            self.write()
        return self.rows[key]

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = {"device": self.device, "versions": versions(), "rows": self.rows}
            self.path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="keep the numbers here, and go on from those that are there")
    parser.add_argument("--part", nargs="+", choices=("layers", "kernels", "tiles"), default=["layers", "kernels"])
    parser.add_argument("--only", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("bench/moe_products.py needs an NVIDIA GPU; --tiny tries it without one")
    device = torch.device("cpu" if options.tiny else "cuda")
    found, began = Found(options.json, device_name(device)), time.perf_counter()
    sustained = found.add("bf16 product", functools.partial(sustained_rate, device)).get("TFLOP/s", 0.0)
    for name in options.only:
        shape = (TINY if options.tiny else SHAPES)[name]
        if "layers" in options.part:
            layers(found, name, shape, device, sustained)
        if "kernels" in options.part:
            kernels(found, name, shape, device)
        if "tiles" in options.part and not options.tiny:
            tiles(found, name, shape, device)
    show(found, f"{found.device}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s")


# ---- measuring


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


def sustained_rate(device: torch.device) -> Row:
    size, seconds = (8192, 2.0) if device.type == "cuda" else (64, 0.01)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in "ab")
    end, times = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        times.append(milliseconds(device, lambda: a @ b))
    return {"TFLOP/s": 2.0 * size**3 / times[-1] / 1e9}


def draw(device: torch.device, *shape: int, std: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(shape, device=device, generator=generator).mul_(std).bfloat16()


def route(shape: Shape, kind: str, device: torch.device) -> Tensor:
    """int64 [N, K], each token's experts, all different."""
    N, K, E = shape.tokens, shape.top_k, shape.experts
    if kind == "balanced":
        return torch.arange(N * K, device=device).view(N, K) % E
    generator = torch.Generator(device=device).manual_seed(1)
    scores = torch.randn(N, E, device=device, generator=generator)
    if kind == "one expert 20 %":
        chosen = torch.rand(N, device=device, generator=generator) < 0.2
        scores[:, 0] = torch.where(chosen, 100.0, -100.0)
    return scores.topk(K, dim=-1).indices


# ---- layers


def layers(found: Found, name: str, shape: Shape, device: torch.device, sustained: float) -> None:
    keys = [f"layers/{name}/{kind}/{way}" for kind in ROUTINGS for way in WAYS]
    if all(key in found.rows for key in keys):
        return
    layer = _Layer(shape, device)
    for kind, (way, who) in itertools.product(ROUTINGS, WAYS.items()):
        measure = functools.partial(layer.measure, kind, who, sustained, fp8="fp8" in way)
        found.add(f"layers/{name}/{kind}/{way}", measure)


class _Layer:
    """The experts of one layer, with sums of gradients as the flat engine has them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        expert = FeedForwardSpec(
            hidden_size=shape.hidden, ffn_size=shape.width, activation=shape.activation, bias=False
        )
        spec = MoESpec(
            hidden_size=shape.hidden,
            num_experts=shape.experts,
            top_k=shape.top_k,
            expert=expert,
            shared=None,
            routing=MoEConfig(),
        )
        self.moe = MoE(spec, torch.bfloat16, device)
        self.matrices = [self.moe.experts.up_weight, self.moe.experts.down_weight]
        with torch.no_grad():
            for matrix in self.matrices:
                matrix.normal_(0.0, 0.02)
        self.sums = [torch.zeros_like(matrix, dtype=torch.float32) for matrix in self.matrices]
        self.fresh = torch.zeros((), dtype=torch.bool)
        self.x = draw(device, shape.tokens, shape.hidden).requires_grad_()
        self.grad = draw(device, shape.tokens, shape.hidden, std=1e-3, seed=1)
        self.plain: dict[str, tuple[Tensor, Tensor]] = {}

    def measure(self, kind: str, who: ExpertKernels | None, sustained: float, *, fp8: bool) -> Row:
        routing = self._routing(kind)
        if kind not in self.plain:
            self._choose(None, fp8=False)
            self.plain = {kind: self._once(routing)}  # one at a time: they are large
        self._choose(who, fp8=fp8)
        error = max(
            float((one.float() - other.float()).norm() / other.float().norm())
            for one, other in zip(self._once(routing), self.plain[kind], strict=True)
        )
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with torch.no_grad():
            forward = milliseconds(self.device, lambda: self.moe.run_experts(self.x, routing))
        both = milliseconds(self.device, lambda: self._train(routing))
        rate = 3 * self.shape.flops / both / 1e9
        row = {
            "forward ms": forward,
            "backward ms": both - forward,
            "ms": both,
            "TFLOP/s": rate,
            "of sustained": rate / sustained if sustained else 0.0,
            "error": error,
        }
        if self.device.type == "cuda":
            row["peak GiB beside weights"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        return row

    def _routing(self, kind: str) -> Routing:
        experts = route(self.shape, kind, self.device)
        weights = (draw(self.device, *experts.shape).float().sigmoid() / self.shape.top_k).requires_grad_()
        load = count_per_sequence(experts, 1, self.shape.experts)[0]
        none = torch.zeros((), device=self.device)
        return Routing(experts, weights, None, none, load, none, none)

    def _choose(self, who: ExpertKernels | None, *, fp8: bool) -> None:
        experts = self.moe.experts
        experts.kernels, experts.fp8 = who, None
        if fp8:
            experts.fp8 = cast_matrices(experts.up_weight, experts.down_weight)
        adds = who is not None and who.weight_gradient == "triton"
        for attribute, place in zip(("up_weight", "down_weight"), self.sums, strict=True):
            experts.aim(attribute, place if adds else None, self.fresh if adds else None)

    def _once(self, routing: Routing) -> tuple[Tensor, Tensor]:
        out = self.moe.run_experts(self.x, routing)
        (grad,) = torch.autograd.grad(out, [self.x], self.grad)
        return out.detach(), grad

    def _train(self, routing: Routing) -> None:
        out = self.moe.run_experts(self.x, routing)
        leaves = [self.x, routing.weights, *self.matrices]
        found = torch.autograd.grad(out, leaves, self.grad, allow_unused=True)
        for place, gradient in zip(self.sums, found[2:], strict=True):
            if gradient is not None:
                place.add_(gradient)


# ---- kernels


class _Rows:
    """Operands of every step of a layer, randomly routed."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        A, C, F, M, E = shape.rows, shape.hidden, shape.width, shape.matrices, shape.experts
        self.shape = shape
        self.experts = route(shape, "random", device)
        self.weights = torch.rand(self.experts.shape, device=device)
        self.order = expert_order_reference(self.experts, None, E)
        self.x, self.grad = (draw(device, shape.tokens, C, seed=seed) for seed in (0, 1))
        self.hidden, self.act = draw(device, A, M * F), draw(device, A, F)
        self.up, self.down = draw(device, E, M * F, C, std=0.02), draw(device, E, C, F, std=0.02)
        self.function: expert_rows.ActivationFunction = "silu" if M == 2 else "relu"

    def picked(self, values: Tensor) -> Rows:
        return Rows(values, self.order, self.shape.top_k, picked=True)

    def dense(self, values: Tensor) -> Rows:
        return Rows(values, self.order)


def kernels(found: Found, name: str, shape: Shape, device: torch.device) -> None:
    steps: _Rows | None = None
    for key, make in _steps_of(shape, device):
        if f"kernels/{name}/{key}" not in found.rows:
            steps = steps or _Rows(shape, device)
            found.add(f"kernels/{name}/{key}", functools.partial(_step, device, steps, make))


def _step(device: torch.device, rows: _Rows, make: Callable[[_Rows], tuple[Callable[[], object], float, float]]) -> Row:
    run, gigabytes, flops = make(rows)
    took = milliseconds(device, run)
    row: Row = {"ms": took}
    if gigabytes:
        row["GB/s"] = 1e3 * gigabytes / took
    if flops:
        row["TFLOP/s"] = flops / took / 1e9
    return row


def _steps_of(shape: Shape, device: torch.device) -> Iterator[tuple[str, Any]]:
    """What to time, by name: makes (what to run, GB of traffic, FLOPs)."""
    N, A, C, F, M, K = shape.tokens, shape.rows, shape.hidden, shape.width, shape.matrices, shape.top_k
    modules: dict[str, Any] = {"torch": expert_rows}
    products: dict[str, Any] = {"torch": expert_gemm}
    orders: dict[str, Any] = {"torch": expert_order_reference}
    if device.type == "cuda":
        from paceline.kernels import expert_gemm_triton, expert_order_triton, expert_rows_triton

        modules["triton"], products["triton"] = expert_rows_triton, expert_gemm_triton
        orders["triton"] = expert_order_triton.expert_order_triton
    bf16 = 2e-9
    one, up_flops = 2.0 * A * C * F, 2.0 * A * C * F * M
    yield (
        "cast of matrices, both ways, once a step",
        lambda r: (
            lambda: cast_matrices(r.up.unflatten(1, (M, F)), r.down),
            3e-9 * 2 * shape.experts * C * F * (M + 1),
            0.0,
        ),
    )
    for who, order in orders.items():
        yield f"order, {who}", lambda r, order=order: (lambda: order(r.experts, None, shape.experts), 0.0, 0.0)
    for who, m in modules.items():
        yield (
            f"spread, {who}",
            lambda r, m=m: (lambda: m.spread(r.x, r.order, K), bf16 * (N + A) * C, 0.0),
        )
        yield (
            f"activate, {who}",
            lambda r, m=m: (
                lambda: m.activate(r.hidden.view(A, M, F), r.weights, r.order, r.function),
                bf16 * A * F * (M + 1),
                0.0,
            ),
        )
        yield (
            f"activate backward, {who}",
            lambda r, m=m: (
                lambda: m.activate_backward(r.hidden.view(A, M, F), r.act, r.weights, r.order, r.function),
                bf16 * A * F * (2 * M + 2),
                0.0,
            ),
        )
        yield (
            f"combine, {who}",
            lambda r, m=m: (functools.partial(m.combine, _wide(r), r.order, K), bf16 * (N + A) * C, 0.0),
        )
    for who, p in products.items():
        # torch's are of rows that have been written out before
        picks = who == "triton"
        pick = _Rows.picked if picks else _written
        if picks:
            yield (
                "x @ up and activation, triton",
                lambda r, p=p: (
                    lambda: p.product_with_activation(
                        r.picked(r.x), r.up.transpose(1, 2), r.weights, r.function, gated=M == 2
                    ),
                    0.0,
                    up_flops,
                ),
            )
        yield f"x @ up, {who}", lambda r, p=p, pick=pick: (_product(p, pick(r, r.x), r.up.mT), 0.0, up_flops)
        yield f"@ down, {who}", lambda r, p=p: (_product(p, r.dense(r.act), r.down.mT), 0.0, one)
        yield f"grad @ down.T, {who}", lambda r, p=p, pick=pick: (_product(p, pick(r, r.grad), r.down), 0.0, one)
        yield f"@ up.T, {who}", lambda r, p=p: (_product(p, r.dense(r.hidden), r.up), 0.0, up_flops)
        for first in (True, False):
            # torch's first gradient is written, and replaces the sum; later ones are written and added
            label = "first" if first else "added"
            yield (
                f"down's gradient, {label}, {who}",
                lambda r, p=p, pick=pick, first=first: (
                    _sum(p, pick(r, r.grad), r.dense(r.act), r.down, first),
                    0.0,
                    one,
                ),
            )
            yield (
                f"up's gradient, {label}, {who}",
                lambda r, p=p, pick=pick, first=first: (
                    _sum(p, r.dense(r.hidden), pick(r, r.x), r.up, first),
                    0.0,
                    up_flops,
                ),
            )
    for who, p in products.items():
        # as a layer multiplies them: written rows for torch, and only forward with the fast accumulator
        for what, operand, matrix, flops, fast in (
            ("x @ up", "x", "up", up_flops, True),
            ("@ down", "act", "down", one, True),
            ("grad @ down.T", "grad", "down_turned", one, False),
            ("@ up.T", "hidden", "up_turned", up_flops, False),
        ):
            yield f"{what}, fp8, {who}", functools.partial(_fp8_product, p, who, operand, matrix, flops, fast)
    if "triton" in products:
        dense = products["triton"]
        yield "x @ up of written rows, triton", lambda r: (_product(dense, _written(r, r.x), r.up.mT), 0.0, up_flops)
        yield (
            "up's gradient of written rows, added, triton",
            lambda r: (_sum(dense, r.dense(r.hidden), _written(r, r.x), r.up, False), 0.0, up_flops),
        )


def _wide(rows: _Rows) -> Tensor:
    """[A, C]"""
    return rows.x.repeat(rows.shape.top_k, 1)


def _written(rows: _Rows, values: Tensor) -> Rows:
    return rows.dense(rows.picked(values).dense())


def _fp8_product(
    module: Any, who: str, operand: str, matrix: str, flops: float, fast: bool, rows: _Rows
) -> tuple[Callable[[], object], float, float]:
    M, F = rows.shape.matrices, rows.shape.width
    fp8 = cast_matrices(rows.up.unflatten(1, (M, F)), rows.down)
    values, scale = cast_rows(getattr(rows, operand))
    picked = operand in ("x", "grad")
    cast = Rows(values, rows.order, rows.shape.top_k if picked else 1, picked=picked, scale=scale)
    if who == "torch":
        cast = Rows(cast.dense(), rows.order, scale=cast.dense_scale())
    one, its_scale = getattr(fp8, matrix).mT, getattr(fp8, f"{matrix}_scale")
    return functools.partial(module.product, cast, one, its_scale, fast=fast), 0.0, flops


def _product(module: Any, operand: Rows, matrix: Tensor, **options: Any) -> Callable[[], object]:
    return lambda: module.product(operand, matrix, **options)


def _sum(module: Any, grad: Rows, x: Rows, like: Tensor, first: bool, **options: Any) -> Callable[[], object]:
    place = torch.zeros_like(like, dtype=torch.float32)
    return lambda: module.weight_product(grad, x, place, first=first, **options)


# ---- tiles


def tiles(found: Found, name: str, shape: Shape, device: torch.device) -> None:
    from paceline.kernels import expert_gemm_triton as ours
    from paceline.kernels.expert_gemm_triton import Tiles

    made: _Rows | None = None
    wide = (
        Tiles(128, 128, 64, 8, 3),
        Tiles(128, 128, 64, 4, 3),
        Tiles(128, 256, 64, 8, 3),
        Tiles(128, 256, 64, 8, 4),
        Tiles(128, 256, 64, 8, 4, waves=1),
        Tiles(256, 128, 64, 8, 3),
        Tiles(128, 128, 64, 8, 3, descriptors=True, registers=128),
        Tiles(128, 256, 64, 8, 3, descriptors=True),
        Tiles(128, 256, 64, 8, 4, descriptors=True),
        Tiles(128, 256, 64, 8, 4, waves=1, descriptors=True),
    )
    gated = (
        Tiles(128, 128, 64, 8, 3),
        Tiles(128, 128, 64, 8, 4),
        Tiles(128, 128, 64, 8, 3, waves=1),
        Tiles(128, 64, 64, 8, 3),
        Tiles(128, 64, 64, 4, 4),
        Tiles(128, 128, 64, 8, 3, descriptors=True),
        Tiles(128, 128, 64, 8, 4, descriptors=True),
        Tiles(128, 64, 64, 8, 3, descriptors=True, registers=128),
    )
    weight = (
        Tiles(128, 128, 64, 8, 3),
        Tiles(128, 128, 64, 8, 3, atomic=False),
        Tiles(128, 128, 64, 4, 3),
        Tiles(128, 128, 32, 8, 4),
        Tiles(128, 256, 64, 8, 3),
        Tiles(128, 256, 64, 8, 4),
        Tiles(128, 256, 64, 8, 3, atomic=False),
        Tiles(128, 128, 64, 8, 3, waves=2),
        Tiles(128, 128, 64, 8, 3, bulk=True),
        Tiles(128, 128, 64, 8, 3, bulk=True, waves=1),
        Tiles(128, 128, 64, 8, 3, bulk=True, waves=2, registers=128),
        Tiles(128, 256, 64, 8, 3, bulk=True, waves=1),
        Tiles(256, 128, 64, 8, 3, bulk=True, waves=1),
    )
    roles: dict[str, tuple[Sequence[Tiles], Callable[[_Rows, Tiles], Callable[[], object]], float]] = {
        "x @ up and activation": (
            gated if shape.matrices == 2 else wide,
            lambda r, t: (
                lambda: ours.product_with_activation(
                    r.picked(r.x), r.up.mT, r.weights, r.function, gated=shape.matrices == 2, tiles=t
                )
            ),
            float(shape.matrices),
        ),
        "@ down": (wide, lambda r, t: _product(ours, r.dense(r.act), r.down.mT, tiles=t), 1.0),
        "grad @ down.T": (wide, lambda r, t: _product(ours, r.picked(r.grad), r.down, tiles=t), 1.0),
        "@ up.T": (wide, lambda r, t: _product(ours, r.dense(r.hidden), r.up, tiles=t), float(shape.matrices)),
        "down's gradient": (
            weight,
            lambda r, t: _sum(ours, r.picked(r.grad), r.dense(r.act), r.down, False, tiles=t),
            1.0,
        ),
        "up's gradient": (
            weight,
            lambda r, t: _sum(ours, r.dense(r.hidden), r.picked(r.x), r.up, False, tiles=t),
            float(shape.matrices),
        ),
    }
    for role, (candidates, make, matrices) in roles.items():
        flops = 2.0 * shape.rows * shape.hidden * shape.width * matrices
        for candidate in candidates:
            key = f"tiles/{name}/{role}/{'x'.join(str(int(number)) for number in candidate)}"
            if key not in found.rows:
                made = made or _Rows(shape, device)
                step = functools.partial(_tiled, make, candidate, flops)
                found.add(key, functools.partial(_step, device, made, step))


def _tiled(
    make: Callable[[_Rows, Any], Callable[[], object]], candidate: Any, flops: float, rows: _Rows
) -> tuple[Callable[[], object], float, float]:
    return make(rows, candidate), 0.0, flops


# ---- telling


def show(found: Found, note: str) -> None:
    for part in ("layers", "kernels", "tiles"):
        rows = {key.split("/", 1)[1]: row for key, row in found.rows.items() if key.startswith(f"{part}/")}
        if not rows:
            continue
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        columns = (Column(name=part, align="left"), *(Column(name=name, align="right") for name in names))
        cells = tuple((key, *(_cell(row.get(name, "")) for name in names)) for key, row in rows.items())
        print_table(make_console(), Table(columns=columns, rows=cells, notes=(note,)))


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    cut_off.run(main, kept=cut_off.WRITTEN)
