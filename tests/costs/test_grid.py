"""The grid is the mesh's."""

from __future__ import annotations

from typing import Any

import pytest

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.costs.grid import RankGrid, stride_of
from paceline.errors import ConfigError
from paceline.parallel.mesh import ParallelMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp")
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2, "ep": 2},
    {"tp": 2, "cp": 2, "dp_replicate": 2, "ep": 2, "etp": 2},
    {"tp": 2, "pp": 2, "etp": 2, "order": ("tp", "dp_shard", "pp", "cp", "dp_replicate")},
]


def _groups_of_rank(rank: int, world_size: int) -> list[dict[str, tuple[int, ...]]]:
    meshes = [
        ParallelMesh(ParallelConfig(**layout), world_size=world_size, rank=rank, device_type="cpu")
        for layout in LAYOUTS
    ]
    return [{axis: mesh[axis].ranks for axis in AXES} for mesh in meshes]


def test_groups_are_those_of_the_mesh() -> None:
    for rank, found in enumerate(run(_groups_of_rank, 8)):
        for layout, groups in zip(LAYOUTS, found, strict=True):
            grid = RankGrid(parallel=ParallelConfig(**layout), world_size=8)
            for axis, ranks in groups.items():
                assert ranks in grid.groups(axis), (layout, axis)
                assert ranks[grid.coordinates[rank][axis]] == rank


def test_nodes_that_groups_reach_over() -> None:
    grid = RankGrid(parallel=ParallelConfig(tp=8, pp=16), world_size=1024)
    assert grid.order.nodes_spanned("tp", 8) == 1 and grid.order.nodes_spanned("tp", 4) == 2
    assert grid.order.nodes_spanned("dp_shard", 8) == 8 and grid.order.nodes_spanned("pp", 8) == 16
    assert (
        stride_of((0, 64, 128)) == 64 == stride_of(range(0, 256, 64))
        and stride_of((0, 1, 8)) is None
        and stride_of((5,)) is None
    )


def test_experts_that_do_not_fold_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        RankGrid(parallel=ParallelConfig(pp=2, ep=3), world_size=8)
