"""What surrounds the GPUs: cores, memory, /dev/shm, network cards, what GPUDirect needs. Read from system files."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from paceline.report import units
from paceline.report.finding import Finding
from paceline.report.table import Table, table
from paceline.runtime.host import host_memory

_SMALL_SHM = 2**30
_TINY_SHM = 128 * 2**20
_KERNEL_WITH_DMABUF = (5, 12)


@dataclass(frozen=True, kw_only=True)
class Port:
    """Of an InfiniBand or RoCE card."""

    name: str
    """``mlx5_0:1``."""
    state: str
    """ACTIVE, DOWN, INIT ..."""
    gbit: float | None
    layer: str
    """InfiniBand or Ethernet."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """None where the system does not say."""

    name: str
    cpus: frozenset[int]
    """That this process may use."""
    memory_bytes: int
    shm_bytes: int | None
    ports: tuple[Port, ...]
    peermem: bool | None
    """The module nvidia_peermem (or nv_peer_mem) is loaded."""
    dmabuf: bool | None
    """Kernel and driver can do without it."""
    memlock_bytes: int | None
    """Most that may be locked; None without a limit."""
    interfaces: tuple[str, ...]
    container: bool

    @property
    def cores(self) -> int:
        """That this process may use."""
        return len(self.cpus)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cpus": sorted(self.cpus), "cores": self.cores}


def read_host(root: Path = Path("/")) -> Host:
    """This machine; `root` stands for another file system in tests."""
    modules = _text(root / "proc/modules")
    names = {line.split()[0] for line in modules.splitlines() if line.split()}
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        name=socket.gethostname(),
        cpus=frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)),
        memory_bytes=host_memory().total,
        shm_bytes=_shm(root / "dev/shm"),
        ports=tuple(_ports(root / "sys/class/infiniband")),
        peermem=bool(names & {"nvidia_peermem", "nv_peer_mem"}) if modules else None,
        dmabuf=_dmabuf(root),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        interfaces=tuple(sorted(psutil.net_if_addrs())),
        container=(root / ".dockerenv").exists() or (root / "run/.containerenv").exists(),
    )


def _shm(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _ports(folder: Path) -> Iterator[Port]:
    try:
        cards = sorted(folder.iterdir())
    except OSError:
        return
    for card in cards:
        for port in sorted(card.glob("ports/*")):
            rate = _text(port / "rate").split()
            yield Port(
                name=f"{card.name}:{port.name}",
                state=_text(port / "state").partition(":")[2].strip() or "unknown",
                gbit=float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else None,
                layer=_text(port / "link_layer").strip() or "unknown",
            )


def _dmabuf(root: Path) -> bool | None:
    """Open kernel modules of the driver, on a kernel of 5.12 or later."""
    driver = _text(root / "proc/driver/nvidia/version")
    if not driver:
        return None
    numbers = platform.release().split("-")[0].split(".")
    kernel = tuple(int(part) for part in numbers[:2] if part.isdigit())
    return "Open Kernel Module" in driver and kernel >= _KERNEL_WITH_DMABUF


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def host_table(host: Host) -> Table:
    rows = [
        ("host", host.name + (" (container)" if host.container else "")),
        ("cores for this process", str(host.cores)),
        ("memory", units.size(host.memory_bytes)),
        ("/dev/shm", units.size(host.shm_bytes) if host.shm_bytes is not None else "?"),
        ("GPUDirect", _gpudirect_words(host)),
        *((port.name, f"{port.layer}, {port.state}, {port.gbit or '?'} Gb/s") for port in host.ports),
    ]
    return table(("", ""), rows, title="Host")


def _gpudirect_words(host: Host) -> str:
    if host.peermem:
        return "nvidia_peermem is loaded"
    if host.dmabuf:
        return "dma-buf (open kernel modules)"
    return "not determined" if host.peermem is None or host.dmabuf is None else "neither nvidia_peermem nor dma-buf"


def judge_host(host: Host, *, gpus: int, nodes: int | None) -> list[Finding]:
    """Findings about the host of so many GPUs."""
    many = nodes is not None and nodes > 1
    return [
        *_shared_memory(host, gpus),
        *_size(host, gpus, many=many),
        *_network(host, many=many),
        *_gpudirect(host, many=many),
    ]


def _shared_memory(host: Host, gpus: int) -> Iterator[Finding]:
    if host.shm_bytes is None or host.shm_bytes >= _SMALL_SHM:
        return
    yield Finding(
        id="host.shm",
        severity="error" if host.shm_bytes < _TINY_SHM and gpus > 1 else "warning",
        subject=f"/dev/shm has {units.size(host.shm_bytes)}",
        evidence="NCCL (10 MB for each connection without peer access) and data workers keep shared memory there; when "
        "it is full they fail with 'No space left on device', though no disk is full (nccl #342, #290).",
        next_step="Start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of medium "
        "Memory.",
    )


def _size(host: Host, gpus: int, *, many: bool) -> Iterator[Finding]:
    if gpus == 0:
        return
    enough = 8 if many else 4
    if host.cores < enough * gpus:
        yield Finding(
            id="host.cores",
            severity="warning",
            subject=f"{host.cores} cores for {gpus} GPUs: {host.cores / gpus:.3g} each, below {enough}",
            evidence="A process launches kernels, reads data and runs NCCL's threads; when cores lack, GPUs wait for "
            "launches.",
            next_step="Ask the scheduler for more CPUs a GPU (--cpus-per-task, Kubernetes limits), or fewer data "
            "workers.",
        )
    each = host.memory_bytes / gpus
    if each < 32 * 2**30:
        yield Finding(
            id="host.memory",
            severity="warning",
            subject=f"{units.size(host.memory_bytes)} of memory for {gpus} GPUs: {units.size(each)} each",
            evidence="Checkpoints are copied to host memory before they are written: 12 to 16 bytes for each "
            "parameter of "
            "a rank's shard, beside the data loader.",
            next_step="A larger memory limit; or paceline train --dry-run, which counts what this recipe needs.",
        )


def _network(host: Host, *, many: bool) -> Iterator[Finding]:
    down = [port for port in host.ports if port.state != "ACTIVE"]
    active = [port for port in host.ports if port.state == "ACTIVE"]
    if down and (active or many):
        yield Finding(
            id="host.port-down",
            severity="error" if many and not active else "note",
            subject=f"{len(down)} of {len(host.ports)} ports of network cards are not ACTIVE: "
            f"{', '.join(f'{port.name} ({port.state})' for port in down[:6])}",
            evidence="NCCL leaves them out, so GPUs share the cards that are left.",
            next_step="ibstat; look at cables, switch ports and the subnet manager. Ports that are not meant for "
            "training "
            "may stay down.",
        )
    rates = sorted({port.gbit for port in active if port.gbit})
    if len(rates) > 1 and rates[-1] >= 100:
        slow = [port.name for port in active if port.gbit and port.gbit < rates[-1]]
        yield Finding(
            id="host.port-rate",
            severity="note",
            subject=f"network cards of different rates: {', '.join(f'{rate:g}' for rate in rates)} Gb/s",
            evidence=f"The slower ones are {', '.join(slow[:6])}: cards for storage or management, or links that "
            "came up "
            "at a lower rate.",
            next_step="Name those for training: NCCL_IB_HCA==mlx5_0,mlx5_1 (exact names).",
        )
    if many and not host.ports:
        yield Finding(
            id="host.no-rdma",
            severity="warning",
            subject="no InfiniBand or RoCE card is visible, for a job of several nodes",
            evidence="/sys/class/infiniband is empty or missing, so NCCL uses TCP sockets"
            + (" (this is a container, which may just not see it)." if host.container else "."),
            next_step="On the host: ibv_devinfo. In a container pass /dev/infiniband through. On AWS and Google "
            "Cloud: their "
            "NCCL plugin.",
        )


def _gpudirect(host: Host, *, many: bool) -> Iterator[Finding]:
    if not host.ports:
        return
    if host.peermem is False and host.dmabuf is False:
        yield Finding(
            id="host.gpudirect",
            severity="warning" if many else "note",
            subject="GPUDirect RDMA cannot work: neither nvidia_peermem nor dma-buf",
            evidence="The module is not loaded, and dma-buf needs the open kernel modules of the driver on Linux "
            "5.12 or "
            "later. Data between nodes takes the way through host memory.",
            next_step="sudo modprobe nvidia_peermem, or install the open kernel modules.",
            gain="up to twice the rate between nodes" if many else None,
        )
    elif many and host.peermem is None:
        yield Finding(
            id="host.gpudirect",
            severity="note",
            subject="whether GPUDirect RDMA works is not determined: /proc/modules cannot be read",
            evidence="Containers hide it.",
            next_step="On the host: lsmod | grep peermem. Or log a start: NCCL_DEBUG=INFO, paceline doctor nccl LOG.",
        )
    if host.memlock_bytes is not None and host.memlock_bytes < 2**30:
        yield Finding(
            id="host.memlock",
            severity="error" if many else "note",
            subject=f"at most {units.size(host.memlock_bytes)} of memory may be locked (ulimit -l)",
            evidence="RDMA pins its buffers; NCCL then fails with 'ibv_reg_mr failed: Cannot allocate memory'.",
            next_step="ulimit -l unlimited in the launch script; containers: --ulimit memlock=-1.",
        )
