"""Does a group of the recipe use a slow link of the node?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.config.run import RunConfig
from paceline.doctor.topology.groups import Grouping, axis_groups, best_grouping, better_order, named, worst_pair
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
        label = matrix.label(matrix.gpus[pair[0]], matrix.gpus[pair[1]])
        if not label.startswith("NV"):
            yield _crossing(axis, groups, pair, label, grouping)


def _crossing(
    axis: str, groups: Sequence[tuple[int, ...]], pair: tuple[int, int], label: str, grouping: Grouping
) -> Finding:
    order = better_order(groups, grouping) if grouping.level == 0 else None
    size, key = len(groups[0]), f"parallel.{axis}"
    if order is not None and order != sorted(order):
        step = f"export CUDA_VISIBLE_DEVICES={','.join(map(str, order))}: neighbours then share NVLink."
    elif grouping.level == 0 and grouping.size < size:
        step = f"--set {key}={grouping.size}, the largest group with NVLink everywhere: {named(grouping.groups)}."
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
        subject=f"{key} = {size} crosses a slow link: GPU {pair[0]} and GPU {pair[1]} are joined by {label}",
        evidence=f"{what}; groups are {named(groups[:4])}{' ...' if len(groups) > 4 else ''}. {label} is PCIe"
        f"{' and the link between processors' if label == 'SYS' else ''}, a tenth of NVLink or less.",
        next_step=step,
    )
