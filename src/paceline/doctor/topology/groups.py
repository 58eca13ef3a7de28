"""Which GPUs of a node should share a tensor-parallel group, and does a recipe's layout agree?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.doctor.topology.matrix import LEVELS, LinkMatrix

_MOST_TRIED = 20_000


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """GPUs (by number) in groups of one size, all pairs of a group joined at least as well as `level`."""

    level: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.groups[0])

    @property
    def level_name(self) -> str:
        return "NVLink" if self.level == 0 else LEVELS[self.level]


def best_grouping(matrix: LinkMatrix) -> Grouping | None:
    """The largest equal groups, two GPUs or more, over the closest kind of link that makes any; None for one GPU."""
    count = len(matrix.gpus)
    for level in range(len(LEVELS) - 1):
        for size in (size for size in range(count, 1, -1) if count % size == 0):
            groups = _partition(count, size, _joined(matrix, level))
            if groups is not None:
                return Grouping(level=level, groups=groups)
    return None


def domains(matrix: LinkMatrix, level: int) -> list[list[int]]:
    """GPUs that reach each other over links of `level` or closer, over others if need be."""
    joined, left, found = _joined(matrix, level), set(range(len(matrix.gpus))), []
    while left:
        part, new = set[int](), {min(left)}
        while new:
            part |= new
            new = {other for one in new for other in left - part if joined(one, other)}
        left -= part
        found.append(sorted(part))
    return found


def _joined(matrix: LinkMatrix, level: int) -> Callable[[int, int], bool]:
    gpus = matrix.gpus
    return lambda one, other: matrix.level(gpus[one], gpus[other]) <= level


def _partition(count: int, size: int, joined: Callable[[int, int], bool]) -> tuple[tuple[int, ...], ...] | None:
    """All GPUs in groups of `size` whose pairs are all joined; groups of neighbouring numbers first.

    The search ends after `_MOST_TRIED` steps: nodes are regular, and what is not found by then is no group to build on.
    """
    blocks = tuple(tuple(range(start, start + size)) for start in range(0, count, size))
    if all(joined(a, b) for block in blocks for a in block for b in block if a < b):
        return blocks
    tried = 0

    def grow(group: tuple[int, ...], left: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
        nonlocal tried
        tried += 1
        if tried > _MOST_TRIED:
            return None
        if len(group) == size:
            if not left:
                return (group,)
            rest = grow((left[0],), left[1:])
            return None if rest is None else (group, *rest)
        for index, candidate in enumerate(left):
            if all(joined(member, candidate) for member in group):
                found = grow((*group, candidate), left[:index] + left[index + 1 :])
                if found is not None:
                    return found
        return None

    return grow((0,), tuple(range(1, count)))


def axis_groups(config: RunConfig, axis: str, gpus: int) -> list[tuple[int, ...]]:
    """Groups of an axis (tp, cp, or ep with etp) among the first `gpus` ranks, which are the GPUs of a node.

    Empty where the axis has one rank, or where its groups do not lie within the node.
    """
    parallel = config.parallel
    if axis == "ep":
        size = parallel.ep * parallel.etp
        stride = 1 if parallel.order[0] == "pp" or parallel.pp == 1 else 0
    else:
        size = {"tp": parallel.tp, "cp": parallel.cp}[axis]
        stride = 1
        for inner in parallel.order[parallel.order.index(axis) + 1 :]:
            # dp_shard = 0 takes what is left: how far apart ranks are is then not known here
            stride *= getattr(parallel, inner)
    if size == 1 or not stride or gpus % (size * stride):
        return []
    return [
        tuple(base + offset + index * stride for index in range(size))
        for base in range(0, gpus, size * stride)
        for offset in range(stride)
    ]


def worst_pair(matrix: LinkMatrix, groups: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """The pair of GPUs with the slowest link that one of the groups has to use."""
    pairs = [(a, b) for group in groups for a in group for b in group if a < b]
    gpus = matrix.gpus
    return max(pairs, key=lambda pair: (matrix.level(gpus[pair[0]], gpus[pair[1]]), (-pair[0], -pair[1])), default=None)


def better_order(groups: Sequence[tuple[int, ...]], grouping: Grouping) -> list[int] | None:
    """An order of the GPUs (for CUDA_VISIBLE_DEVICES) in which neighbouring groups lie within fast ones."""
    size = len(groups[0])
    neighbours = all(group == tuple(range(group[0], group[0] + size)) for group in groups)
    if not neighbours or grouping.size % size:
        return None
    return [gpu for group in grouping.groups for gpu in group]
