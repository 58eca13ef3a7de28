"""The fast layer of experts against one that goes expert by expert, with torch's autograd.

On a CPU in float64, Triton's kernels through the interpreter in fp32, and on a GPU in bf16.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, library

from paceline.kernels import expert_rows
from paceline.kernels import experts as experts_module
from paceline.kernels.expert_fp8 import cast_rows, cast_turned
from paceline.kernels.expert_gemm import Rows, product, weight_product
from paceline.kernels.expert_order import ExpertOrder, expert_order_reference, sorted_order
from paceline.kernels.experts import GROUPED, TRITON, ExpertKernels, GradientSum, cast_matrices, fused_experts

ALL_TORCH = ExpertKernels(rows="torch", weight_gradient="torch")
MIXED = ExpertKernels(rows="torch", forward="triton", input_gradient="torch", weight_gradient="torch")


class Case(NamedTuple):
    """Who is chosen: "even", "one" (the first takes all), "few" (most experts have nothing), "skewed"."""

    tokens: int
    experts: int
    top_k: int
    choice: str = "even"
    drops: bool = False


CASES: Mapping[str, Case] = {
    "even": Case(24, 4, 2),
    "odd": Case(37, 6, 3),
    "one takes all": Case(19, 4, 1, "one"),
    "few": Case(21, 16, 2, "few"),
    "top 1": Case(33, 4, 1),
    "drops": Case(30, 4, 2, "skewed", drops=True),
    "drops, top 1": Case(17, 3, 1, "skewed", drops=True),
    "all experts": Case(9, 4, 4),
    "one token": Case(1, 4, 2),
}


class Inputs(NamedTuple):
    x: Tensor
    experts: Tensor
    weights: Tensor
    kept: Tensor | None
    up: Tensor
    down: Tensor
    grad: Tensor


def make(
    case: Case,
    *,
    width: int = 16,
    hidden: int = 24,
    gated: bool = True,
    dtype: Any = torch.float64,
    device: str = "cpu",
) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    scores = torch.rand(case.tokens, case.experts, generator=generator)
    slope = {"even": 0.0, "one": 100.0, "few": 100.0, "skewed": 0.5}[case.choice]
    scores -= slope * torch.arange(case.experts).clamp(max=3 if case.choice == "few" else case.experts)
    experts = scores.topk(case.top_k, dim=-1).indices
    kept = torch.rand(experts.shape, generator=generator) < 0.6 if case.drops else None
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(experts.shape, generator=generator).to(device, wide)
    if kept is not None:
        weights = weights * kept.to(device)
    return Inputs(
        x=draw(case.tokens, width).requires_grad_(),
        experts=experts.to(device),
        weights=weights.requires_grad_(),
        kept=None if kept is None else kept.to(device),
        up=(draw(case.experts, 2 if gated else 1, hidden, width) * width**-0.5).requires_grad_(),
        down=(draw(case.experts, width, hidden) * hidden**-0.5).requires_grad_(),
        grad=draw(case.tokens, width),
    )


FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def by_expert(inputs: Inputs, function: str) -> Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    out = torch.zeros_like(inputs.x)
    for number, (up, down) in enumerate(zip(inputs.up, inputs.down, strict=True)):
        hidden = FUNCTIONS[function](inputs.x @ up[0].T)
        if len(up) == 2:
            hidden = hidden * (inputs.x @ up[1].T)
        chosen = inputs.experts == number
        if inputs.kept is not None:
            chosen = chosen & inputs.kept
        out = out + hidden @ down.T * (inputs.weights * chosen).sum(1, keepdim=True)
    return out


def gradients(inputs: Inputs, out: Tensor) -> dict[str, Tensor]:
    names = ("x", "weights", "up", "down")
    found = torch.autograd.grad(out, [getattr(inputs, name) for name in names], inputs.grad)
    grads = dict(zip(names, found, strict=True))
    if inputs.kept is not None:  # the plain path multiplies the weight of a dropped one by 0, and its gradient with it
        grads["weights"] = grads["weights"] * inputs.kept
    return {"out": out.detach(), **grads}


def run_fused(inputs: Inputs, function: Any = "silu", kernels: ExpertKernels = GROUPED) -> dict[str, Tensor]:
    out = fused_experts(
        inputs.x,
        inputs.experts,
        inputs.weights,
        inputs.kept,
        inputs.up,
        inputs.down,
        function=function,
        kernels=kernels,
    )
    return gradients(inputs, out)


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        error = float((found[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30))
        assert error <= tolerance, (name, error)


# ---- the plain twin


@pytest.mark.parametrize("name", CASES)
def test_equals_expert_by_expert_in_float64(name: str) -> None:
    inputs = make(CASES[name])
    compare(run_fused(inputs), gradients(inputs, by_expert(inputs, "silu")), 1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_activation(function: str, gated: bool) -> None:
    inputs = make(CASES["odd"], gated=gated)
    compare(run_fused(inputs, function), gradients(inputs, by_expert(inputs, function)), 1e-12)


def test_gradients_go_to_their_sums() -> None:
    """Two micro-batches; the first replaces whatever was there."""
    first, second = make(CASES["few"]), make(CASES["few"]._replace(tokens=5))
    up_sum, down_sum = (
        GradientSum(values=torch.full_like(matrix, 7.0), fresh=torch.tensor(True)) for matrix in (first.up, first.down)
    )
    expected = {"up": torch.zeros_like(first.up), "down": torch.zeros_like(first.down)}
    for inputs in (first, second._replace(up=first.up, down=first.down)):
        out = fused_experts(*inputs[:6], function="silu", up_sum=up_sum, down_sum=down_sum)
        out.backward(inputs.grad)
        usual = run_fused(inputs)
        expected = {name: value + usual[name] for name, value in expected.items()}
        assert inputs.x.grad is not None and inputs.weights.grad is not None
        assert torch.equal(inputs.x.grad, usual["x"]) and torch.equal(inputs.weights.grad, usual["weights"])
    assert first.up.grad is None and first.down.grad is None
    assert not up_sum.fresh and not down_sum.fresh
    compare({"up": up_sum.values, "down": down_sum.values}, expected, 1e-12)


def test_no_tokens_at_all() -> None:
    """A rank of expert parallelism that nobody sends a token to."""
    inputs = make(Case(0, 4, 2))
    found = run_fused(inputs)
    assert found["out"].shape == (0, 16) and not found["up"].any() and not found["down"].any()


def test_a_frozen_matrix_gets_no_gradient() -> None:
    inputs = make(CASES["odd"])
    inputs.up.requires_grad_(False)
    expected = by_expert(inputs, "silu")
    out = fused_experts(*inputs[:6], function="silu")
    wanted = torch.autograd.grad(expected, [inputs.x, inputs.down], inputs.grad)
    out.backward(inputs.grad)
    assert inputs.up.grad is None and inputs.x.grad is not None and inputs.down.grad is not None
    torch.testing.assert_close([inputs.x.grad, inputs.down.grad], list(wanted))


def test_operators_are_what_they_say() -> None:
    """Their schemas and fake twins; torch's own check, without the parts for operators that have an autograd."""
    inputs = make(CASES["odd"], dtype=torch.float32)
    plain = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    x, chosen, weights, kept, up, down, grad = plain
    ops, tests = torch.ops.paceline, ("test_schema", "test_faketensor")
    spelled = GROUPED.spelled()
    arguments: tuple[Any, ...] = (x, chosen, weights, kept, up, down, [], "silu", spelled)
    library.opcheck(ops.experts_forward.default, arguments, test_utils=tests)
    _, hidden, *order = ops.experts_forward.default(*arguments)
    arguments = (grad, weights, hidden, *order, up, down, [], "silu", spelled)
    library.opcheck(ops.experts_backward.default, arguments, test_utils=tests)
    _, _, grad_hidden, _, _ = ops.experts_backward.default(*arguments)
    arguments = (grad_hidden, x, *order, 3, False, True, spelled)
    library.opcheck(ops.experts_weight_gradient.default, arguments, test_utils=tests)
    arguments = (torch.zeros_like(up), torch.tensor(True), *arguments)
    library.opcheck(ops.experts_add_weight_gradient.default, arguments, test_utils=tests)


def test_a_compiled_layer_is_one_graph() -> None:
    torch._dynamo.reset()
    inputs = make(CASES["odd"], dtype=torch.float32)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        out = fused_experts(2 * x, inputs.experts, weights, None, inputs.up, inputs.down, function="silu")
        return out * 3

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    expected = gradients(inputs, layer(inputs.x, inputs.weights))
    compare(gradients(inputs, compiled(inputs.x, inputs.weights)), expected, 1e-6)


def test_kernels_are_spelled_and_read() -> None:
    for names in itertools.product(("torch", "triton"), repeat=4):
        assert ExpertKernels.of(" ".join(names)).spelled() == " ".join(names)


def test_sorted_order() -> None:
    found = sorted_order(torch.tensor([2, 0, 3]), 5)
    expected = expert_order_reference(torch.tensor([[0], [0], [2], [2], [2]]), None, 3)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# ---- Triton's kernels

_TRITON = tuple(
    f"paceline.kernels.{name}"
    for name in (
        "expert_order_triton",
        "expert_rows_triton",
        "expert_gemm_triton",
        "turned_triton",
        "expert_fp8_triton",
    )
)


def _is_triton(name: str) -> bool:
    """Of its modules, those in Python."""
    return name.partition(".")[0] == "triton" and not name.startswith("triton._C")


@pytest.fixture
def interpreted() -> Iterator[None]:
    """The kernels' files as Triton's interpreter runs them, on a CPU, and used there; with small tiles."""
    pytest.importorskip("triton")
    package = importlib.import_module("paceline.kernels")
    # Triton too: whether its own library (tl.sum and the like) is interpreted is settled when it is imported
    own = [name for name in sys.modules if _is_triton(name)]
    before = {name: sys.modules.pop(name, None) for name in (*_TRITON, *own)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in _TRITON:
            importlib.import_module(name)
        patch.setattr(experts_module, "_ours", lambda provider, x: provider == "triton")
        gemm: Any = importlib.import_module(_TRITON[2])
        tiles = gemm.Tiles(rows=16, columns=16, depth=16, together=2, waves=2)
        patch.setattr(gemm, "WITH_ACTIVATION", tiles)
        patch.setattr(gemm, "PRODUCT", tiles._replace(waves=0))
        for name in ("WEIGHT", "WEIGHT_STORED"):
            patch.setattr(gemm, name, tiles._replace(waves=1))
        yield
    # whoever imports them next gets the real ones
    for name in [*_TRITON, *(name for name in sys.modules if _is_triton(name))]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if module is not None})
    for name in _TRITON:
        delattr(package, name.rpartition(".")[2])
        if before[name] is not None:
            setattr(package, name.rpartition(".")[2], before[name])


@pytest.mark.parametrize("name", CASES)
def test_order_in_the_interpreter(interpreted: None, name: str) -> None:
    check_order(make(CASES[name], dtype=torch.float32), block=16)


def check_order(inputs: Inputs, **options: int) -> ExpertOrder:
    from paceline.kernels.expert_order_triton import expert_order_triton

    number = inputs.up.shape[0]
    found = expert_order_triton(inputs.experts, inputs.kept, number, **options)
    expected = expert_order_reference(inputs.experts, inputs.kept, number)
    assert torch.equal(found.ends, expected.ends) and torch.equal(found.place, expected.place)
    rows = int(expected.ends[-1])
    assert torch.equal(found.order[:rows], expected.order[:rows])
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_twin_in_the_interpreter(interpreted: None, name: str) -> None:
    inputs = make(CASES[name], dtype=torch.float32)
    expected = run_fused(inputs, kernels=ALL_TORCH)
    for kernels in (TRITON, GROUPED) if CASES[name].drops else (TRITON,):
        compare(run_fused(inputs, kernels=kernels), expected, 2e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations_in_the_interpreter(interpreted: None, function: str) -> None:
    for gated, kernels in ((False, TRITON), (True, MIXED), (True, GROUPED)):
        inputs = make(Case(11, 3, 2), gated=gated, dtype=torch.float32)
        compare(run_fused(inputs, function, kernels), run_fused(inputs, function, ALL_TORCH), 2e-6)


def test_sizes_that_no_tile_divides_in_the_interpreter(interpreted: None) -> None:
    inputs = make(Case(13, 3, 2), width=40, hidden=24, dtype=torch.float32)
    compare(run_fused(inputs, kernels=TRITON), run_fused(inputs, kernels=ALL_TORCH), 2e-6)


def test_descriptors_in_the_interpreter(interpreted: None) -> None:
    """Loads by the copy engine, of matrices both ways round and of rows; columns that no tile divides."""
    from paceline.kernels import expert_gemm_triton

    inputs = make(Case(21, 3, 2, "skewed"), width=32, hidden=24, dtype=torch.float32)
    order = expert_order_reference(inputs.experts, None, 3)
    picked = Rows(inputs.x.detach(), order, 2, picked=True)
    up, down = inputs.up.detach(), inputs.down.detach()
    tiles = expert_gemm_triton.Tiles(rows=16, columns=16, depth=16, together=2, waves=1, descriptors=True)
    weights = inputs.weights.detach()
    found = expert_gemm_triton.product_with_activation(
        picked, up.flatten(1, 2).mT, weights, "silu", gated=True, tiles=tiles
    )
    hidden = product(picked, up.flatten(1, 2).mT)
    expected = (hidden, expert_rows.activate(hidden.unflatten(1, (2, -1)), weights, order, "silu"))
    for one, other in zip(found, expected, strict=True):
        compare({"out": one}, {"out": other}, 2e-6)
    for rows, matrix in (
        (Rows(picked.dense(), order), down),
        (picked, down),
        (Rows(picked.dense(), order), down.mT.mT),
    ):
        assert expert_gemm_triton._describable(rows.values, matrix)
        compare({"out": expert_gemm_triton.product(rows, matrix, tiles=tiles)}, {"out": product(rows, matrix)}, 2e-6)


def test_sums_in_the_interpreter(interpreted: None) -> None:
    from paceline.kernels import expert_gemm_triton

    inputs = make(CASES["few"], dtype=torch.float32)
    order = expert_order_reference(inputs.experts, None, 16)
    x, act = inputs.x.detach(), torch.randn(order.place.numel(), 24, generator=torch.Generator().manual_seed(1))
    grad = Rows(inputs.grad, order, 2, picked=True)
    for sums_dtype in (torch.float32, torch.float64):
        found, expected = (torch.ones(16, 16, 24, dtype=sums_dtype) for _ in "ab")
        for first in (True, False, False):
            tiles = expert_gemm_triton.WEIGHT._replace(atomic=sums_dtype == torch.float32)
            expert_gemm_triton.weight_product(grad, Rows(act, order), found, first=first, tiles=tiles)
            weight_product(grad, Rows(act, order), expected, first=first)
        compare({"sums": found}, {"sums": expected}, 1e-6)
    wanted = expected.clone()
    weight_product(grad, Rows(act, order), wanted, first=False)
    for atomic in (False, True):
        sums = expected.float()
        tiles = expert_gemm_triton.WEIGHT._replace(atomic=atomic, waves=0)
        expert_gemm_triton.weight_product(grad, Rows(act, order), sums, first=False, tiles=tiles)
        compare({"sums": sums}, {"sums": wanted}, 1e-6)
    none = Rows(x[:0], expert_order_reference(inputs.experts[:0], None, 16), 2, picked=True)
    sums = torch.ones(16, 16, 16)
    expert_gemm_triton.weight_product(none, none, sums, first=False)
    assert sums.eq(1).all()
    expert_gemm_triton.weight_product(none, none, sums, first=True)
    assert not sums.any()


# ---- fp8


def rounded(x: Tensor) -> Tensor:
    """fp32: each row as e4m3 numbers with the largest power-of-two factor that fits."""
    factor = torch.exp2(torch.floor(torch.log2(448.0 / x.double().abs().amax(-1, keepdim=True))))
    factor = torch.where(factor.isinf(), 1.0, factor).float()
    return (x.float() * factor).to(torch.float8_e4m3fn).float() / factor


def in_fp8_row_by_row(inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of SwiGLU experts, one assignment after the other; every operand rounded where it is due."""
    out, grad_x = torch.zeros_like(inputs.x, dtype=torch.float32), torch.zeros_like(inputs.x, dtype=torch.float32)
    grads = {name: torch.zeros_like(getattr(inputs, name), dtype=torch.float32) for name in ("weights", "up", "down")}
    x8, grad8 = rounded(inputs.x.detach()), rounded(inputs.grad)
    for n, k in itertools.product(*map(range, inputs.experts.shape)):
        if inputs.kept is not None and not inputs.kept[n, k]:
            continue
        e, weight = int(inputs.experts[n, k]), float(inputs.weights[n, k].detach())
        up, down = inputs.up[e].detach().flatten(0, 1), inputs.down[e].detach()
        hidden = (rounded(up) @ x8[n]).bfloat16().float().requires_grad_()
        gate, other = hidden.chunk(2)
        value = F.silu(gate) * other
        act = (value * weight).bfloat16().detach()
        out[n] += (rounded(down) @ rounded(act)).bfloat16().float()
        grad_act = (rounded(down.T) @ grad8[n]).bfloat16().float()
        (grad_hidden,) = torch.autograd.grad(value, hidden, grad_act * weight)
        grad_hidden = grad_hidden.bfloat16()
        grad_x[n] += (rounded(up.T) @ rounded(grad_hidden)).bfloat16().float()
        grads["weights"][n, k] = (grad_act * value.detach()).sum()
        grads["down"][e] += torch.outer(inputs.grad[n].float(), act.float())
        grads["up"][e] += torch.outer(grad_hidden.float(), inputs.x[n].detach().float()).view_as(inputs.up[e])
    return {"out": out, "x": grad_x, **grads}


@pytest.mark.parametrize("name", ["odd", "drops", "one token"])
def test_fp8_equals_row_by_row(name: str) -> None:
    inputs = make(CASES[name], dtype=torch.bfloat16)
    fp8 = cast_matrices(inputs.up, inputs.down)
    found = gradients(inputs, fused_experts(*inputs[:6], function="silu", fp8=fp8))
    compare(found, in_fp8_row_by_row(inputs), 4e-3)  # the last rounding to bf16


def test_fp8_is_near_bf16_and_compiles() -> None:
    torch._dynamo.reset()
    inputs = make(CASES["odd"], dtype=torch.bfloat16)
    fp8 = cast_matrices(inputs.up, inputs.down)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        return fused_experts(x, inputs.experts, weights, None, inputs.up, inputs.down, function="silu", fp8=fp8)

    found = gradients(inputs, layer(inputs.x, inputs.weights))
    compare(found, run_fused(inputs), 0.08)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    compare(gradients(inputs, compiled(inputs.x, inputs.weights)), found, 1e-6)


def test_what_is_not_finite_stays_visible_in_fp8() -> None:
    for bad in (float("inf"), float("nan")):
        x = torch.ones(3, 32)
        x[1, 4] = bad
        wide = cast_rows(x).wide()
        assert not wide[1].isfinite().any() or not wide[1, 4].isfinite()
        assert torch.equal(wide[[0, 2]], x[[0, 2]])


def test_fp8_products_in_the_interpreter(interpreted: None) -> None:
    """Operands that have been cast before: the interpreter's cast to fp8 does not round as hardware does."""
    from paceline.kernels import expert_fp8_triton, expert_gemm_triton

    inputs = make(Case(19, 3, 2, "skewed"), width=32, hidden=16, dtype=torch.bfloat16)
    order = expert_order_reference(inputs.experts, None, 3)
    fp8 = cast_matrices(inputs.up, inputs.down)
    x, grad = cast_rows(inputs.x.detach()), cast_rows(inputs.grad)
    picked = Rows(x.values, order, 2, picked=True, scale=x.scale)
    weights = inputs.weights.detach()
    for tiles in (expert_gemm_triton.PRODUCT, expert_gemm_triton.PRODUCT._replace(descriptors=True)):
        hidden = product(picked, fp8.up.mT, fp8.up_scale)
        act = expert_rows.activate(hidden.unflatten(1, (2, -1)), weights, order, "silu")
        found = expert_gemm_triton.product_with_activation(
            picked, fp8.up.mT, weights, "silu", fp8.up_scale, gated=True, tiles=tiles
        )
        # the interpreter does not round to bf16 as hardware does either
        compare({"hidden": found[0], "act": found[1]}, {"hidden": hidden, "act": act}, 2e-2)
        rows = Rows(grad.values, order, 2, picked=True, scale=grad.scale)
        expected = product(rows, fp8.down_turned.mT, fp8.down_turned_scale, fast=False)
        found_one = expert_gemm_triton.product(rows, fp8.down_turned.mT, fp8.down_turned_scale, fast=False, tiles=tiles)
        compare({"grad": found_one}, {"grad": expected}, 1e-2)
    # numbers that fp8 has exactly
    generator = torch.Generator().manual_seed(1)
    exact = torch.ldexp(torch.randint(4, 8, (3, 24, 40), generator=generator) / 4, torch.tensor(-2)).bfloat16()
    exact[:, :, 0] = 1.75
    exact[:, 0] = 1.75
    for cast, twin in ((expert_fp8_triton.cast_rows, cast_rows), (expert_fp8_triton.cast_turned, cast_turned)):
        one, other = cast(exact), twin(exact)
        assert torch.equal(one.wide(), other.wide()) and torch.equal(one.scale, other.scale)


# ---- on a GPU

SIZES = {
    "qwen3": (Case(2048, 128, 8), 2048, 768),
    "qwen3, skewed": (Case(1001, 128, 8, "few"), 2048, 768),
    "deepseek": (Case(777, 64, 6), 2048, 1408),
    "switch": (Case(1000, 8, 1, drops=True), 768, 3072),
    "one expert": (Case(513, 8, 2, "one"), 256, 512),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_on_a_gpu_in_bf16(name: str) -> None:
    """Against products in float64 of the same bf16 numbers; 2^-9 a rounding, some of them one after the other."""
    case, width, hidden = SIZES[name]
    inputs = make(case, width=width, hidden=hidden, dtype=torch.bfloat16, device="cuda")
    exact = Inputs(
        *(
            value.detach().double().requires_grad_() if value is not None and value.is_floating_point() else value
            for value in inputs
        )
    )
    expected = gradients(exact, by_expert(exact, "silu"))
    check_order(inputs)
    for kernels in (ALL_TORCH, GROUPED, TRITON):
        found, again = (run_fused(inputs, kernels=kernels) for _ in "ab")
        compare(found, expected, 1e-2)
        assert all(torch.equal(found[part], again[part]) for part in found), kernels


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [GROUPED, TRITON], ids=lambda kernels: kernels.spelled())
def test_fp8_on_a_gpu(kernels: ExpertKernels) -> None:
    """Casts bit for bit; products against the twin on a CPU."""
    from paceline.kernels import expert_fp8_triton

    inputs = make(Case(200, 8, 2, "skewed", drops=True), width=256, hidden=384, dtype=torch.bfloat16, device="cuda")
    for x in (inputs.x, inputs.up, inputs.down):
        for cast, twin in ((expert_fp8_triton.cast_rows, cast_rows), (expert_fp8_triton.cast_turned, cast_turned)):
            if x.dim() == 3 or cast is expert_fp8_triton.cast_rows:
                one, other = cast(x.detach()), twin(x.detach())
                assert torch.equal(one.wide(), other.wide()) and torch.equal(one.scale, other.scale)
    on_cpu = Inputs(*(None if v is None else v.detach().cpu().requires_grad_(v.requires_grad) for v in inputs))
    results = []
    for one in (inputs, on_cpu):
        fp8 = cast_matrices(one.up, one.down)
        out = fused_experts(*one[:6], function="silu", kernels=kernels, fp8=fp8)
        results.append({name: value.cpu() for name, value in gradients(one, out).items()})
    compare(results[0], results[1], 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("sums_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("picked", [False, True])
def test_weight_gradients_on_a_gpu(sums_dtype: torch.dtype, picked: bool) -> None:
    from paceline.kernels import expert_gemm_triton

    case = Case(512, 16, 4, "skewed")
    inputs = make(case, width=256, hidden=384, dtype=torch.bfloat16, device="cuda")
    order = expert_order_reference(inputs.experts, None, 16)
    act = torch.randn(2048, 384, device="cuda").bfloat16()
    grad = Rows(inputs.grad, order, 4, picked=True)
    if not picked:
        grad = Rows(grad.dense(), order)
    exact = torch.zeros(16, 256, 384, dtype=torch.float64)
    wide = Rows(grad.dense().double().cpu(), ExpertOrder(*(part.cpu() for part in order)))
    weight_product(wide, Rows(act.double().cpu(), wide.order), exact, first=True)
    found = torch.full((16, 256, 384), 7.0, device="cuda", dtype=sums_dtype)
    ways = ({"atomic": True}, {"atomic": False}, {"bulk": True, "waves": 1})
    for first, way in (
        (True, ways[0]),
        *((False, way) for way in ways),
        (True, ways[2]),
        *((False, way) for way in ways),
    ):
        tiles = expert_gemm_triton.WEIGHT._replace(**way)
        expert_gemm_triton.weight_product(grad, Rows(act, order), found, first=first, tiles=tiles)
    compare({"sums": found.cpu()}, {"sums": 4 * exact}, 1e-2 if sums_dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [GROUPED, TRITON], ids=lambda kernels: kernels.spelled())
def test_nothing_waits_for_the_device(kernels: ExpertKernels) -> None:
    inputs = make(Case(64, 8, 2, drops=True), width=64, hidden=128, dtype=torch.bfloat16, device="cuda")
    run_fused(inputs, kernels=kernels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_fused(inputs, kernels=kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_products_on_a_gpu_whatever_the_tiles() -> None:
    from paceline.kernels import expert_gemm_triton
    from paceline.kernels.expert_gemm_triton import Tiles

    inputs = make(Case(300, 8, 2, "few"), width=256, hidden=384, dtype=torch.bfloat16, device="cuda")
    order = expert_order_reference(inputs.experts, None, 8)
    rows = Rows(inputs.x.detach(), order, 2, picked=True)
    up_ECF = inputs.up.detach()[:, 0].transpose(1, 2)
    expected = product(rows, up_ECF)
    for tiles in (
        Tiles(),
        Tiles(64, 128, 32, 4, 2, 1, 2),
        Tiles(128, 256, 64, 8, 3, 4, 1),
        Tiles(descriptors=True, registers=128),
    ):
        found = expert_gemm_triton.product(rows, up_ECF, tiles=tiles)
        compare({"out": found}, {"out": expected}, 2e-3)
