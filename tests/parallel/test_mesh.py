"""The rank grid: coordinates, groups, folding of experts, two meshes in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.errors import ConfigError
from paceline.parallel.mesh import JOINED_AXES, ParallelMesh


def _sum_over(mesh: ParallelMesh, axis: str, rank: int) -> float:
    value = torch.tensor(float(2**rank))
    if mesh.size(axis) > 1:
        dist.all_reduce(value, group=mesh.group(axis))
    return value.item()


def _two_meshes(rank: int, world_size: int) -> dict[str, Any]:
    hsdp = ParallelMesh(ParallelConfig(dp_replicate=2), world_size=world_size, rank=rank, device_type="cpu")
    other = ParallelMesh(
        ParallelConfig(pp=2, tp=2, ep=2, order=("tp", "dp_shard", "cp", "dp_replicate", "pp")),
        world_size=world_size,
        rank=rank,
        device_type="cpu",
    )
    library = hsdp.device_mesh("dp_replicate", "dp_shard")
    return {
        "coordinate": hsdp.coordinate,
        "dp": (hsdp.dp_rank, hsdp.dp_size),
        "sums": {axis: _sum_over(hsdp, axis, rank) for axis in ("dp_replicate", "dp_shard", "dp", "tp")},
        "library": library.mesh.tolist(),
        "library_sum": _sum_library(library, rank),
        "other": {axis: other[axis].ranks for axis in ("tp", "pp", "dp", "ep", "edp")},
        "other_sum": _sum_over(other, "pp", rank),
        "joined": [_rank_in_group(other, axis) for axis in (*JOINED_AXES, "ends")],
        "places": other.places("cp_tp"),
        "alone": dist.get_world_size(other.group("cp")),
        "says": hsdp.describe(),
        "weights": (hsdp["dp_weights"].ranks, hsdp["dp_weights"].group is not hsdp["dp_shard"].group),
    }


def _rank_in_group(mesh: ParallelMesh, axis: str) -> bool:
    return mesh.size(axis) == 1 or dist.get_rank(mesh.group(axis)) == mesh[axis].index


def _sum_library(library: Any, rank: int) -> float:
    value = torch.tensor(float(2**rank))
    dist.all_reduce(value, group=library.get_group("dp_replicate"))
    return value.item()


def test_grid_of_four_ranks() -> None:
    results = run(_two_meshes, 4)
    for rank, found in enumerate(results):
        replicate, shard = divmod(rank, 2)
        assert found["coordinate"]["dp_replicate"] == replicate and found["coordinate"]["dp_shard"] == shard
        assert found["dp"] == (rank, 4)
        assert found["sums"] == {
            "dp_replicate": 2.0**shard + 2.0 ** (shard + 2),
            "dp_shard": 3.0 * 4.0**replicate,
            "dp": 15.0,
            "tp": 2.0**rank,
        }
        assert found["weights"] == ((2 * replicate, 2 * replicate + 1), True)
        assert found["library"] == [[0, 1], [2, 3]]
        assert found["library_sum"] == found["sums"]["dp_replicate"]
        tp, pp = divmod(rank, 2)
        assert found["other"] == {
            "tp": (pp, pp + 2),
            "pp": (2 * tp, 2 * tp + 1),
            "dp": (rank,),
            # a stage's two ranks differ in tp; its experts fold over them
            "ep": (pp, pp + 2),
            "edp": (rank,),
        }
        assert found["other_sum"] == 3.0 * 4.0**tp
        assert all(found["joined"]) and found["places"] == [{"tp": 0, "cp": 0}, {"tp": 1, "cp": 0}]
        assert found["alone"] == 1
        assert found["says"] == f"rank {rank} of 4 (dp_replicate {replicate}, dp_shard {shard})"


def test_one_rank_needs_no_process_group() -> None:
    mesh = ParallelMesh(ParallelConfig(), world_size=1, rank=0, device_type="cpu")
    assert mesh.dp_size == 1 and mesh["dp_shard"].group is None
    assert set(mesh.coordinate.values()) == {0}


def test_degrees_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not make the 4 ranks"):
        ParallelMesh(ParallelConfig(dp_replicate=3), world_size=4, rank=0, device_type="cpu")
    with pytest.raises(ConfigError, match="does not divide the 1 ranks"):
        ParallelMesh(ParallelConfig(ep=3), world_size=1, rank=0, device_type="cpu")
