"""Frozen fp8 linears with pairs as one operation: against products of their own that autograd sums.

In bf16, of what is rounded otherwise: h and gh, where products of several pairs and of one sum in another order, by one
place; and the gradient of the input, to which one process adds gh @ A before it is rounded and the other one after.
bf16 has 8 bits, so a number is rounded by at most 2^-8 of itself to its neighbour.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

from paceline.kernels.fp8 import cast_weights
from paceline.kernels.fp8_cast import E4M3, Scaling
from paceline.kernels.fp8_delayed import FACTOR, LARGEST, Delayed, DelayedPair
from paceline.kernels.lora_fp8 import lora_fp8_linears, lora_fp8_linears_reference

PLACE = 2.0**-8
"""Of a number in bf16."""
SCALE = 1.7
Given = dict[str, list[Any]]


def matrices(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Given:
    """Three linears of 32 inputs: with bias and pair, without pair, with a pair of another rank."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, learns: bool = False) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(learns)

    return {
        "weights": [made(48, 32), made(16, 32), made(80, 32)],
        "biases": [made(48), None, made(80)],
        "downs": [made(3, 32, learns=True), None, made(5, 32, learns=True)],
        "ups": [made(48, 3, learns=True), None, made(80, 5, learns=True)],
    }


def drawn(*shape: int, seed: int = 9, dtype: torch.dtype = torch.bfloat16, learns: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(learns)


def delayed(factor: float = 0.0) -> DelayedPair:
    def one(factor: float) -> Delayed:
        state = torch.tensor([factor, 1 / factor if factor else torch.inf, 0.0, 0.0])
        return Delayed(state, torch.tensor(bool(factor)))

    return DelayedPair(one(factor), one(4 * factor))


def learned_of(given: Given) -> list[Tensor]:
    return [matrix for key in ("downs", "ups") for matrix in given[key] if matrix is not None]


def results(function: Any, x: Tensor, given: Given, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the input, if it learns, and of the pairs."""
    outs = function(x, *given.values(), SCALE, **options)
    weights = [drawn(*out.shape, seed=index, dtype=out.dtype, learns=False) for index, out in enumerate(outs)]
    wanted = [*([x] if x.requires_grad else []), *learned_of(given)]
    read = [(out, weight) for out, weight in zip(outs, weights, strict=True) if out.requires_grad]
    return list(outs), list(torch.autograd.grad([out for out, _ in read], wanted, [weight for _, weight in read]))


OPTIONS = [
    pytest.param({"scaling": "tensorwise"}, id="tensorwise"),
    pytest.param({"scaling": "tensorwise", "kernel": "triton"}, id="triton"),
    pytest.param({"scaling": "rowwise"}, id="rowwise"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 32), (13, 32), (1, 32)])
def test_equals_products_of_their_own(options: dict[str, Any], is_cached: bool, shape: tuple[int, ...]) -> None:
    """To the places of bf16 that rounding may move: see the head of this file."""
    given, x = matrices(), drawn(*shape)
    if is_cached:
        weights = [weight for weight in given["weights"] if weight is not None]
        options = options | {"cached": cast_weights(weights, options["scaling"])}
    outs, grads = results(lora_fp8_linears, x, given, **options)
    expected, theirs = results(lora_fp8_linears_reference, x, given, **options)
    x_MC = x.detach().float().flatten(0, -2)
    moved = torch.zeros_like(x_MC)
    for index, (out, other, down, up) in enumerate(zip(outs, expected, given["downs"], given["ups"], strict=True)):
        bound = torch.zeros(len(x_MC), out.shape[-1])
        if down is not None and up is not None:
            down, up, grad = down.detach().float(), up.detach().float(), drawn(*out.shape, seed=index).detach().float()
            h, grad_h = x_MC @ down.T, SCALE * grad.flatten(0, -2) @ up
            bound = SCALE * PLACE * h.abs() @ up.abs().T + 2 * PLACE * other.detach().float().flatten(0, -2).abs()
            # gh by three roundings (product, scale, sum of pairs), gh @ A by one
            moved += 4 * PLACE * grad_h.abs() @ down.abs()
        assert bool(((out - other).detach().float().flatten(0, -2).abs() <= bound).all()), index
    difference = (grads[0] - theirs[0]).float().flatten(0, -2).abs()
    assert bool((difference <= moved + 2 * PLACE * theirs[0].float().flatten(0, -2).abs()).all())
    for ours, other in zip(grads[1:], theirs[1:], strict=True):
        # sums over tokens of numbers that are some places off
        assert float((ours - other).float().norm()) <= 4 * PLACE * float(other.float().norm())


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_equals_products_of_their_own_to_the_rounding_of_fp32(scaling: Scaling) -> None:
    given, x = matrices(dtype=torch.float32), drawn(13, 32, dtype=torch.float32)
    found, expected = (
        results(function, x, given, scaling=scaling) for function in (lora_fp8_linears, lora_fp8_linears_reference)
    )
    for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("factor", [0.0, 8.0], ids=["unknown", "known"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
def test_scales_of_earlier_steps(factor: float, kernel: Any) -> None:
    """What is found is noted: of the input, and of the gradients of all outputs together."""
    given, x = matrices(dtype=torch.float32), drawn(13, 32, dtype=torch.float32)
    ours, theirs = delayed(factor), delayed(factor)
    found = results(lora_fp8_linears, x, given, scaling="tensorwise", kernel=kernel, delayed=ours)
    expected = results(lora_fp8_linears_reference, x, given, scaling="tensorwise", kernel=kernel, delayed=theirs)
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    for mine, other_state in zip(ours, theirs, strict=True):
        assert torch.equal(mine.state, other_state.state) and mine.state[LARGEST] > 0
        assert mine.state[FACTOR] == other_state.state[FACTOR]


def test_an_input_that_needs_no_gradient_gets_none_and_the_gradient_is_not_cast() -> None:
    given, x, pair = matrices(), drawn(13, 32, learns=False), delayed(1.0)
    _, grads = results(lora_fp8_linears, x, given, scaling="tensorwise", delayed=pair)
    _, expected = results(lora_fp8_linears_reference, x, given, scaling="tensorwise", delayed=delayed(1.0))
    assert len(grads) == len(expected) == 4 and x.grad is None
    for ours, theirs in zip(grads, expected, strict=True):
        assert float((ours - theirs).float().norm()) <= 4 * PLACE * float(theirs.float().norm())
    assert pair.input.state[LARGEST] > 0 and pair.gradient.state[LARGEST] == 0


def test_cached_weights_serve_alone() -> None:
    """Those that were given up are not read."""
    given, x = matrices(), drawn(4, 32)
    weights = [weight for weight in given["weights"] if weight is not None]
    cached = cast_weights(weights, "tensorwise")
    before = results(lora_fp8_linears, x, given, scaling="tensorwise", cached=cached)
    given["weights"] = [torch.full_like(weight, torch.nan) for weight in weights]
    after = results(lora_fp8_linears, x, given, scaling="tensorwise", cached=cached)
    assert all(
        torch.equal(one, other) for one, other in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True)
    )


def test_frozen_weights_get_no_gradient() -> None:
    given = matrices()
    outs = lora_fp8_linears(drawn(3, 32), *given.values(), 0.5, scaling="tensorwise")
    torch.stack([out.sum() for out in outs]).sum().backward()
    assert all(weight is not None and weight.grad is None for weight in given["weights"])
    assert all(matrix.grad is not None for matrix in learned_of(given))


def test_kept_for_backward_are_the_input_once_and_a_few_numbers_a_token() -> None:
    """Nothing in fp8 that has tokens."""
    given, x = matrices(), drawn(100, 32)
    kept: list[Tensor] = []
    cached = cast_weights([weight for weight in given["weights"] if weight is not None], "tensorwise")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outs = lora_fp8_linears(x, *given.values(), 0.7, scaling="tensorwise", cached=cached)
    by_token = {tensor.data_ptr(): (tuple(tensor.shape), tensor.dtype) for tensor in kept if 100 in tensor.shape}
    assert sorted(by_token.values(), key=str) == [((100, 32), torch.bfloat16), ((100, 8), torch.bfloat16)]
    assert x.data_ptr() in by_token
    assert len(outs) == 3


def test_without_gradients_it_computes_the_same() -> None:
    """By the tensors' own scales, whatever is known of earlier steps."""
    given, x, pair = matrices(), drawn(13, 32), delayed(0.25)
    expected, _ = results(lora_fp8_linears, x, given, scaling="tensorwise")
    with torch.no_grad():
        found = lora_fp8_linears(x, *given.values(), SCALE, scaling="tensorwise", delayed=pair)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert pair.input.state[LARGEST] == 0


def test_the_operators_say_what_they_give() -> None:
    given = matrices()
    x, down = drawn(4, 32, learns=False), drawn(8, 32, learns=False)
    ups = [None if up is None else up.detach() for up in given["ups"]]
    cached = cast_weights([weight for weight in given["weights"] if weight is not None], "tensorwise")
    values, one = x.to(E4M3), torch.ones(())
    sizes = [48, 16, 80]
    forward, backward = torch.ops.paceline.lora_fp8_forward.default, torch.ops.paceline.lora_fp8_backward.default
    # not test_schema: it compares inputs before and after, for which fp8 has no kernel on CPUs
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    library.opcheck(forward, (x, values, one, *cached.rows, down, ups, sizes, 0.5), test_utils=tests)
    grad, h = drawn(4, 144, learns=False), drawn(4, 8, learns=False)
    for operands in ((grad.to(torch.float8_e5m2), one, *cached.columns), (None,) * 4):
        library.opcheck(backward, (grad, *operands, x, h, down, ups, sizes, 0.5), test_utils=tests)


@pytest.mark.parametrize("scaled_by", ["own", "earlier"])
def test_a_compiled_function_computes_the_same(scaled_by: str) -> None:
    given = matrices(dtype=torch.float32)
    pair = delayed(1.0) if scaled_by == "earlier" else None
    cached = cast_weights([weight for weight in given["weights"] if weight is not None], "tensorwise")

    def outputs(x: Tensor) -> Tensor:
        options: dict[str, Any] = {"scaling": "tensorwise", "cached": cached, "delayed": pair}
        return torch.cat(lora_fp8_linears(x.relu(), *given.values(), 0.7, **options), dim=-1)

    x = drawn(4, 32, dtype=torch.float32)
    compiled = torch.compile(outputs, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), outputs(x))
    wanted = [x, *learned_of(given)]
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x).sin().sum(), wanted),
        torch.autograd.grad(outputs(x).sin().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 1003])
@pytest.mark.parametrize("scaled_by", ["own", "earlier"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_equals_products_of_their_own(tokens: int, scaled_by: str, compiled: bool) -> None:
    """Of three linears of one input with pairs, one larger than the others, also for rows that fill no tile."""
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")
    sizes, rank, width = (1024, 256, 256), 16, 512
    weights = [drawn(size, width, seed=size, learns=False).cuda() / 16 for size in sizes]
    pairs = [(drawn(rank, width, seed=4), drawn(size, rank, seed=5)) for size in sizes]
    given: Given = {
        "weights": weights,
        "biases": [None, None, None],
        "downs": [(down.detach().cuda() / 16).requires_grad_() for down, _ in pairs],
        "ups": [(up.detach().cuda() / 4).requires_grad_() for _, up in pairs],
    }
    x = drawn(tokens, width, learns=False).cuda().requires_grad_()
    grads = [drawn(tokens, size, seed=size, learns=False).cuda() for size in sizes]
    cached, found = cast_weights(weights, "tensorwise"), []
    for function in (torch.compile(lora_fp8_linears) if compiled else lora_fp8_linears, lora_fp8_linears_reference):
        pair = None
        if scaled_by == "earlier":
            known = torch.ones((), dtype=torch.bool)
            states = [torch.tensor([factor, 1 / factor, 0.0, 0.0], device="cuda") for factor in (32.0, 4096.0)]
            pair = DelayedPair(Delayed(states[0], known), Delayed(states[1], known))
        outs = function(x, *given.values(), SCALE, scaling="tensorwise", kernel="triton", cached=cached, delayed=pair)
        found.append([*outs, *torch.autograd.grad(outs, [x, *learned_of(given)], grads)])
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).float().norm()) <= 2 * PLACE * float(theirs.float().norm())
