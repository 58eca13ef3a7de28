"""What do the links of a node mean for training: which groups, which recipe, what is broken, what must be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware
from paceline.doctor.topology.crossing import crossings
from paceline.doctor.topology.matrix import LinkMatrix
from paceline.doctor.topology.verdict import verdict
from paceline.doctor.topology.wiring import wiring
from paceline.report.finding import Finding
from paceline.report.table import Table, table


def judge(
    matrix: LinkMatrix,
    *,
    config: RunConfig | None = None,
    card: Hardware | None = None,
    nodes: int | None = None,
) -> list[Finding]:
    """Findings about one node."""
    if not matrix.gpus:
        return list(wiring(matrix, card, nodes))
    return [*verdict(matrix), *crossings(matrix, config), *wiring(matrix, card, nodes)]


def alike(matrices: Sequence[LinkMatrix]) -> Iterator[Finding]:
    """Whether the nodes whose matrices were given have the same links."""
    first = matrices[0]
    odd = [number for number, matrix in enumerate(matrices) if matrix.links != first.links]
    if odd:
        yield Finding(
            id="topology.nodes-differ",
            severity="warning",
            subject=f"{len(odd)} of {len(matrices)} nodes have other links than the first (matrix "
            f"{', '.join(str(number + 1) for number in odd[:8])})",
            evidence="A layout that fits one node may cross slow links on another; every collective waits for the "
            "slowest.",
            next_step="Compare them; take nodes that differ out of the job, or have them repaired.",
        )


def topology_table(matrix: LinkMatrix) -> Table:
    """A row for each GPU: its CPUs, NUMA node and closest network card."""
    rows = []
    for gpu in matrix.gpus:
        affinity = matrix.affinity.get(gpu)
        near = matrix.nearest_nics(gpu)
        named = ", ".join(matrix.nic_names.get(nic, nic) for nic in near)
        label = matrix.label(gpu, near[0]) if near else ""
        rows.append(
            (
                gpu,
                (affinity.numa if affinity else None) or "?",
                (affinity.cpus if affinity else None) or "?",
                f"{named} ({label})" if near else "none",
            )
        )
    return table(("GPU", "NUMA node", "CPUs", "closest network card"), rows, title="Topology")


def link_table(matrix: LinkMatrix) -> Table:
    """The matrix in words, for whom the picture says nothing: a row for each GPU."""
    columns = (*matrix.gpus, *matrix.nics)
    rows = [(gpu, *("" if gpu == other else matrix.label(gpu, other) for other in columns)) for gpu in matrix.gpus]
    return table(("from", *columns), rows, title="Links as a table")
