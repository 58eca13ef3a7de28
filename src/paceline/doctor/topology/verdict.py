"""Which groups of GPUs are fast, and what does that mean for tensor, pipeline and data parallelism?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.doctor.topology.groups import Grouping, best_grouping
from paceline.doctor.topology.matrix import LinkMatrix
from paceline.report.finding import Finding


def verdict(matrix: LinkMatrix) -> Iterator[Finding]:
    count, grouping = len(matrix.gpus), best_grouping(matrix)
    if count == 1:
        yield Finding(
            id="topology.groups",
            severity="note",
            subject="one GPU in the node: no links to choose between",
            evidence="Tensor, context and expert parallelism over nodes would use the network at every layer.",
            next_step="Use data parallelism (parallel.zero = 1, or 3 where weights do not fit), or pipeline stages.",
        )
    elif grouping is None:
        yield Finding(
            id="topology.groups",
            severity="warning",
            subject="which groups are fast is not determined: the driver knows no link between the GPUs",
            evidence="All pairs are N/A.",
            next_step="Measure them: paceline doctor --measure.",
        )
    elif grouping.level == 0:
        yield _over_nvlink(matrix, grouping)
    else:
        yield _over_pcie(matrix, grouping)


def _over_nvlink(matrix: LinkMatrix, grouping: Grouping) -> Finding:
    count = len(matrix.gpus)
    most = max(matrix.nvlinks(a, b) for a, b in matrix.pairs)
    if grouping.size == count:
        return Finding(
            id="topology.groups",
            severity="note",
            subject=f"all {count} GPUs are joined by NVLink ({_link_words(matrix)}): groups may lie anywhere in it",
            evidence=f"{most} links of 25 GB/s are {25 * most} GB/s a direction (50 GB/s each from Blackwell on); "
            "PCIe 5 has 63.",
            next_step=f"Keep tp, cp and ep at {count} or below, inside the node; pp and dp go across nodes.",
        )
    across = sorted(
        {
            matrix.label(matrix.gpus[a], matrix.gpus[b])
            for index, group in enumerate(grouping.groups)
            for other in grouping.groups[index + 1 :]
            for a in group
            for b in other
        }
    )
    return Finding(
        id="topology.groups",
        severity="note",
        subject=f"NVLink joins all GPUs of groups of {grouping.size} alone: {matrix.named(grouping.groups)}",
        evidence=f"Between groups: {', '.join(across)}. Tensor parallelism communicates twice a layer and "
        "direction; it wants NVLink.",
        next_step=f"Keep tp (with cp and ep) at {grouping.size} or below; pp or dp across groups.",
    )


def _over_pcie(matrix: LinkMatrix, grouping: Grouping) -> Finding:
    count = len(matrix.gpus)
    close = grouping.size < count
    kinds = Counter(matrix.label(a, b) for a, b in matrix.pairs)
    seen = ", ".join(f"{number} pairs {label}" for label, number in kinds.most_common())
    linked = sum(1 for pair in matrix.pairs if matrix.nvlinks(*pair))
    return Finding(
        id="topology.no-nvlink",
        severity="warning",
        subject=f"NVLink joins only {linked} of {len(matrix.pairs)} pairs, and not equal groups of all {count} GPUs"
        if linked
        else f"no NVLink between the {count} GPUs: traffic inside the node goes over PCIe",
        evidence=f"{seen}. When training is slow here, bandwidth inside the node is the first suspect: the same 7B "
        "model reached 93.5 TFLOP/s a GPU (30 % MFU) on 8 A100 over PCIe and 188 (60 %) over NVLink (InternLM #22).",
        next_step=(
            f"If tp is needed, keep it within {matrix.named(grouping.groups)} ({grouping.level_name}). "
            if close
            else ""
        )
        + "Prefer dp with parallel.zero = 1 and large micro-batches, or pp. Which pairs are faster is not determined "
        "by their names where peer access is off (NODE pairs 24 GB/s, a mixed set 35: nccl #1130): measure it, "
        "paceline doctor --measure.",
        gain="up to 2 times with NVLink",
    )


def _link_words(matrix: LinkMatrix) -> str:
    return ", ".join(sorted({matrix.label(a, b) for a, b in matrix.pairs}))
