"""Which ranks does this rank work with, along each axis of parallelism?

One grid of ranks, two views of it:

    dense    pp, dp_replicate, dp_shard, cp, tp     in the order of `parallel.order`
    expert   pp, edp, ep, etp                       the same ranks of a pipeline stage, folded differently

and joined axes:

    dp             dp_replicate x dp_shard    ranks that read different data
    dp_cp          dp x cp                    ranks that have different labels
    dp_shard_cp    dp_shard x cp              ranks that share the optimizer state of dense parameters
    cp_tp          cp x tp                    ranks that hold parts of the same sequences
    stage          all but pp                 ranks of one pipeline stage
    ends           first and last of pp       ranks that hold the embedding, if both ends need it
    world          everything

Example: 8 ranks with dp_replicate 2, dp_shard 2, tp 2 and ep 4: rank 5 has coordinate dp_replicate 1, dp_shard 0, tp 1,
and edp 1, ep 1.

A mesh is an object, never a global: two meshes in one process work.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.config.parallel import ParallelConfig
from paceline.errors import ConfigError
from paceline.parallel.collectives import Axis, Traffic

EXPERT_AXES = ("edp", "ep", "etp")
JOINED_AXES: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "cp_tp": ("cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}
"""Their ranks, as those of every axis, are in ascending order: an index on one is the rank in its group."""
WEIGHTS_AXES = {"dp_weights": "dp_shard_cp", "edp_weights": "edp"}
"""The ranks of another axis again, on a communicator of its own: new weights are gathered while the next forward runs,
and a small sum must not queue up behind them."""


class ParallelMesh:
    """The grid as one rank sees it. Making one is collective: every rank of the world must, with the same arguments.

    Args:
        config: the `[parallel]` section; only its degrees and `order` are read.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: the degrees do not make the world size.
    """

    def __init__(self, config: ParallelConfig, *, world_size: int, rank: int, device_type: str) -> None:
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        self.world_size, self.rank, self.device_type = world_size, rank, device_type
        self.traffic = Traffic()
        self._order = config.order
        self._grids = _dense_grids(config, world_size, self._order) | _expert_grids(config, world_size, self._order)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._axes = {name: self._axis(name, grid) for name, grid in self._grids.items()}
        for name, like in WEIGHTS_AXES.items():
            self._axes[name] = self._own_communicator(name, like, needed=config.zero == 1)

    def __getitem__(self, axis: str) -> Axis:
        """The ranks that differ from this one along ``axis`` only, with the means to talk to them."""
        return self._axes[axis]

    def size(self, axis: str) -> int:
        return self._axes[axis].size

    def runs(self, axis: str, size: int) -> Axis:
        """The run of ``size`` neighbouring ranks of ``axis`` that this rank is in. Collective, as making a mesh is.

        Of tp 4 with size 2: ranks 0 and 1, and ranks 2 and 3.
        """
        grid = self._grids[axis]
        assert grid.shape[1] % size == 0, f"runs of {size} in {axis} of {grid.shape[1]}"
        return self._axis(f"{axis}_runs", grid.reshape(-1, size))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of ``axis``. Of an axis of size 1 it is made on first use: nothing ever talks over it."""
        found = self._axes[axis].group
        if found is not None:
            return found
        own = (self.rank,)
        if own not in self._groups:
            alone = self.world_size == 1
            self._groups[own] = _world() if alone else dist.new_group(list(own), use_local_synchronization=True)
        return self._groups[own]

    @property
    def coordinate(self) -> dict[str, int]:
        """Index of this rank along each dense axis, in `parallel.order`, and each expert axis."""
        return {name: self._axes[name].index for name in (*self._order, *EXPERT_AXES)}

    @property
    def dp_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self._axes["dp"].index

    @property
    def dp_size(self) -> int:
        return self._axes["dp"].size

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """This rank's part of the grid along ``axes`` as the library's object, on the same process groups.

        Several axes must be dense ones, or joined of dense ones; an expert axis stands alone.
        """
        if len(axes) == 1:
            return DeviceMesh.from_group(self.group(axes[0]), self.device_type, mesh_dim_names=axes)
        lines = self._grids_along(axes)
        return DeviceMesh.from_group(
            [self.group(axis) for axis in axes], self.device_type, mesh=lines, mesh_dim_names=axes
        )

    def places(self, axis: str) -> list[dict[str, int]]:
        """For each rank of a joined axis, in order, its index along the axes that it is joined of."""
        parts = _parts(axis, self._order)
        numbers = itertools.product(*(range(self.size(part)) for part in parts))
        return [dict(zip(parts, each, strict=True)) for each in numbers]

    def describe(self) -> str:
        """For messages: ``rank 5 of 8 (dp_replicate 1, dp_shard 0, tp 1)``; axes of size 1 are left out."""
        places = ", ".join(f"{axis} {self._axes[axis].index}" for axis in self._order if self.size(axis) > 1)
        return f"rank {self.rank} of {self.world_size}" + (f" ({places})" if places else "")

    def _grids_along(self, axes: tuple[str, ...]) -> torch.Tensor:
        """Ranks that agree with this one on every other axis: a tensor with one dim for each of ``axes``."""
        parts = [_parts(axis, self._order) for axis in axes]
        inside = [part for names in parts for part in names]
        assert all(part in self._order for part in inside), axes
        grid = torch.arange(self.world_size).view([self.size(axis) for axis in self._order])
        index = tuple(slice(None) if axis in inside else self._axes[axis].index for axis in self._order)
        kept = [axis for axis in self._order if axis in inside]
        lines = grid[index].permute([kept.index(part) for part in inside])
        return lines.reshape([self.size(axis) for axis in axes]).contiguous()

    def _axis(self, name: str, lines: torch.Tensor) -> Axis:
        """``lines``: [number of groups, size], a rank at most once; one that is in none is alone."""
        own: tuple[int, ...] = (self.rank,)
        group: dist.ProcessGroup | None = None
        for line in lines.tolist():
            ranks = tuple(line)
            if len(ranks) > 1 and ranks not in self._groups:
                # every rank makes every group, in the same order, also those it is not in: torch asks for it
                whole = ranks == tuple(range(self.world_size))
                self._groups[ranks] = _world() if whole else dist.new_group(list(ranks))
            if self.rank in ranks:
                own, group = ranks, self._groups.get(ranks)
        return Axis(name=name, ranks=own, index=own.index(self.rank), group=group, traffic=self.traffic)

    def _own_communicator(self, name: str, like: str, *, needed: bool) -> Axis:
        axis = self._axes[like]
        if axis.group is None or not needed:
            return Axis(name=name, ranks=axis.ranks, index=axis.index, group=axis.group, traffic=self.traffic)
        groups = {tuple(line): dist.new_group(line) for line in self._grids[like].tolist()}
        return Axis(name=name, ranks=axis.ranks, index=axis.index, group=groups[axis.ranks], traffic=self.traffic)


def _dense_grids(config: ParallelConfig, world_size: int, order: tuple[str, ...]) -> dict[str, torch.Tensor]:
    grid = _dense_grid(config, world_size, order)
    grids = {axis: _lines(grid, [order.index(axis)]) for axis in order}
    grids |= {name: _lines(grid, [order.index(part) for part in _parts(name, order)]) for name in JOINED_AXES}
    grids["world"] = torch.arange(world_size).view(1, world_size)
    grids["ends"] = _ends(grids["pp"])
    return grids


def _parts(axis: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """The dense axes that an axis is joined of, outermost first."""
    return tuple(sorted(JOINED_AXES.get(axis, (axis,)), key=order.index))


def _ends(pipelines: torch.Tensor) -> torch.Tensor:
    """[pipelines, 2]: first and last rank of each; with one or two stages the pipelines themselves.

    Only those ranks are in it: for those between them `_axis` makes an axis of one.
    """
    return pipelines[:, [0, -1]] if pipelines.shape[1] > 1 else pipelines


def _dense_grid(config: ParallelConfig, world_size: int, order: tuple[str, ...]) -> torch.Tensor:
    degrees = {
        "pp": config.pp,
        "dp_replicate": config.dp_replicate,
        "dp_shard": config.shard_degree(world_size),
        "cp": config.cp,
        "tp": config.tp,
    }
    return torch.arange(world_size).view(tuple(degrees[axis] for axis in order))


def _expert_grids(config: ParallelConfig, world_size: int, order: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Ranks of a pipeline stage, in the dense order, as edp x ep x etp: experts fold over whatever lies there."""
    ranks_of_stage = world_size // config.pp
    experts = config.ep * config.etp
    if ranks_of_stage % experts:
        raise ConfigError(
            f"parallel.ep * parallel.etp = {experts} does not divide the {ranks_of_stage} ranks of a pipeline stage",
            evidence=f"{world_size} ranks / pp {config.pp}.",
            next_step=f"Choose ep and etp so that their product divides {ranks_of_stage}.",
        )
    stages_first = _dense_grid(config, world_size, order).movedim(order.index("pp"), 0)
    grid = stages_first.reshape(config.pp, ranks_of_stage // experts, config.ep, config.etp)
    return {axis: _lines(grid, [position]) for position, axis in enumerate(EXPERT_AXES, start=1)}


def _lines(grid: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """[number of groups, size]: the ranks that differ along ``dims`` only."""
    others = [dim for dim in range(grid.dim()) if dim not in dims]
    size = 1
    for dim in dims:
        size *= grid.shape[dim]
    return grid.permute([*others, *dims]).reshape(-1, size)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group is not there"
    return world
