"""Measured beside expected, ranks beside each other: verdicts, and the slow GPU, link or node by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from paceline.costs.hardware import find_hardware
from paceline.costs.workload import Cluster
from paceline.doctor.measured.expected import expected_bus, expected_pair, expected_rate
from paceline.doctor.measured.outliers import slow_ends, slow_ones
from paceline.doctor.measured.record import SHARED, TITLES, UNITS, Measured, RankRecord
from paceline.doctor.measured.tables import BROKEN, GOOD, number
from paceline.report import units
from paceline.report.finding import Finding, Severity

_STORAGE_DIFFERS = 0.3
"""Nodes that read and write slower by less are alike: what others do at the moment matters as much."""
_LARGE = 64 * 2**20
"""Collectives below are latency."""


def judge(measured: Measured, cluster: Cluster | None, *, needed_tokens: float | None = None) -> list[Finding]:
    """Findings about a measurement.

    Args:
        cluster: the machines, for what collectives should give; None where the card is not known.
        needed_tokens: tokens/s that one GPU of the recipe is predicted to eat.
    """
    return [
        *_rates(measured),
        *_among_ranks(measured),
        *_pairs(measured),
        *_nodes(measured),
        *_collectives(measured, cluster),
        *_loader(measured, needed_tokens),
        *_versions(measured),
        *_skipped(measured),
    ]


def _finding(
    id: str, severity: Severity, subject: str, evidence: str, next_step: str, gain: str | None = None
) -> Finding:
    return Finding(
        id=f"measured.{id}", severity=severity, subject=subject, evidence=evidence, next_step=next_step, gain=gain
    )


def _place(record: RankRecord) -> str:
    return (
        f"rank {record.rank} (GPU {record.gpu} of {record.host})"
        if record.device != "cpu"
        else f"rank {record.rank} ({record.host})"
    )


# ---- each beside what it should be


def _rates(measured: Measured) -> Iterator[Finding]:
    card = find_hardware(measured.ranks[0].device)
    if card is None:
        if measured.ranks[0].device != "cpu":
            yield _finding(
                "unknown-card",
                "note",
                f"{measured.ranks[0].device}: what it should reach is not determined",
                "It is not in the table of hardware.",
                "The figures can be compared with those of like machines.",
            )
        return
    for name, unit in UNITS.items():
        values = measured.values(name)
        expected = expected_rate(name, card)
        if not values or not expected:
            continue
        middle = median(values.values())
        share = middle / expected
        if share >= GOOD:
            continue
        yield _finding(
            "low-rate",
            "warning" if share >= BROKEN else "error",
            f"{TITLES[name]}: {number(middle, unit)}, {units.percent(share, 0)} of what {card.name} should give",
            f"Expected {number(expected, unit)}: the published peak times the share that other scripts "
            "measured on two H200s.",
            _why_low(name),
            f"up to {1 / share:.2g} times in this part",
        )


def _why_low(name: str) -> str:
    if name.startswith(("gemm", "attention")):
        return (
            "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER while it runs: power cap, heat, locked clocks? Another program "
            "on "
            "the GPU? For attention: is cuDNN's or FlashAttention's kernel there (paceline doctor, software)?"
        )
    if name in ("host_to_device", "device_to_host"):
        return "PCIe generation and width (paceline doctor, GPUs); is the process on the GPU's NUMA node (numactl)?"
    return "Another program on the GPU? ECC errors (nvidia-smi -q -d ECC)? Locked memory clocks?"


# ---- ranks beside each other


def _among_ranks(measured: Measured) -> Iterator[Finding]:
    by_rank = {record.rank: record for record in measured.ranks}
    for name, unit in UNITS.items():
        values = measured.values(name)
        found = slow_ones(values) if name not in SHARED else _slow_nodes(measured, name)
        if not found:
            continue
        middle = median(values.values())
        whole_nodes = _whole_nodes(measured, set(found))
        listed = ", ".join(f"{_place(by_rank[rank])}: {number(values[rank], unit)}" for rank in list(found)[:4])
        worst = min(found.values())
        where = f"node {' and '.join(whole_nodes)}" if whole_nodes else "rank " + ", ".join(map(str, list(found)[:8]))
        yield _finding(
            "slow-node" if whole_nodes else "slow-rank",
            "warning",
            f"{where} is slow in: {TITLES[name]} ({units.percent(worst, 0)} of the others)",
            f"{listed}; the median of {len(values)} ranks is {number(middle, unit)}. Every step waits for the slowest.",
            "Take it out of the job, or look at its clocks, heat and errors: nvidia-smi -q -d CLOCK,PERFORMANCE,ECC "
            "there.",
            f"{units.percent(1 / worst - 1, 0)} less time in this part",
        )


def _slow_nodes(measured: Measured, name: str) -> dict[int, float]:
    """Ranks of nodes that are slow together, with the node's share of the median of nodes."""
    nodes = {record.rank: record.node for record in measured.ranks}
    summed: dict[int, float] = {}
    for rank, rate in measured.values(name).items():
        summed[nodes[rank]] = summed.get(nodes[rank], 0.0) + rate
    slow = slow_ones(summed, least=_STORAGE_DIFFERS)
    return {rank: slow[node] for rank, node in nodes.items() if node in slow}


def _whole_nodes(measured: Measured, slow: set[int]) -> list[str]:
    """Hosts whose ranks are exactly the slow ones; none where there is one node."""
    if measured.num_nodes < 2:
        return []
    hosts = {record.node: record.host for record in measured.ranks}
    members = {node: {record.rank for record in measured.ranks if record.node == node} for node in hosts}
    whole = [node for node, ranks in members.items() if ranks <= slow and len(ranks) > 1]
    covered = set().union(*(members[node] for node in whole)) if whole else set()
    return [hosts[node] for node in whole] if covered == slow else []


def _pairs(measured: Measured) -> Iterator[Finding]:
    if not measured.pairs:
        return
    by_rank = {record.rank: record for record in measured.ranks}
    ends, links = slow_ends(measured.pairs)
    middle = median(measured.pairs.values())
    for rank, share in ends.items():
        yield _finding(
            "slow-gpu-links",
            "warning",
            f"all links of {_place(by_rank[rank])} are slow: {units.percent(share, 0)} of the others",
            f"The median of {len(measured.pairs)} directions is {middle:.4g} GB/s.",
            "nvidia-smi nvlink -s and -e for this GPU; PCIe width; reset it or take it out.",
        )
    if links:
        shown = ", ".join(f"{one} to {other}: {measured.pairs[one, other]:.4g}" for one, other in sorted(links)[:6])
        yield _finding(
            "slow-link",
            "warning",
            f"{len(links)} links between ranks are slow: {shown} GB/s",
            f"The median of {len(measured.pairs)} directions is {middle:.4g} GB/s. Where links of two kinds join the "
            "GPUs "
            "(nvidia-smi topo -m), that is how the machine is built.",
            "paceline doctor --topo: keep tensor parallelism on the fast ones. Else nvidia-smi nvlink -s.",
        )
    card = find_hardware(measured.ranks[0].device)
    expected = expected_pair(card) if card and measured.backend == "nccl" else None
    if expected and middle < GOOD * expected:
        yield _finding(
            "low-links",
            "warning" if middle >= BROKEN * expected else "error",
            f"GPUs reach each other at {middle:.4g} GB/s, {units.percent(middle / expected, 0)} of what NVLink "
            "should give",
            f"Expected {expected:.4g} GB/s on {card.name if card else ''}. Below 60 GB/s it is PCIe or host memory.",
            "paceline doctor (topology), nvidia-smi nvlink -s; is NCCL_P2P_DISABLE set? NCCL's log says which way it "
            "takes.",
        )


def _nodes(measured: Measured) -> Iterator[Finding]:
    if not measured.nodes:
        return
    hosts = {record.node: record.host for record in measured.ranks}
    ends, links = slow_ends(measured.nodes)
    middle = median(measured.nodes.values())
    for node, share in ends.items():
        yield _finding(
            "slow-node",
            "warning",
            f"node {hosts[node]} is slow on the network: {units.percent(share, 0)} of the others",
            f"The median of {len(measured.nodes)} directions between nodes is {middle:.4g} GB/s.",
            "ibstat and error counters there (perfquery); fewer active cards? Take the node out of the job.",
        )
    if links:
        shown = ", ".join(
            f"{hosts[one]} to {hosts[other]}: {measured.nodes[one, other]:.4g}" for one, other in sorted(links)[:6]
        )
        yield _finding(
            "slow-node-link",
            "warning",
            f"{len(links)} ways between nodes are slow: {shown} GB/s",
            f"The median of {len(measured.nodes)} directions is {middle:.4g} GB/s; each node is fast towards others.",
            "A link between switches, or routing: ask the network's administrator, with these names.",
        )


def _collectives(measured: Measured, cluster: Cluster | None) -> Iterator[Finding]:
    if cluster is None or measured.backend != "nccl":
        return
    low = []
    for record in measured.collectives:
        expected = expected_bus(record.name, record.size_bytes, cluster)
        if expected and record.size_bytes >= _LARGE and record.bus_gb_per_s < GOOD * expected:
            low.append((record.bus_gb_per_s / expected, record, expected))
    if low:
        share, record, expected = min(low, key=lambda one: one[0])
        yield _finding(
            "low-collectives",
            "warning" if share >= BROKEN else "error",
            f"{record.name} of {units.size(record.size_bytes)}: {record.bus_gb_per_s:.4g} GB/s, "
            f"{units.percent(share, 0)} of what these links should give",
            f"Expected {expected:.4g} GB/s; {len(low)} of {len(measured.collectives)} figures are low. "
            + (f"Between nodes: {cluster.node_gb_per_s:.4g} GB/s a GPU." if cluster.nodes > 1 else ""),
            "NCCL_DEBUG=INFO and paceline doctor nccl LOG: which transport, how many channels? Are NCCL variables "
            "left over "
            "(paceline doctor, environment)?",
        )


# ---- what the run needs


def _loader(measured: Measured, needed: float | None) -> Iterator[Finding]:
    values = measured.values("loader")
    if not values or not needed:
        return
    slowest = min(values.values())
    if slowest < 1.5 * needed:
        short = slowest < needed
        yield _finding(
            "loader",
            "error" if short else "warning",
            f"the data loader gives {units.count(slowest)} tokens/s a rank; a GPU eats {units.count(needed)} by "
            "prediction",
            "GPUs would wait for data." if short else "That leaves little room for other work on the same cores.",
            "More data.num_workers, faster storage for the dataset, or tokens prepared beforehand (paceline data "
            "build).",
            f"{needed / slowest:.2g} times tokens/s" if short else None,
        )


def _versions(measured: Measured) -> Iterator[Finding]:
    for name in sorted({name for record in measured.ranks for name in record.versions}):
        found: dict[str, list[str]] = {}
        for record in measured.ranks:
            hosts = found.setdefault(record.versions.get(name, "none"), [])
            if record.host not in hosts:
                hosts.append(record.host)
        if len(found) > 1:
            fewest = min(found, key=lambda version: len(found[version]))
            yield _finding(
                "versions-differ",
                "error" if name in ("nccl", "torch") else "warning",
                f"nodes run different versions of {name}: {', '.join(sorted(found))}",
                f"{fewest} on {', '.join(found[fewest][:6])}.",
                "The same image or environment on every node.",
            )
    devices = sorted({record.device for record in measured.ranks})
    if len(devices) > 1:
        yield _finding(
            "devices-differ",
            "warning",
            f"ranks have different GPUs: {', '.join(devices)}",
            "Every step waits for the slowest.",
            "Train on equal ones.",
        )


def _skipped(measured: Measured) -> Iterator[Finding]:
    reasons: dict[tuple[str, str], list[int]] = {}
    for record in measured.ranks:
        for name, reason in record.skipped.items():
            reasons.setdefault((name, reason), []).append(record.rank)
    for (name, reason), ranks in reasons.items():
        yield _finding(
            "not-measured",
            "note",
            f"{TITLES.get(name, name)}: not measured" + (f" on {len(ranks)} ranks" if len(ranks) > 1 else ""),
            reason,
            "",
        )
