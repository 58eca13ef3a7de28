"""Does a group of the recipe use a slow link of the node?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.config.run import RunConfig
from paceline.doctor.topology.groups import Grouping, axis_groups, best_grouping, better_order, worst_pair
from paceline.doctor.topology.matrix import LinkMatrix
from paceline.report.finding import Finding


def crossings(matrix: LinkMatrix, config: RunConfig | None) -> Iterator[Finding]:
    if config is None:
        return
    grouping = best_grouping(matrix)
    for axis in ("tp", "cp", "ep"):
        groups = axis_groups(config, axis, len(matrix.gpus))
        pair = worst_pair(matrix, groups)
        if pair is None or grouping is None:
            continue
        if matrix.level(matrix.gpus[pair[0]], matrix.gpus[pair[1]]) > 0:
            yield _crossing(matrix, axis, groups, pair, grouping)


def _crossing(
    matrix: LinkMatrix, axis: str, groups: Sequence[tuple[int, ...]], pair: tuple[int, int], grouping: Grouping
) -> Finding:
    one, other = (matrix.number(place) for place in pair)
    label = matrix.label(matrix.gpus[pair[0]], matrix.gpus[pair[1]])
    order = better_order(groups, grouping) if grouping.level == 0 else None
    size, key = len(groups[0]), f"parallel.{axis}"
    if order is not None and order != sorted(order):
        numbers = ",".join(str(matrix.number(place)) for place in order)
        step = f"export CUDA_VISIBLE_DEVICES={numbers}: neighbours then share NVLink."
    elif grouping.level == 0 and grouping.size < size:
        step = (
            f"--set {key}={grouping.size}, the largest group with NVLink everywhere: {matrix.named(grouping.groups)}."
        )
    else:
        step = f"--set {key}=1, or the smallest degree that fits in memory (paceline plan)."
    what = {
        "tp": "Tensor parallelism sends and receives the residual stream twice in every layer and direction",
        "cp": "Context parallelism passes keys and values around in every layer",
        "ep": "Expert parallelism sends tokens to their experts and back in every layer",
    }[axis]
    return Finding(
        id=f"topology.{axis}-crosses",
        severity="warning",
        subject=f"{key} = {size} crosses a slow link: GPU {one} and GPU {other} are joined by {label}",
        evidence=f"{what}; groups are {matrix.named(groups[:4])}{' ...' if len(groups) > 4 else ''}. {label} is PCIe"
        f"{' and the link between processors' if label == 'SYS' else ''}, a tenth of NVLink or less.",
        next_step=step,
    )
