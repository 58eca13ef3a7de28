"""Named collectives are counted, and cost nothing where a rank is alone."""

from __future__ import annotations

from typing import Any

import torch

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.collectives import Axis, all_gather, all_reduce, all_reduce_number, broadcast, reduce_scatter
from paceline.parallel.mesh import ParallelMesh


def _all(rank: int, world_size: int) -> dict[str, Any]:
    mesh = ParallelMesh(ParallelConfig(), world_size=world_size, rank=rank, device_type="cpu")
    axis = mesh["dp"]
    tensor = torch.arange(4.0) + rank
    shard, gathered, sent = torch.empty(2), torch.empty(4), torch.full((3,), float(rank))
    reduce_scatter(shard, tensor, axis, "a/reduce_scatter", async_op=True).wait()
    all_gather(gathered, shard, axis, "a/all_gather")
    in_place = torch.full((4,), -1.0)
    in_place[2 * rank : 2 * rank + 2] = shard
    all_gather(in_place, in_place[2 * rank : 2 * rank + 2], axis, "a/all_gather", async_op=True).wait()
    all_reduce(tensor, axis, "a/all_reduce")
    broadcast(sent, axis, "a/broadcast", source=1)
    number = all_reduce_number(rank + 0.5, axis, "a/number", torch.device("cpu"))
    return {
        "shard": shard.tolist(),
        "gathered": gathered.tolist(),
        "in_place": in_place.tolist(),
        "reduced": tensor.tolist(),
        "sent": sent.tolist(),
        "number": number,
        "traffic": mesh.traffic.take(),
        "after": mesh.traffic.take(),
    }


def test_two_ranks() -> None:
    results = run(_all, 2)
    total = [1.0, 3.0, 5.0, 7.0]
    for rank, found in enumerate(results):
        assert found["shard"] == total[2 * rank : 2 * rank + 2]
        assert found["gathered"] == found["in_place"] == found["reduced"] == total
        assert found["sent"] == [1.0] * 3 and found["number"] == 2.0
        assert found["traffic"] == {
            "a/reduce_scatter": (1, 16),
            "a/all_gather": (2, 32),
            "a/all_reduce": (1, 16),
            "a/broadcast": (1, 12),
            "a/number": (1, 8),
        }
        assert found["after"] == {}


def test_alone() -> None:
    axis, tensor, output = Axis.alone("dp"), torch.arange(3.0), torch.zeros(3)
    reduce_scatter(output, tensor, axis, "x")
    all_reduce(output, axis, "x")
    broadcast(output, axis, "x")
    assert output.tolist() == [0.0, 1.0, 2.0] and not axis.traffic.calls
