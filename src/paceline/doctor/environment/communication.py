"""Variables of NCCL and gloo, against the nodes, their network and each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.doctor.environment.situation import Judged, Rule, Situation, judged, many_nodes, switched_on


def _ib_disabled(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    if not switched_on(environ, "NCCL_IB_DISABLE"):
        return
    many = many_nodes(situation)
    yield judged(
        "NCCL_IB_DISABLE",
        "note" if many is False else "warning",
        "env.ib-disabled",
        "NCCL_IB_DISABLE=1: InfiniBand and RoCE are switched off, nodes talk over TCP sockets",
        "Sockets carry 1 to 3 GB/s where a 400 Gb/s card carries 50. GPUs then show 100 % utilisation while they wait "
        "in NCCL: utilisation is no proof of work."
        + (" This job has one node, where it changes nothing." if many is False else ""),
        "unset NCCL_IB_DISABLE. If nodes then fail to connect: NCCL_DEBUG=INFO, and paceline doctor nccl LOG.",
        None if many is False else "steps up to 8 times as fast on many nodes (llm-foundry #336)",
    )


def _peer_access(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    off = switched_on(environ, "NCCL_P2P_DISABLE") or environ.get("NCCL_P2P_LEVEL", "").strip().upper() in ("LOC", "0")
    if not off or situation.gpus_per_node == 1:
        return
    name = "NCCL_P2P_DISABLE" if switched_on(environ, "NCCL_P2P_DISABLE") else "NCCL_P2P_LEVEL"
    link = situation.card.nvlink_gb_per_s if situation.card else None
    rate = f" NVLink of {situation.card.name} carries {link:.0f} GB/s." if situation.card and link else ""
    yield judged(
        name,
        "warning",
        "env.p2p-disabled",
        f"{name}={environ[name]}: GPUs of a node do not reach each other directly",
        f"All traffic inside a node goes through host memory, at 10 to 35 GB/s.{rate} It is a workaround for a broken "
        "PCIe or IOMMU set-up, not a setting.",
        f"unset {name} and run paceline doctor --measure. If it hangs, look at ACS and the IOMMU (docs/doctor.md).",
        "tensor parallelism becomes usable again" if link else None,
    )
    if switched_on(environ, "NCCL_SHM_DISABLE"):
        yield judged(
            "NCCL_SHM_DISABLE",
            "warning",
            "env.shm-disabled",
            f"NCCL_SHM_DISABLE=1 beside {name}: GPUs of one node talk over the network card",
            "Without peer access and shared memory nothing else is left.",
            "unset NCCL_SHM_DISABLE.",
        )


def _interfaces(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(name, "").strip()
        if not value:
            continue
        exact = name.startswith("GLOO")
        if exact and value.startswith(("=", "^")):
            yield judged(
                name,
                "error",
                "env.interface-syntax",
                f"{name}={value}: gloo takes plain names, without = and ^",
                "It looks for an interface of exactly that name and finds none. Prefixes and signs are NCCL's.",
                f"export {name}={value.lstrip('=^')}",
            )
            continue
        yield from _loopback(name, value, situation)
        yield from _no_match(name, value, situation, exact=exact)


def _loopback(name: str, value: str, situation: Situation) -> Iterator[Judged]:
    if value.startswith("^") or any(part.strip().lstrip("=") != "lo" for part in value.split(",")):
        return
    many = many_nodes(situation)
    if many is False:
        return
    yield judged(
        name,
        "error" if many else "warning",
        "env.loopback",
        f"{name}={value}: the loopback interface cannot join nodes",
        f"A job of {situation.nodes} nodes would wait for connections to itself until it times out."
        if many
        else "With more than one node every connection fails or waits until it times out.",
        f"unset {name}, or name the interface of the network between nodes (ip -br addr); names may differ from node "
        "to node: eno1,eth0.",
    )


def interfaces_matching(value: str, interfaces: tuple[str, ...]) -> list[str]:
    """The interfaces that NCCL's filter lets through: ``eth`` prefixes, ``=eth0`` exact, ``^docker`` all but these."""
    exclude = value.startswith("^")
    body = value.removeprefix("^")
    exact = body.startswith("=")
    parts = [part.strip() for part in body.removeprefix("=").split(",") if part.strip()]
    hit = [each for each in interfaces if any(each == part if exact else each.startswith(part) for part in parts)]
    return [each for each in interfaces if each not in hit] if exclude else hit


def _no_match(name: str, value: str, situation: Situation, *, exact: bool) -> Iterator[Judged]:
    if situation.interfaces is None:
        return
    found = interfaces_matching(f"={value}" if exact else value, situation.interfaces)
    if not found:
        yield judged(
            name,
            "error",
            "env.no-interface",
            f"{name}={value} matches none of this machine's network interfaces",
            f"There are {', '.join(situation.interfaces) or 'none'}.",
            f"Set it to one of these, or unset {name}.",
        )


def _hca(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    value = environ.get("NCCL_IB_HCA", "").strip()
    loose = [part for part in value.lstrip("^").split(",") if part.split(":")[0][-1:].isdigit()]
    if loose and not value.lstrip("^").startswith("=") and any(part.split(":")[0].endswith("1") for part in loose):
        yield judged(
            "NCCL_IB_HCA",
            "note",
            "env.hca-prefix",
            f"NCCL_IB_HCA={value} names prefixes: {loose[0].split(':')[0]} also stands for "
            f"{loose[0].split(':')[0]}0 and so on",
            "Without = NCCL takes every card whose name begins so.",
            f"export NCCL_IB_HCA=={value.lstrip('=')}" if not value.startswith("^") else "Write ^= for exact names.",
        )


def _algorithms(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    value = environ.get("NCCL_ALGO", "").strip().lower()
    plain = value and not any(sign in value for sign in "^:;")
    if plain and "ring" not in value.split(","):
        yield judged(
            "NCCL_ALGO",
            "warning",
            "env.no-ring",
            f"NCCL_ALGO={environ['NCCL_ALGO']} leaves out ring",
            "From NCCL 2.24 on, an operation that has none of the algorithms listed fails: trees exist for all-reduce "
            "alone, and FSDP and ZeRO need all-gather and reduce-scatter.",
            "unset NCCL_ALGO, or limit it to one operation: NCCL_ALGO=allreduce:tree.",
        )
    protocol = environ.get("NCCL_PROTO", "").strip().lower()
    if "ll128" in protocol and "^" not in protocol:
        yield judged(
            "NCCL_PROTO",
            "warning",
            "env.ll128",
            f"NCCL_PROTO={environ['NCCL_PROTO']} forces LL128",
            "On a machine that does not support it, LL128 can corrupt data; NCCL chooses it where it is safe.",
            "unset NCCL_PROTO.",
        )


def _sockets(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    try:
        threads = int(environ.get("NCCL_SOCKET_NTHREADS", "1"))
        each = int(environ.get("NCCL_NSOCKS_PERTHREAD", "1"))
    except ValueError:
        return
    if threads * each > 64:
        yield judged(
            "NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD",
            "error",
            "env.too-many-sockets",
            f"NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD = {threads} x {each} = {threads * each} is above 64",
            "NCCL allows 64 sockets for a connection.",
            "Lower one of them; 4 x 4 is usual for 100 Gb/s.",
        )


def _nvls(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    if environ.get("NCCL_NVLS_ENABLE", "").strip() == "0":
        yield judged(
            "NCCL_NVLS_ENABLE",
            "warning",
            "env.nvls-off",
            "NCCL_NVLS_ENABLE=0: reductions are not done in NVSwitch",
            "It is the usual escape from errors of NVLink SHARP after a restart of the fabric manager, and saves some "
            "memory; all-reduce inside an NVSwitch node of Hopper or later becomes slower.",
            "Reset the GPUs or reboot the node so that the fabric is whole again; then unset NCCL_NVLS_ENABLE.",
        )


def _error_handling(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    value = environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "").strip()
    # torchrun sets 1 for its processes where nothing is set
    by_torchrun = value == "1" and "TORCHELASTIC_RUN_ID" in environ
    if value in ("0", "1", "2"):
        yield judged(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "note" if by_torchrun else "warning",
            "env.error-handling",
            f"TORCH_NCCL_ASYNC_ERROR_HANDLING={value}" + (", which torchrun sets" if by_torchrun else ""),
            "A rank that fails leaves the others waiting until someone ends the job."
            if value == "0"
            else "The communicator is aborted before the flight recorder has written, so a hang leaves no trace.",
            "export TORCH_NCCL_ASYNC_ERROR_HANDLING=3, the default of torch"
            + (", before torchrun." if by_torchrun else "."),
        )


def _messages(environ: Mapping[str, str], situation: Situation) -> Iterator[Judged]:
    value = environ.get("NCCL_DEBUG", "").strip().upper()
    if value in ("WARN", "ATTN"):
        yield judged(
            "NCCL_DEBUG NCCL_DEBUG_LEVELS",
            "note",
            "env.messages",
            f"NCCL_DEBUG={value} prints warnings of NCCL",
            "That is cheap, and the reason of a failure stands there.",
            "Keep it.",
        )


COMMUNICATION: tuple[Rule, ...] = (
    _ib_disabled,
    _peer_access,
    _interfaces,
    _hca,
    _algorithms,
    _sockets,
    _nvls,
    _error_handling,
    _messages,
)
