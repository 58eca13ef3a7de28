"""Rows sent in uneven numbers, none at all among them, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.collectives import Axis
from paceline.parallel.expert.exchange import all_to_all_rows, gather_rows, reduce_scatter_rows
from paceline.parallel.mesh import ParallelMesh

SENT = [[[0, 3], [2, 0]], [[0, 0], [4, 1]], [[0, 0], [0, 0]]]
"""Rows from each rank to each."""


def rows(rank: int, count: int, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


def own_axis(rank: int, world_size: int) -> Axis:
    return ParallelMesh(ParallelConfig(ep=world_size), world_size=world_size, rank=rank, device_type="cpu")["ep"]


def test_rows_arrive_and_gradients_go_back() -> None:
    run(_check_all_to_all, 2)


def _check_all_to_all(rank: int, world_size: int) -> None:
    axis = own_axis(rank, world_size)
    for sent in SENT:
        mine = rows(rank, sum(sent[rank])).requires_grad_()
        weights = mine.detach()[:, 0].float().requires_grad_()
        names = ("ep/dispatch/all_to_all", "ep/weights/all_to_all")
        received = [sent[source][rank] for source in range(world_size)]
        came, came_weights = all_to_all_rows((mine, weights), axis, names, sent=sent[rank], received=received)
        expected = torch.cat(
            [rows(source, sum(sent[source])).split(sent[source])[rank] for source in range(world_size)]
        )
        assert torch.equal(came, expected) and torch.equal(came_weights, expected[:, 0].float())
        (came.square().sum() + came_weights.sum()).backward()
        assert torch.equal(mine.grad, 2 * mine) and torch.equal(weights.grad, torch.ones_like(weights))
    assert axis.traffic.calls["ep/dispatch/all_to_all"] == 2 * len(SENT)
    assert axis.traffic.bytes["ep/dispatch/all_to_all"] == 3 * 8 * sum(
        sum(sent[rank]) + sum(row[rank] for row in sent) for sent in SENT
    )


def test_gathering_and_reducing_uneven_rows() -> None:
    run(_check_gather_and_reduce, 4)


def _check_gather_and_reduce(rank: int, world_size: int) -> None:
    axis = own_axis(rank, world_size)
    for sizes in ([2, 0, 5, 1], [0, 0, 0, 0]):
        total = sum(sizes)
        mine = rows(rank, sizes[rank]).requires_grad_()
        (whole,) = gather_rows((mine,), axis, ("etp/dispatch/all_gather",), sizes=sizes)
        assert torch.equal(whole, torch.cat([rows(source, sizes[source]) for source in range(world_size)]))
        (whole * (rank + 1)).sum().backward()
        assert torch.equal(mine.grad, torch.full_like(mine, 10.0))

        parts = [rows(source, total) for source in range(world_size)]
        part = parts[rank].requires_grad_()
        own = reduce_scatter_rows(part, axis, "etp/combine/reduce_scatter", sizes=sizes)
        torch.testing.assert_close(own, torch.stack(parts).sum(0).split(sizes)[rank], rtol=1e-14, atol=1e-14)
        (own * (rank + 1)).sum().backward()
        expected = torch.cat([torch.full((size, 3), float(index + 1)) for index, size in enumerate(sizes)])
        assert torch.equal(part.grad, expected.double())
