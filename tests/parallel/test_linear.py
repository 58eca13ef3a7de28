"""Products with collectives: one process's gradients, with nothing gathered kept between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.collectives import Axis
from paceline.parallel.linear import column_products, row_product
from paceline.parallel.mesh import ParallelMesh

B, T, C, WIDTHS = 2, 8, 6, (4, 3)


def _axis(rank: int, size: int) -> Axis:
    return ParallelMesh(ParallelConfig(tp=size), world_size=size, rank=rank, device_type="cpu")["tp"]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _matrices(rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor | None]]:
    """Weights and biases of a rank; the second product has no bias."""
    weights = tuple(_random(width, C, seed=10 * rank + width).requires_grad_() for width in WIDTHS)
    return weights, (_random(WIDTHS[0], seed=rank + 5).requires_grad_(), None)


def _plain(size: int) -> tuple[Tensor, list[tuple[tuple[Tensor, ...], tuple[Tensor, Tensor | None]]], Tensor]:
    """The input, every rank's matrices, and a loss of all their products."""
    x = _random(B, T, C, seed=1).requires_grad_()
    of_ranks = [_matrices(rank) for rank in range(size)]
    loss = torch.zeros((), dtype=torch.float64)
    for rank, (weights, biases) in enumerate(of_ranks):
        loss = loss + _loss(tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)), rank)
    loss.backward()
    return x, of_ranks, loss


def _keeping(kept: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    return pack


def _loss(outputs: tuple[Tensor, ...], rank: int) -> Tensor:
    return torch.stack([(rank + 1) * output.sin().sum() for output in outputs]).sum()


def _columns(rank: int, size: int) -> None:
    axis = _axis(rank, size)
    x, of_ranks, _ = _plain(size)
    assert x.grad is not None
    for frozen in (False, True):
        part = x.detach().chunk(size, 1)[rank].clone().requires_grad_()
        weights, biases = _matrices(rank)
        weights[0].requires_grad_(not frozen)
        weights[1].requires_grad_(not frozen)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(_keeping(kept), lambda tensor: tensor):
            outputs = column_products(part, weights, biases, axis, "in", dim=1)
        assert max(tensor.numel() for tensor in kept) == max(part.numel(), *(w.numel() for w in weights))
        _loss(outputs, rank).backward()
        torch.testing.assert_close(part.grad, x.grad.chunk(size, 1)[rank], rtol=1e-12, atol=1e-12)
        for weight, expected in zip(weights, of_ranks[rank][0], strict=True):
            if frozen:
                assert weight.grad is None
            else:
                torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-12, atol=1e-12)
        assert biases[0] is not None and of_ranks[rank][1][0] is not None
        torch.testing.assert_close(biases[0].grad, of_ranks[rank][1][0].grad, rtol=1e-12, atol=1e-12)
        # frozen weights need no second gather
        taken = axis.traffic.take()
        assert (taken["in/all_gather"][0], taken["in/reduce_scatter"][0]) == (1 if frozen else 2, 1)


def test_column_products() -> None:
    run(_columns, 2)


class _Later(TorchFunctionMode):
    """What a zero-bubble schedule does: products for weights wait in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is column_products:
            options = options | {"postpone": lambda weight, product: self.waiting.append((weight, product))}
        return func(*args, **options)


def _postponed(rank: int, size: int) -> None:
    axis = _axis(rank, size)
    x, of_ranks, _ = _plain(size)
    assert x.grad is not None
    part = x.detach().chunk(size, 1)[rank].clone().requires_grad_()
    weights, biases = _matrices(rank)
    with _Later() as later:
        outputs = column_products(part, weights, biases, axis, "in", dim=1)
    _loss(outputs, rank).backward()
    torch.testing.assert_close(part.grad, x.grad.chunk(size, 1)[rank], rtol=1e-12, atol=1e-12)
    assert all(weight.grad is None for weight in weights) and len(later.waiting) == 2
    axis.traffic.take()
    for (weight, product), own, expected in zip(later.waiting, weights, of_ranks[rank][0], strict=True):
        assert weight is own
        torch.testing.assert_close(product(), expected.grad, rtol=1e-12, atol=1e-12)
    assert not axis.traffic.take(), "a postponed product waits for no other rank"


def test_products_for_weights_can_be_postponed() -> None:
    run(_postponed, 2)


def _row(rank: int, size: int) -> None:
    axis = _axis(rank, size)
    parts = [_random(B, T, 4, seed=r).requires_grad_() for r in range(size)]
    weights = [_random(C, 4, seed=50 + r).requires_grad_() for r in range(size)]
    bias = _random(C, seed=3).requires_grad_()
    expected = sum(F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)) + bias
    assert isinstance(expected, Tensor)
    grad = _random(B, T, C, seed=9)
    expected.backward(grad)

    part, weight = parts[rank].detach().clone().requires_grad_(), weights[rank].detach().clone().requires_grad_()
    own_bias = bias.detach().clone().requires_grad_()
    found = row_product(part, weight, own_bias, axis, "out", dim=1)
    torch.testing.assert_close(found, expected.chunk(size, 1)[rank], rtol=1e-12, atol=1e-12)
    found.backward(grad.chunk(size, 1)[rank])
    torch.testing.assert_close(part.grad, parts[rank].grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight.grad, weights[rank].grad, rtol=1e-12, atol=1e-12)
    # of this rank's tokens only
    torch.testing.assert_close(own_bias.grad, grad.chunk(size, 1)[rank].sum((0, 1)), rtol=1e-12, atol=1e-12)


def test_row_product() -> None:
    run(_row, 4)
