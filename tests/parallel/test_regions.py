"""Each collective of the forward pass does what its table says, in both directions, along every dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.collectives import Axis
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.regions import (
    gather_replicated,
    gather_sequence,
    own_part,
    scatter_sum,
    share,
    sum_replicated,
)

SHAPE = (4, 8, 12)


def _of_rank(rank: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def _cut(dim: int, size: int) -> tuple[int, ...]:
    return tuple(length // size if index == dim else length for index, length in enumerate(SHAPE))


def _through(function: Any, x: Tensor, grad: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x, *args, **options)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad


def _check(rank: int, size: int) -> dict[str, tuple[int, int]]:
    mesh = ParallelMesh(ParallelConfig(tp=size), world_size=size, rank=rank, device_type="cpu")
    axis = mesh["tp"]
    ranks = range(size)
    grads = [_of_rank(r, SHAPE, seed=1) for r in ranks]
    whole = torch.stack([_of_rank(r, SHAPE) for r in ranks])
    for dim in (0, 1, 2, -1):
        positive = dim % 3
        parts = [_of_rank(r, _cut(positive, size)) for r in ranks]
        grad_parts = [_of_rank(r, _cut(positive, size), seed=1) for r in ranks]

        y, grad = _through(gather_sequence, parts[rank], grads[rank], axis, "gather", dim=dim)
        torch.testing.assert_close(y, torch.cat(parts, dim), rtol=0, atol=0)
        torch.testing.assert_close(grad, torch.stack(grads).sum(0).chunk(size, dim)[rank], rtol=1e-12, atol=1e-12)

        y, grad = _through(scatter_sum, whole[rank], grad_parts[rank], axis, "scatter", dim=dim)
        torch.testing.assert_close(y, whole.sum(0).chunk(size, dim)[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, torch.cat(grad_parts, dim), rtol=0, atol=0)

        y, grad = _through(gather_replicated, parts[rank], grads[0], axis, "replicated", dim=dim)
        torch.testing.assert_close(y, torch.cat(parts, dim), rtol=0, atol=0)
        torch.testing.assert_close(grad, grads[0].chunk(size, dim)[rank], rtol=0, atol=0)

        torch.testing.assert_close(own_part(whole[0], axis, dim=dim), whole[0].chunk(size, dim)[rank], rtol=0, atol=0)

    y, grad = _through(sum_replicated, whole[rank], grads[0], axis, "sum")
    torch.testing.assert_close(y, whole.sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, grads[0], rtol=0, atol=0)

    y, grad = _through(share, whole[0], grads[rank], axis, "share")
    torch.testing.assert_close(y, whole[0], rtol=0, atol=0)
    torch.testing.assert_close(grad, torch.stack(grads).sum(0), rtol=1e-12, atol=1e-12)
    dist.barrier()
    return mesh.traffic.take()


@pytest.mark.parametrize("size", [2, 4])
def test_values_gradients_and_traffic(size: int) -> None:
    num_bytes = 8 * 4 * 8 * 12
    for traffic in run(_check, size):
        assert traffic == {
            "gather/all_gather": (4, 4 * num_bytes),
            "gather/reduce_scatter": (4, 4 * num_bytes),
            "scatter/reduce_scatter": (4, 4 * num_bytes),
            "scatter/all_gather": (4, 4 * num_bytes),
            "replicated/all_gather": (4, 4 * num_bytes),
            "sum/all_reduce": (1, num_bytes),
            "share/all_reduce": (1, num_bytes),
        }


def test_alone_nothing_happens() -> None:
    axis = Axis.alone("tp")
    x = _of_rank(0, SHAPE)
    for dim in (0, 1):
        for function in (gather_sequence, scatter_sum, gather_replicated):
            assert function(x, axis, "alone", dim=dim) is x
    assert sum_replicated(x, axis, "alone") is share(x, axis, "alone") is x
    assert not axis.traffic.calls


def _traced(rank: int, size: int) -> None:
    axis = ParallelMesh(ParallelConfig(tp=size), world_size=size, rank=rank, device_type="cpu")["tp"]

    def compute(x: Tensor) -> Tensor:
        y = share(gather_sequence(x, axis, "in", dim=1), axis, "share").square() * (rank + 1)
        z = gather_replicated(scatter_sum(y, axis, "out", dim=1), axis, "all", dim=0)
        return sum_replicated(z, axis, "sum").sin()

    torch._dynamo.reset()
    x, grad = _of_rank(rank, (2, 4)), _of_rank(9, (2 * size, 4))
    expected = _through(compute, x, grad)
    found = _through(torch.compile(compute, backend="aot_eager", fullgraph=True), x, grad)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_all_of_them_compile_into_one_graph() -> None:
    run(_traced, 2)
