"""A gated MLP of frozen fp8 weights with pairs as one operation: against two layers with the activation between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.fp8 import CachedWeight, cast_weights, fp8_linears
from paceline.kernels.fp8_delayed import LARGEST, Delayed, DelayedPair
from paceline.kernels.fp8_gated import gated_backward_reference, gated_reference
from paceline.kernels.lora_fp8 import lora_fp8_linears
from paceline.kernels.lora_fp8_mlp import Pair, lora_fp8_gated_mlp

SCALE, HIDDEN, WIDTH = 1.7, 32, 48
ALL, NONE = (True, True, True), (False, False, False)
SOME = (ALL, (True, False, True), (False, True, False), (False, False, True), NONE)
"""Of gate, up and down: which have a pair."""


class Given:
    """Frozen weights, pairs of different ranks, and an input."""

    def __init__(self, shape: tuple[int, ...] = (2, 13), dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*size: int, scale: float = 0.3) -> Tensor:
            return (torch.randn(size, generator=generator) * scale).to(dtype)

        self.first, self.down = [draw(WIDTH, HIDDEN), draw(WIDTH, HIDDEN)], draw(HIDDEN, WIDTH)
        sizes = ((3, HIDDEN, WIDTH), (4, HIDDEN, WIDTH), (5, WIDTH, HIDDEN))
        self._pairs = [(draw(rank, into), draw(out, rank)) for rank, into, out in sizes]
        for pair in self._pairs:
            for matrix in pair:
                matrix.requires_grad_()
        self.x = draw(*shape, HIDDEN, scale=1.0).requires_grad_()

    def pairs(self, which: tuple[bool, ...]) -> list[Pair]:
        return [pair if has else None for pair, has in zip(self._pairs, which, strict=True)]

    def cached(self) -> dict[str, CachedWeight]:
        return {
            "cached_first": cast_weights(self.first, "tensorwise"),
            "cached_down": cast_weights([self.down], "tensorwise"),
        }


class _Activation(torch.autograd.Function):
    """Rounded once, as the compiler does it."""

    @staticmethod
    def forward(ctx: Any, function: str, gate: Tensor, up: Tensor) -> Tensor:
        joined = torch.cat((gate, up), dim=-1).flatten(0, -2)
        ctx.function = function
        ctx.save_for_backward(joined)
        return gated_reference(joined, function).to(gate.dtype).view_as(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (joined,) = ctx.saved_tensors
        both = gated_backward_reference(joined, grads[0].flatten(0, -2), ctx.function).to(joined.dtype)
        return None, *(part.reshape(grads[0].shape) for part in both.chunk(2, dim=1))


def _linears(x: Tensor, weights: list[Tensor], pairs: list[Pair], **options: Any) -> tuple[Tensor, ...]:
    biases = [None] * len(weights)
    if all(pair is None for pair in pairs):
        return fp8_linears(x, weights, biases, **options)
    downs, ups = ([None if pair is None else pair[side] for pair in pairs] for side in (0, 1))
    return lora_fp8_linears(x, weights, biases, downs, ups, SCALE, **options)


def apart(
    x: Tensor,
    first: list[Tensor],
    down: Tensor,
    pairs: list[Pair],
    *,
    function: str = "silu",
    by_torch: bool = False,
    **given: Any,
) -> Tensor:
    """``by_torch``: with `F.silu`, which rounds on the way."""
    fixed: dict[str, Any] = {"scaling": "tensorwise", "kernel": "triton"}
    one, two = (
        {"cached": given.get(f"cached_{name}"), "delayed": given.get(f"delayed_{name}")} for name in ("first", "down")
    )
    gate, up = _linears(x, first, pairs[:2], **fixed, **one)
    hidden: Tensor = F.silu(gate) * up if by_torch else _Activation.apply(function, gate, up)
    return _linears(hidden, [down], pairs[2:], **fixed, **two)[0]


def whole(
    x: Tensor, first: list[Tensor], down: Tensor, pairs: list[Pair], *, function: str = "silu", **given: Any
) -> Tensor:
    return lora_fp8_gated_mlp(x, first, down, pairs, SCALE, function=function, **given)


def results(call: Any, given: Given, which: tuple[bool, ...], **options: Any) -> list[Tensor]:
    """The output, and gradients of the input, if it learns, and of the pairs."""
    pairs = given.pairs(which)
    out = call(given.x, given.first, given.down, pairs, **options)
    learned = [matrix for pair in pairs if pair is not None for matrix in pair]
    wanted = [*([given.x] if given.x.requires_grad else []), *learned]
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, wanted, gradient)]


def states(factor: float) -> dict[str, DelayedPair]:
    """``factor`` 0: nothing is known."""

    def one(factor: float) -> Delayed:
        state = torch.tensor([factor, 1 / factor if factor else torch.inf, 0.0, 0.0])
        return Delayed(state, torch.tensor(bool(factor)))

    return {f"delayed_{name}": DelayedPair(one(factor), one(4 * factor)) for name in ("first", "down")}


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("which", SOME)
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_equals_two_layers_bit_for_bit(which: tuple[bool, ...], is_cached: bool, function: str) -> None:
    given = Given()
    options = {"function": function} | (given.cached() if is_cached else {})
    assert_same(results(whole, given, which, **options), results(apart, given, which, **options))


@pytest.mark.parametrize("which", SOME)
def test_equals_what_torch_makes_of_it_to_the_rounding_of_fp32(which: tuple[bool, ...]) -> None:
    """In bf16 one of `F.silu`'s additional roundings moves a number to another of fp8, a quarter away in e5m2."""
    given = Given((2, 40), torch.float32)
    expected = results(apart, given, which, by_torch=True)
    for one, other in zip(results(whole, given, which), expected, strict=True):
        assert float((one - other).norm()) <= 1e-3 * float(other.norm())


@pytest.mark.parametrize("which", SOME)
@pytest.mark.parametrize("factor", [0.0, 8.0], ids=["unknown", "known"])
def test_scales_of_earlier_steps(which: tuple[bool, ...], factor: float) -> None:
    """All four tensors are seen, and noted as by the two layers."""
    given, ours, theirs = Given(), states(factor), states(factor)
    assert_same(results(whole, given, which, **ours), results(apart, given, which, **theirs))
    for name, pair in ours.items():
        for mine, other in zip(pair, theirs[name], strict=True):
            assert torch.equal(mine.state, other.state) and mine.state[LARGEST] > 0


@pytest.mark.parametrize("which", [ALL, (False, True, False)])
def test_an_input_that_needs_no_gradient_gets_none_and_the_gradient_is_not_cast(which: tuple[bool, ...]) -> None:
    given, ours = Given(), states(1.0)
    given.x.requires_grad_(False)
    assert_same(results(whole, given, which, **ours), results(apart, given, which, **states(1.0)))
    assert ours["delayed_first"].gradient.state[LARGEST] == 0 and ours["delayed_down"].gradient.state[LARGEST] > 0


def test_frozen_weights_are_not_read_where_they_are_cached_and_get_no_gradient() -> None:
    given = Given()
    options = given.cached()
    expected = results(whole, given, ALL, **options)
    given.first, given.down = [torch.full_like(each, torch.nan) for each in given.first], given.down * torch.nan
    assert_same(results(whole, given, ALL, **options), expected)
    whole(given.x, given.first, given.down, given.pairs(ALL), **options).sum().backward()
    assert all(each.grad is None for each in (*given.first, given.down)) and given.x.grad is not None


def test_without_gradients_it_computes_the_same() -> None:
    """By the tensors' own scales, whatever is known of earlier steps."""
    given, known = Given(), states(0.25)
    with torch.no_grad():
        found = whole(given.x, given.first, given.down, given.pairs(ALL), **known)
    assert torch.equal(found, results(whole, given, ALL)[0])
    assert all(each.state[LARGEST] == 0 for pair in known.values() for each in pair)


@pytest.mark.parametrize("compiled", [False, True])
def test_kept_for_backward_are_input_and_joined_outputs(compiled: bool) -> None:
    """Nothing else of the MLP's width, whatever the compiler would rather store."""
    torch._dynamo.reset()
    given, kept = Given((100,)), []
    call = torch.compile(whole, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else whole

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(given.x, given.first, given.down, given.pairs(ALL), **given.cached())
    by_token = [(tuple(tensor.shape), tensor.dtype) for tensor in kept if 100 in tensor.shape]
    expected = [(100, HIDDEN), (100, 2 * WIDTH), (100, 7), (100, 5)]
    assert sorted(by_token, key=str) == sorted([(shape, torch.bfloat16) for shape in expected], key=str)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(poison: float) -> None:
    given = Given()
    with torch.no_grad():
        given.x.view(-1)[3] = poison
    out, *grads = results(whole, given, ALL)
    assert not out.isfinite().any() and not any(grad.isfinite().any() for grad in grads[:1])


@pytest.mark.parametrize("which", SOME)
@pytest.mark.parametrize("scaled_by", ["own", "earlier"])
def test_a_compiled_function_computes_the_same(which: tuple[bool, ...], scaled_by: str) -> None:
    torch._dynamo.reset()
    given = Given()
    options: dict[str, Any] = given.cached() | (states(1.0) if scaled_by == "earlier" else {})
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, given, which, **options), results(whole, given, which, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1024, 1003])
@pytest.mark.parametrize("which", [ALL, (False, True, False), NONE])
@pytest.mark.parametrize("scaled_by", ["own", "earlier"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_equals_two_layers(tokens: int, which: tuple[bool, ...], scaled_by: str, compiled: bool) -> None:
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")
    from paceline.kernels import gated

    assert gated._kernels_are_right(torch.device("cuda", torch.cuda.current_device()))
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float) -> Tensor:
        return (torch.randn(size, generator=generator) * scale).bfloat16().cuda()

    given = Given()
    hidden, width, rank = 512, 1408, 16
    given.first, given.down = [draw(width, hidden, scale=0.05) for _ in range(2)], draw(hidden, width, scale=0.03)
    sizes = ((hidden, width), (hidden, width), (width, hidden))
    given._pairs = [
        (draw(rank, into, scale=0.05).requires_grad_(), draw(out, rank, scale=0.05).requires_grad_())
        for into, out in sizes
    ]
    given.x = draw(tokens, hidden, scale=1.0).requires_grad_()
    found = []
    for call in (torch.compile(whole, fullgraph=True) if compiled else whole, apart):
        options: dict[str, Any] = given.cached()
        if scaled_by == "earlier":
            for name, pair in states(16.0).items():
                options[name] = DelayedPair(*(Delayed(each.state.cuda(), each.known) for each in pair))
        found.append(results(call, given, which, **options))
    for one, other in zip(*found, strict=True):
        # exponentials that differ in the last place round a bf16, and with it an fp8 number, the other way now and then
        assert float((one - other).float().norm()) <= 1e-2 * float(other.float().norm())
