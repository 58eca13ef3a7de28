"""Over which ranks is the state of a parameter cut, and over which is its gradient summed?

| | state cut over (zero >= 1) | gradient summed over |
| --- | --- | --- |
| dense | dp_shard x cp | that, dp_replicate, and the axes of `Shard.replicas` |
| expert | edp | that, and the axes of `Shard.replicas` |

With zero 0 nothing is cut, and the sums are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.parallel.collectives import Axis
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.shards import Shard


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The axes of one kind of parameter."""

    shard_axis: Axis
    """Its state is cut over these ranks; alone if it is not cut."""
    weights_axis: Axis
    """The same ranks, on the communicator for new weights."""
    replicate_axes: tuple[Axis, ...]
    """Ranks with the same part of the state, the data-parallel ones first; axes of size 1 are left out."""
    whole_axis: Axis
    """See `MainParameter.shard_axis`."""

    @property
    def first(self) -> bool:
        """This rank is the first of those with the same part."""
        return all(axis.index == 0 for axis in self.replicate_axes)


def spread_of(shard: Shard, mesh: ParallelMesh, *, sharded: bool) -> Spread:
    """The axes of a parameter; ``sharded``: its state is cut (zero 1 and up)."""
    data: tuple[Axis, ...]
    if sharded and shard.expert:
        axis, weights, data = mesh["edp"], mesh["edp_weights"], ()
    elif sharded:
        axis, weights, data = mesh["dp_shard_cp"], mesh["dp_weights"], (mesh["dp_replicate"],)
    else:
        axis = weights = Axis.alone("edp" if shard.expert else "dp", mesh.rank)
        data = (mesh["edp"] if shard.expert else mesh["dp_cp"],)
    # reduce-scatter and all-gather go by the order of a group's ranks, which is ascending
    assert list(axis.ranks) == sorted(axis.ranks), f"{axis.name}: {axis.ranks}"
    return Spread(
        shard_axis=axis,
        weights_axis=weights,
        replicate_axes=tuple(axis for axis in (*data, *shard.replicas) if axis.size > 1),
        whole_axis=mesh["edp"] if shard.expert else mesh["dp_shard_cp"],
    )


def same_everywhere(mesh: ParallelMesh, spreads: Iterable[Spread]) -> bool:
    """Every rank holds all of the model's state. All ranks find the same."""
    model_axes = ("pp", "tp", "ep", "etp")
    return all(mesh.size(axis) == 1 for axis in model_axes) and all(spread.shard_axis.size == 1 for spread in spreads)
