"""Which way does the traffic take, and why not a faster one?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.environment.judge import judge as judge_environment
from paceline.doctor.environment.situation import Situation
from paceline.doctor.nccl.failures import failures, is_known
from paceline.doctor.nccl.log import NcclLog
from paceline.doctor.nccl.watchdog import find_stuck, judge_stuck
from paceline.report.finding import Finding
from paceline.report.table import Table, table

_SHOWN = 5
_SOCKETS = ("Socket", "FastSocket")
"""Networks over TCP, NCCL's own and Google's."""


def judge(log: NcclLog, *, card: str | None = None) -> list[Finding]:
    """Everything that a log tells."""
    stuck, last = find_stuck([*log.warnings, *log.others])
    return [
        *failures([*log.warnings, *log.others], card=card),
        *judge_stuck(stuck, last, log.num_ranks),
        *_versions(log),
        *_start(log),
        *_between_nodes(log),
        *_gpudirect(log),
        *_inside_nodes(log),
        *_channels(log),
        *_unknown(log),
        *_settings(log),
    ]


def log_table(log: NcclLog) -> Table:
    """What was chosen."""
    networks = ", ".join(log.networks) or "not said"
    rows = [
        ("NCCL", ", ".join(sorted(log.versions)) or "not said"),
        ("ranks, hosts", f"{log.num_ranks or '?'}, {len(log.hosts) or '?'}"),
        ("network", networks),
        ("cards", ", ".join(sorted(log.cards)) or "none named"),
        ("interface", ", ".join(sorted(log.interfaces)) or "not said"),
        *((f"via {name}", f"{count} connections") for name, count in log.transports.most_common()),
    ]
    if log.rings:
        first = log.rings[min(log.rings)]
        shown = " ".join(map(str, first[:16])) + (" ..." if len(first) > 16 else "")
        rows.append(("rings", f"{len(log.rings)}; the first: {shown}"))
    if log.channels:
        rows.append(("channels", ", ".join(f"{count} {kind}" for kind, count in log.channels.items() if count)))
    return table(("", ""), rows, title="NCCL")


def _versions(log: NcclLog) -> Iterator[Finding]:
    if len(log.versions) > 1:
        yield Finding(
            id="nccl.versions-differ",
            severity="error",
            subject=f"ranks run different versions of NCCL: {', '.join(sorted(log.versions))}",
            evidence="They do not speak the same protocol; start-up hangs or fails. (If the log holds several jobs, "
            "read one at a time.)",
            next_step="The same environment or container on every node; look for an NCCL in LD_LIBRARY_PATH or "
            "LD_PRELOAD.",
        )


def _start(log: NcclLog) -> Iterator[Finding]:
    for name, size in log.sizes.items():
        started = {rank for communicator, rank in log.started if communicator == name}
        completed = {rank for communicator, rank in log.completed if communicator == name}
        stuck = sorted(started - completed)
        if not stuck:
            continue
        silent = sorted(set(range(size)) - started)
        yield Finding(
            id="nccl.start-incomplete",
            severity="error",
            subject=f"{len(stuck)} of {size} ranks began and did not finish start-up",
            evidence=f"Ranks {_some(stuck)} have Init START without Init COMPLETE."
            + (f" Of ranks {_some(silent)} there is no line." if silent else ""),
            next_step="Look for warnings above. If ranks are missing, look at their hosts; if the log was cut, read it "
            "whole.",
        )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _between_nodes(log: NcclLog) -> Iterator[Finding]:
    socket = any(name.startswith(_SOCKETS) for name in log.networks) or any(
        name.removeprefix("NET/").startswith(_SOCKETS) for name in log.transports
    )
    if not socket:
        if log.networks or log.cards:
            cards = ", ".join(sorted(log.cards)) or "cards not named"
            yield Finding(
                id="nccl.network",
                severity="note",
                subject=f"the network is {', '.join(log.networks) or 'IB'} ({len(log.cards)} cards: {cards})",
                evidence="RDMA is used between nodes.",
                next_step="Nothing.",
            )
        return
    why, step = _why_sockets(log)
    inside = log.spans_nodes is False
    yield Finding(
        id="nccl.sockets",
        severity="note" if inside else "warning",
        subject=f"NCCL talks over TCP sockets ({', '.join(sorted(log.interfaces)) or 'interface not said'}), not RDMA",
        evidence=why
        + (
            " All ranks are on one host, where the network is not used."
            if inside
            else " GPUs then show 100 % utilisation while they wait: utilisation is no proof of work."
        ),
        next_step="Nothing for one node." if inside else step,
        gain=None if inside else "steps up to 8 times as fast on many nodes (llm-foundry #336)",
    )


def _why_sockets(log: NcclLog) -> tuple[str, str]:
    if log.settings.get("NCCL_IB_DISABLE", "0") not in ("0", ""):
        return "RDMA is disabled by the environment: NCCL_IB_DISABLE=1.", "unset NCCL_IB_DISABLE."
    if log.settings.get("NCCL_NET", "").lower() == "socket":
        return "Sockets were asked for: NCCL_NET=Socket.", "unset NCCL_NET."
    if log.no_device:
        asked = log.settings.get("NCCL_IB_HCA")
        filtered = f" NCCL_IB_HCA={asked} may match none." if asked else ""
        return (
            f"NET/IB found no device.{filtered} Either there is no InfiniBand or RoCE card, or this container does not "
            "see it.",
            "On the host: ibv_devinfo and ls /sys/class/infiniband. In a container: --device=/dev/infiniband (or "
            "--privileged) and libibverbs. Without a card: data parallelism with few bytes a step (ZeRO-1, not FSDP "
            "across nodes).",
        )
    missing = next((text for text in log.plugin if "o plugin found" in text or "ould not find" in text), None)
    if missing:
        return (
            f"The network plugin was not found ({missing[:80]}), and the log does not say why NET/IB was not taken.",
            "On AWS install aws-ofi-nccl, on Google Cloud its plugin. Else log again with NCCL_DEBUG=INFO "
            "NCCL_DEBUG_SUBSYS=INIT,NET,ENV.",
        )
    return (
        "Why RDMA was not taken is not determined by this log.",
        "Log the start with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV on every rank.",
    )


def _gpudirect(log: NcclLog) -> Iterator[Finding]:
    remote = {name: count for name, count in log.transports.items() if name.startswith("NET/")}
    # Google's plugin names it in its own way: GPUDirectTCPX
    direct = sum(count for name, count in remote.items() if "GDRDMA" in name or "GPUDirect" in name)
    plain = sum(remote.values()) - direct - sum(count for name, count in remote.items() if "Socket" in name)
    disabled = log.gdr["Disabled"]
    if direct and not plain:
        yield Finding(
            id="nccl.gpudirect",
            severity="note",
            subject=f"all {direct} connections between nodes use GPUDirect RDMA",
            evidence="The network card reads and writes GPU memory itself.",
            next_step="Nothing.",
        )
    elif plain or (disabled and not direct):
        asked = log.settings.get("NCCL_NET_GDR_LEVEL")
        yield Finding(
            id="nccl.no-gpudirect",
            severity="warning",
            subject=(f"{plain} of {plain + direct} connections between nodes" if plain else "the network")
            + " go without GPUDirect RDMA",
            evidence=(f"NCCL says that it is disabled for a card ({disabled} lines). " if disabled else "")
            + (f"NCCL_NET_GDR_LEVEL={asked} is set. " if asked else "")
            + "Data takes the way through host memory. The cause is one of: the module nvidia_peermem (or dma-buf) is "
            "missing, the card is far from the GPU, a setting; which is not determined by these lines.",
            next_step="lsmod | grep peermem (sudo modprobe nvidia_peermem); nvidia-smi topo -m (PIX or PXB between GPU "
            "and card is near); NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH names the distance.",
            gain="up to twice the rate between nodes",
        )


def _inside_nodes(log: NcclLog) -> Iterator[Finding]:
    shared = {
        name: count for name, count in log.transports.items() if name.startswith("SHM") or "shared memory" in name
    }
    direct = {name: count for name, count in log.transports.items() if name.startswith("P2P")}
    if shared:
        off = log.settings.get("NCCL_P2P_DISABLE", "0") not in ("0", "") or log.settings.get("NCCL_P2P_LEVEL") == "LOC"
        pairs = sorted({tuple(sorted(pair)) for name in shared for pair in log.pairs[name]})
        yield Finding(
            id="nccl.host-memory",
            severity="warning",
            subject=f"GPUs of a node talk through host memory ({', '.join(sorted(shared))}): "
            f"{', '.join(f'{a}-{b}' for a, b in pairs[:_SHOWN])}{' ...' if len(pairs) > _SHOWN else ''}",
            evidence="Peer access is switched off by NCCL_P2P_DISABLE or NCCL_P2P_LEVEL."
            if off
            else "NCCL found no peer access for these pairs: no NVLink and too far apart on PCIe, forbidden by the "
            "driver, or in separate containers. Which of them is not determined here.",
            next_step="unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL, and measure: paceline doctor --measure."
            if off
            else "paceline doctor --topo with the text of nvidia-smi topo -m; nvidia-smi topo -p2p r.",
        )
    elif direct:
        yield Finding(
            id="nccl.peer-access",
            severity="note",
            subject=f"GPUs of a node reach each other directly ({', '.join(sorted(direct))})",
            evidence=f"{sum(direct.values())} connections; over NVLink or PCIe, whichever joins them.",
            next_step="Nothing.",
        )


def _channels(log: NcclLog) -> Iterator[Finding]:
    coll = log.channels["coll"] or len(log.rings)
    if not coll:
        return
    nvls = log.channels["nvls"]
    words = [f"{coll} channels for collectives"]
    if nvls:
        words.append(f"{nvls} for NVLink SHARP")
    if log.channels["collnet"]:
        words.append(f"{log.channels['collnet']} for SHARP in the network")
    said = f" NVLS multicast is {', '.join(log.nvls)}." if log.nvls else ""
    yield Finding(
        id="nccl.channels",
        severity="note",
        subject=", ".join(words),
        evidence=f"Each takes an SM while it communicates; NVSwitch nodes have 16 to 32, PCIe nodes 2 to 8.{said}",
        next_step="Nothing, unless far fewer than on like machines: then look at the links (paceline doctor --topo).",
    )


def _unknown(log: NcclLog) -> Iterator[Finding]:
    left = [(text, count) for text, count in log.warnings.most_common() if not is_known(text)]
    for text, count in left[:_SHOWN]:
        yield Finding(
            id="nccl.warning",
            severity="warning",
            subject=f"NCCL warns {count} times: {text[:160]}",
            evidence="Its cause is not determined: no rule knows this message.",
            next_step="Look it up with these words; log the lines before it with NCCL_DEBUG=INFO.",
        )


def _settings(log: NcclLog) -> list[Finding]:
    """NCCL names each variable that it obeys; they are judged as in the environment."""
    nodes = None if log.spans_nodes is None else 2 if log.spans_nodes else 1
    # the log exists because of NCCL_DEBUG, and NCCL_IB_DISABLE is what `nccl.sockets` speaks of
    left = {name: value for name, value in log.settings.items() if not name.startswith("NCCL_DEBUG")}
    left.pop("NCCL_IB_DISABLE", None)
    return judge_environment(left, Situation(nodes=nodes))
