"""Frozen linears with pairs as one operation: against their definition."""

from __future__ import annotations

import torch
from torch import Tensor, library
from torch.autograd import gradcheck

from paceline.kernels.lora import lora_linears, lora_linears_reference


def matrices(seed: int = 0, *, dtype: torch.dtype = torch.float64) -> dict[str, list[Tensor | None]]:
    """Three linears of one input: with bias and pair, without pair, with a pair of another rank."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int, learns: bool = False) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(learns)

    return {
        "weights": [made(6, 5), made(4, 5), made(7, 5)],
        "biases": [made(6), None, made(7)],
        "downs": [made(2, 5, learns=True), None, made(3, 5, learns=True)],
        "ups": [made(6, 2, learns=True), None, made(7, 3, learns=True)],
    }


def gradients_of(function: object, x: Tensor, given: dict[str, list[Tensor | None]]) -> list[Tensor]:
    outs = function(x, *given.values(), 0.7)  # type: ignore[operator]
    learned = [m for key in ("downs", "ups") for m in given[key] if m is not None]
    wanted = [*([x] if x.requires_grad else []), *learned]
    return [*outs, *torch.autograd.grad(sum(out.sin().sum() for out in outs), wanted)]


def test_equals_its_definition() -> None:
    given = matrices()
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    for ours, theirs in zip(
        gradients_of(lora_linears, x, given), gradients_of(lora_linears_reference, x, given), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    given = matrices()
    x = torch.randn(3, 5, dtype=torch.float64)
    found, expected = (gradients_of(function, x, given) for function in (lora_linears, lora_linears_reference))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert x.grad is None


def test_frozen_weights_get_no_gradient() -> None:
    given = matrices()
    outs = lora_linears(torch.randn(3, 5, dtype=torch.float64, requires_grad=True), *given.values(), 0.5)
    torch.stack([out.sum() for out in outs]).sum().backward()
    assert all(weight is not None and weight.grad is None for weight in given["weights"])


def test_gradients_are_those_of_finite_differences() -> None:
    given = matrices(3)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    learned = [m for key in ("downs", "ups") for m in given[key] if m is not None]

    def outputs(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return lora_linears(x, *given.values(), 0.7)

    assert gradcheck(outputs, (x, *learned))


def test_kept_for_backward_are_the_input_once_and_a_few_numbers_a_token() -> None:
    given = matrices()
    x = torch.randn(100, 5, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        lora_linears(x, *given.values(), 0.7)
    by_token = {tensor.data_ptr(): tuple(tensor.shape) for tensor in kept if tensor.shape[0] == 100}
    assert sorted(by_token.values()) == [(100, 5), (100, 5)]  # h has 2 + 3 columns


def test_the_operators_say_what_they_give() -> None:
    given = matrices(dtype=torch.float32)
    weights, biases, ups = given["weights"], given["biases"], [up.detach() for up in given["ups"] if up is not None]
    x, down = torch.randn(4, 5), torch.randn(5, 5)
    pairs = [ups[0], None, ups[1]]
    forward, backward = torch.ops.paceline.lora_forward.default, torch.ops.paceline.lora_backward.default
    library.opcheck(forward, (x, weights, biases, down, pairs, 0.5))
    grads = [torch.randn(4, 6), torch.randn(4, 4), torch.randn(4, 7)]
    for wants_x in (True, False):
        operands = (grads, x, torch.randn(4, 5), weights, down, pairs, 0.5, wants_x)
        library.opcheck(backward, operands)


def test_a_compiled_function_computes_the_same() -> None:
    given = matrices(dtype=torch.float32)

    def outputs(x: Tensor) -> Tensor:
        return torch.cat(lora_linears(x.relu(), *given.values(), 0.7), dim=-1)

    x = torch.randn(4, 5, requires_grad=True)
    compiled = torch.compile(outputs, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), outputs(x))
    down = given["downs"][0]
    assert down is not None
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x).sum(), [x, down]), torch.autograd.grad(outputs(x).sum(), [x, down]), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
