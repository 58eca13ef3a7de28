"""What do NCCL's warnings and CUDA's errors mean? A table of messages whose cause is known.

Each row: a pattern, the finding's id, what it means, what to do, the public report that confirmed it. A message that no
row knows is reported as it is, its cause not determined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.report.finding import Finding, Severity


@dataclass(frozen=True, kw_only=True)
class Failure:
    id: str
    pattern: str
    subject: str
    evidence: str
    next_step: str
    severity: Severity = "error"


_FABRIC = (
    "Reset the GPUs (nvidia-smi -r with no job on them) or reboot the node: after a restart of the fabric manager the "
    "fabric's state is lost. Until then NCCL_NVLS_ENABLE=0 is an escape, and slower."
)

FAILURES: tuple[Failure, ...] = (
    Failure(
        id="nccl.shm-full",
        pattern=r"posix_fallocate failed : No space left|creating shared memory segment|/dev/shm/nccl|"
        r"shm_open failed|Error: failed to extend /dev/shm",
        subject="/dev/shm is too small for NCCL's shared memory",
        evidence="Containers get 64 MiB unless told otherwise; GPUs without peer access need about 10 MB for each "
        "connection (nccl #342, #290). No disk is full.",
        next_step="Start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of medium "
        "Memory on /dev/shm. Look: df -h /dev/shm.",
    ),
    Failure(
        id="nccl.no-interface",
        pattern=r"no socket interface found|No interface found|Bootstrap : .*no .*interface",
        subject="no network interface passes the filter",
        evidence="NCCL_SOCKET_IFNAME matched none of this host's interfaces. The form =name (exact) is not read by "
        "every build; without = it is a prefix (nccl #286).",
        next_step="ip -br addr lists the interfaces; set NCCL_SOCKET_IFNAME to the start of one of them, or unset it.",
    ),
    Failure(
        id="nccl.no-route",
        pattern=r"(?i)connect to .* failed : (No route to host|Connection refused|Connection timed out)|"
        r"socketStartConnect: Connect to|Net : Connect to .* failed",
        subject="a rank cannot reach another over the network",
        evidence="A firewall, a route or the wrong interface lies between nodes; it is no fault of CUDA or the GPUs "
        "(nccl #1105, by its symptom).",
        next_step="From the host that says it: nc -vz OTHER_HOST PORT, and ping over the interface that NCCL names. "
        "Open the ports between nodes, or name the right network: NCCL_SOCKET_IFNAME.",
    ),
    Failure(
        id="nccl.nvls",
        pattern=r"nvls\.cc.*(Cuda failure|invalid argument)|bind NVLink SHARP|NVLS.*CUDA error 401|Multicast memory",
        subject="NVLink SHARP (NVLS) cannot be set up: the NVSwitch fabric is not whole",
        evidence="Two GPUs may still work where three or more fail. It is seen after the fabric manager was restarted "
        "under load, or runs in another version than the driver (nccl #976, #1488, #1562).",
        next_step=_FABRIC,
    ),
    Failure(
        id="nccl.memlock",
        pattern=r"ibv_(reg_mr|create_qp|create_cq)\w* failed with error Cannot allocate memory",
        subject="InfiniBand may not lock enough memory",
        evidence="The limit of locked memory (ulimit -l) is small; RDMA pins its buffers.",
        next_step="ulimit -l unlimited in the launch script; containers: --ulimit memlock=-1; Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK.",
    ),
    Failure(
        id="nccl.dmabuf",
        pattern=r"ibv_reg_dmabuf_mr failed|Call to ibv_reg_mr(_iova2)? failed with error Bad address",
        subject="the network card cannot register GPU memory",
        evidence="Driver, kernel or card do not agree on dma-buf, and the module nvidia_peermem is not loaded "
        "(nccl #778).",
        next_step="sudo modprobe nvidia_peermem; or NCCL_DMABUF_ENABLE=0 to go by that module; newer card firmware and "
        "driver.",
    ),
    Failure(
        id="nccl.ib-timeout",
        pattern=r"status=12|got completion .* error 12|vendor err 129|async event : (local )?(port|link)|"
        r"Got async (fatal )?event",
        subject="InfiniBand or RoCE gave up on a peer",
        evidence="The other side did not answer within the timeout: a link that is down, a dead peer, the wrong GID of "
        "a RoCE card, or a congested network. Which of them is not determined by the log.",
        next_step="ibstat on both hosts (State: Active); show_gids and NCCL_IB_GID_INDEX for RoCE; ib_write_bw between "
        "the two; on very large networks NCCL_IB_TIMEOUT=22.",
    ),
    Failure(
        id="nccl.mismatched-calls",
        pattern=r"Message truncated|Mismatched collective|different number of elements|invalid usage.*(size|count)",
        subject="ranks call collectives of different sizes",
        evidence="One rank sent more than another expected: programs went apart, by uneven batches, different code or "
        "a rank-dependent branch.",
        next_step="Find the first collective that differs: TORCH_DISTRIBUTED_DEBUG=DETAIL, or the flight recorder.",
    ),
    Failure(
        id="nccl.same-gpu",
        pattern=r"Duplicate GPU detected",
        subject="two ranks use the same GPU",
        evidence="LOCAL_RANK is not used to choose the GPU, or CUDA_VISIBLE_DEVICES shows every process the same one.",
        next_step="Start one process a GPU: paceline train RECIPE --nproc N, or torchrun.",
    ),
    Failure(
        id="nccl.versions-differ",
        pattern=r"(?i)mismatch.*NCCL version|Mismatched NCCL",
        subject="ranks run different versions of NCCL",
        evidence="They do not speak the same protocol.",
        next_step="The same environment or container on every node; look for an NCCL in LD_LIBRARY_PATH or LD_PRELOAD.",
    ),
    Failure(
        id="nccl.out-of-memory",
        pattern=r"(?i)Cuda failure.*out of memory",
        subject="NCCL found no GPU memory for its buffers",
        evidence="NCCL takes 0.3 to 2 GiB of each GPU outside torch's allocator.",
        next_step="Leave more free: paceline plan shows the memory of layouts; another program may hold some "
        "(nvidia-smi).",
    ),
    Failure(
        id="nccl.iommu",
        pattern=r"(?i)iommu|P2P is disabled between connected|Could not enable P2P|ACS",
        subject="peer access between GPUs does not work as the links promise",
        evidence="The IOMMU or PCIe ACS stands between them, or the driver forbids it (virtual machines, some consumer "
        "cards).",
        next_step="sudo lspci -vvv > lspci.txt; paceline doctor --lspci lspci.txt. Bare machines: IOMMU and ACS off in "
        "the BIOS.",
        severity="warning",
    ),
)

_FABRIC_MANAGER = re.compile(r"(?i)(cuda (error|failure) 802|system not yet initialized)")
_SXM = re.compile(r"(?i)\b(SXM\d?|HGX|DGX|NVL72|H200|B200|B300|GB200|GB300|H100 80GB HBM3|A100-SXM)")
_PCIE = re.compile(r"(?i)\b(PCIe|RTX|L40S?|A10|A30|A40|T4|H100 NVL)\b")


def failures(texts: Iterable[str], *, card: str | None = None) -> Iterator[Finding]:
    """Findings about messages, one for each kind, with how often it was said.

    Args:
        card: the GPU's name, which decides what a CUDA error 802 means.
    """
    lines = list(texts)
    counts: dict[str, list[str]] = {}
    for text in lines:
        known = next((row for row in FAILURES if re.search(row.pattern, text)), None)
        if known is not None:
            counts.setdefault(known.id, []).append(text)
    for row in FAILURES:
        if found := counts.get(row.id):
            yield Finding(
                id=row.id,
                severity=row.severity,
                subject=row.subject,
                evidence=f'{row.evidence} Said: "{found[0][:160]}".',
                next_step=row.next_step,
            )
    if uninitialized := [text for text in lines if _FABRIC_MANAGER.search(text)]:
        yield _fabric_manager(uninitialized[0], card or " ".join(lines))


def is_known(text: str) -> bool:
    return any(re.search(row.pattern, text) for row in FAILURES) or _FABRIC_MANAGER.search(text) is not None


def _fabric_manager(said: str, card: str) -> Finding:
    sxm, pcie = _SXM.search(card), _PCIE.search(card)
    if sxm and not pcie:
        subject = "CUDA is not initialized: the fabric manager does not run, or in another version than the driver"
        step = (
            "systemctl status nvidia-fabricmanager on the host; install the version of the driver, start it, and reset "
            "the GPUs."
        )
    elif pcie:
        subject = "CUDA is not initialized; this is a PCIe card, which has no fabric manager"
        step = "Driver and kernel module of one version? dmesg | grep -i nvrm; nvidia-smi; reboot after an update."
    else:
        subject = "CUDA is not initialized (error 802); why is not determined without the GPU's name"
        step = (
            "nvidia-smi -L. On SXM and HGX machines: systemctl status nvidia-fabricmanager. On PCIe cards: dmesg | "
            "grep -i nvrm."
        )
    return Finding(
        id="nccl.fabric-manager",
        severity="error",
        subject=subject,
        evidence=f'On NVSwitch machines GPUs wait for the fabric manager (pytorch #35710). Said: "{said[:160]}".',
        next_step=step,
    )
