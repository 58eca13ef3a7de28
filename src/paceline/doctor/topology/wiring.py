"""What looks broken or poor: links that are down, network cards that are far, too few CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from paceline.costs.hardware import Hardware
from paceline.doctor.topology.groups import domains
from paceline.doctor.topology.matrix import LEVELS, LinkMatrix
from paceline.report.finding import Finding

NVLINKS = {"A100 SXM 40": 12, "A100 SXM 80": 12, "A800 SXM": 8, "H100 SXM": 18, "H200 SXM": 18, "H20": 18,
           "H100 SXM 96": 18, "H800 SXM": 8, "B200 SXM": 18, "B300 SXM": 18}  # fmt: skip
"""Of one GPU, all together; through NVSwitch every pair shows all of them, on boards without one they are divided among
its peers. Source: NVIDIA's data sheets (GB/s a direction over 25, from Blackwell on over 50)."""

_FEW_CORES = 4
_FEW_CORES_MANY_NODES = 8


def wiring(matrix: LinkMatrix, card: Hardware | None, nodes: int | None) -> Iterator[Finding]:
    """All of it."""
    yield from _slices(matrix)
    yield from _asymmetric(matrix)
    yield from _nvlinks(matrix, card)
    yield from _peer_pairs(matrix)
    yield from _nics(matrix, nodes)
    yield from _cores(matrix, nodes)


def _slices(matrix: LinkMatrix) -> Iterator[Finding]:
    if matrix.slices:
        yield Finding(
            id="topology.mig",
            severity="error",
            subject=f"{len(matrix.slices)} MIG slices in place of whole GPUs",
            evidence="Slices have no peer access and no NVLink; NCCL cannot join two of them.",
            next_step="Switch MIG off (nvidia-smi -mig 0, as root, with no job on the GPU), or train on one slice.",
        )


def _asymmetric(matrix: LinkMatrix) -> Iterator[Finding]:
    odd = [(a, b) for a, b in matrix.pairs if matrix.label(a, b) != matrix.label(b, a)]
    if odd:
        a, b = odd[0]
        yield Finding(
            id="topology.asymmetric",
            severity="warning",
            subject=f"{a} to {b} is {matrix.label(a, b)}, and back it is {matrix.label(b, a)}",
            evidence=f"{len(odd)} pairs differ by direction; a link has one kind. The text was changed, or the driver "
            "reports a link that failed.",
            next_step="Run nvidia-smi topo -m again; then nvidia-smi nvlink -s.",
        )


def _nvlinks(matrix: LinkMatrix, card: Hardware | None) -> Iterator[Finding]:
    counts = {gpu: sorted(matrix.nvlinks(gpu, other) for other in matrix.gpus if other != gpu) for gpu in matrix.gpus}
    values = Counter(matrix.nvlinks(a, b) for a, b in matrix.pairs)
    if not values or set(values) == {0}:
        return
    usual, seen = values.most_common(1)[0]
    lower = [(a, b) for a, b in matrix.pairs if matrix.nvlinks(a, b) < usual]
    if lower and usual > 0 and seen >= 0.6 * len(matrix.pairs):
        guilty = [gpu for gpu in matrix.gpus if all(gpu in pair for pair in lower)] or [
            gpu for gpu, found in counts.items() if found and found[-1] < usual
        ]
        yield Finding(
            id="topology.fewer-links",
            severity="error" if guilty else "warning",
            subject=f"{' and '.join(guilty) or f'{len(lower)} pairs'}: fewer NVLinks than the others "
            f"({min(matrix.nvlinks(a, b) for a, b in lower)} instead of {usual})",
            evidence=f"{len(lower)} of {len(matrix.pairs)} pairs are below NV{usual}. A link that is down slows "
            "every collective of the node.",
            next_step="nvidia-smi nvlink -s and nvidia-smi nvlink -e on that GPU; reset it (nvidia-smi -r) or have it "
            "repaired.",
        )
    expected = NVLINKS.get(card.name) if card is not None else None
    divided = expected == usual * (len(matrix.gpus) - 1)
    if expected and usual and not divided and usual < expected and values[usual] == len(matrix.pairs):
        yield Finding(
            id="topology.fewer-links",
            severity="warning",
            subject=f"every pair shows NV{usual}; {card.name if card else ''} has {expected} NVLinks",
            evidence="Through NVSwitch a pair can use all links of a GPU.",
            next_step="nvidia-smi nvlink -s; look at the fabric manager (systemctl status nvidia-fabricmanager).",
        )


def _peer_pairs(matrix: LinkMatrix) -> Iterator[Finding]:
    """Pairs that would use peer access over PCIe, while others cannot: the ones that hang where ACS is on."""
    close = [pair for pair in matrix.pairs if LEVELS[matrix.level(*pair)] in ("PIX", "PXB", "PHB")]
    if not close:
        return
    shown = ", ".join(f"({a.removeprefix('GPU')},{b.removeprefix('GPU')})" for a, b in close[:8])
    yield Finding(
        id="topology.peer-pairs",
        severity="note",
        subject=f"{len(close)} pairs reach each other directly over PCIe: {shown}{' ...' if len(close) > 8 else ''}",
        evidence="If collectives hang or corrupt data on just these pairs, PCIe ACS or the IOMMU redirects peer "
        "traffic (nccl #667, #2079); the other pairs go through host memory and work.",
        next_step="sudo lspci -vvv > lspci.txt; paceline doctor --lspci lspci.txt. Cure: switch ACS and VT-d / AMD-Vi "
        "off in the BIOS. NCCL_P2P_DISABLE=1 is a workaround, and slow.",
    )


# ---- network cards and processors


def _nics(matrix: LinkMatrix, nodes: int | None) -> Iterator[Finding]:
    if not matrix.nics:
        if nodes is not None and nodes > 1:
            yield Finding(
                id="topology.no-nic",
                severity="warning",
                subject=f"no InfiniBand or RoCE card, for a job of {nodes} nodes",
                evidence="Nodes would talk over TCP sockets, at 1 to 10 GB/s a node.",
                next_step="On the node: ls /sys/class/infiniband. In a container, pass /dev/infiniband through.",
            )
        return
    best = {gpu: min(matrix.level(gpu, nic) for nic in matrix.nics) for gpu in matrix.gpus}
    far = [gpu for gpu, level in best.items() if level > LEVELS.index("PXB")]
    if far:
        some = len(far) < len(matrix.gpus)
        yield Finding(
            id="topology.far-nic",
            severity="warning" if nodes is None or nodes > 1 else "note",
            subject=f"{', '.join(far) if some else 'all GPUs'}: no network card behind the same PCIe switch",
            evidence=f"The closest is {' or '.join(sorted({LEVELS[best[gpu]] for gpu in far}))} away. NCCL uses "
            "GPUDirect RDMA up to PXB unless told otherwise; beyond, data goes through the processor.",
            next_step="Nothing if this is one node. Else compare with GPUDirect allowed further (NCCL_NET_GDR_LEVEL "
            "= PHB or SYS) and without, by paceline doctor --measure; keep what is faster.",
        )
    shared = len(matrix.gpus) / len(matrix.nics)
    if shared > 2 and (nodes is None or nodes > 1):
        yield Finding(
            id="topology.few-nics",
            severity="note",
            subject=f"{len(matrix.gpus)} GPUs share {len(matrix.nics)} network cards",
            evidence="The rate between nodes, for each GPU, is that of a card divided by its GPUs.",
            next_step="Tell the planner: paceline plan --interconnect GB/s for each GPU.",
        )


def _cores(matrix: LinkMatrix, nodes: int | None) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for gpu in matrix.gpus:
        affinity = matrix.affinity.get(gpu)
        if affinity is not None and affinity.num_cpus:
            groups.setdefault(affinity.cpus or "", []).append(gpu)
    enough = _FEW_CORES_MANY_NODES if nodes is not None and nodes > 1 else _FEW_CORES
    for cpus, gpus in groups.items():
        total = matrix.affinity[gpus[0]].num_cpus
        if total < enough * len(gpus):
            yield Finding(
                id="topology.few-cores",
                severity="warning",
                subject=f"{total} CPUs ({cpus}) for {len(gpus)} GPUs: {total / len(gpus):.3g} each, below {enough}",
                evidence="A process launches kernels, reads data and runs NCCL's threads"
                + (" for the network." if enough > _FEW_CORES else "."),
                next_step="Ask the scheduler for more CPUs a GPU (--cpus-per-task), or fewer data workers.",
            )
    if len(matrix.gpus) > 1 and len(domains(matrix, LEVELS.index("NODE"))) > 1 and not groups:
        yield Finding(
            id="topology.no-affinity",
            severity="note",
            subject="GPUs lie on several NUMA nodes, and the text does not say which CPUs are close",
            evidence="Inside virtual machines and containers the driver often cannot tell.",
            next_step="On the host: nvidia-smi topo -m, and lscpu.",
        )


def binding(matrix: LinkMatrix, allowed: frozenset[int], gpu: int | None) -> Iterator[Finding]:
    """Whether this process may run on CPUs close to its GPU.

    Args:
        allowed: CPUs that this process may use.
        gpu: the place of its GPU in `matrix.gpus`; None where it starts the processes of all GPUs.
    """
    places = range(len(matrix.gpus)) if gpu is None else [gpu] if gpu < len(matrix.gpus) else []
    for place in places:
        affinity = matrix.affinity.get(matrix.gpus[place])
        near = affinity.cpu_numbers if affinity else frozenset()
        if near and allowed and not near & allowed:
            yield Finding(
                id="topology.binding",
                severity="warning",
                subject=f"this process may use none of the CPUs close to GPU {matrix.number(place)} "
                f"({affinity.cpus if affinity else ''})",
                evidence=f"It is bound to {len(allowed)} others: launches, copies from and to the host and NCCL's "
                "threads cross the link between processors.",
                next_step="Bind each process to its GPU's CPUs: srun --cpu-bind, numactl --cpunodebind; or ask the "
                "scheduler for whole nodes.",
            )
            return
