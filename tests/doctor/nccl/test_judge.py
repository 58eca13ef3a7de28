"""What a log tells: the transport, why not a faster one, who hangs, what failed; and where it does not tell."""

from __future__ import annotations

import pytest

from paceline.doctor.nccl.judge import judge, log_table
from paceline.doctor.nccl.log import NcclLog, read_log
from paceline.report.finding import Finding
from tests.doctor.nccl import logs


def found(text: str, card: str | None = None) -> dict[str, Finding]:
    log = read_log(text.splitlines())
    assert log.lines > 0
    return {finding.id: finding for finding in judge(log, card=card)}


# ---- between nodes


def test_no_device_and_disabled_are_told_apart() -> None:  # case 8
    missing, disabled = found(logs.NO_DEVICE)["nccl.sockets"], found(logs.DISABLED)["nccl.sockets"]
    assert missing.severity == disabled.severity == "warning"
    assert "found no device" in missing.evidence and "eth0" in missing.subject
    assert "disabled by the environment" in disabled.evidence and disabled.next_step == "unset NCCL_IB_DISABLE."
    assert all("no proof of work" in finding.evidence for finding in (missing, disabled))


def test_sockets_of_an_old_version() -> None:
    assert "found no device" in found(logs.OLD_2_4)["nccl.sockets"].evidence


def test_sockets_without_a_reason_are_not_determined() -> None:
    finding = found("a:1:2 [0] NCCL INFO Using network Socket\nb:1:2 [0] NCCL INFO Using network Socket\n")
    assert "not determined" in finding["nccl.sockets"].evidence
    asked = found(
        "a:1:2 [0] NCCL INFO NCCL_NET set by environment to Socket.\na:1:2 [0] NCCL INFO Using network Socket"
    )
    assert "NCCL_NET=Socket" in asked["nccl.sockets"].evidence


def test_sockets_on_one_host_are_not_used() -> None:
    text = logs.HOST_MEMORY + "node1:1:2 [0] NCCL INFO Using network Socket\n"
    assert found(text)["nccl.sockets"].severity == "note"


def test_a_healthy_job() -> None:
    findings = found(logs.TWO_NODES_2_27)
    assert {finding.severity for finding in findings.values()} == {"note"}
    assert set(findings) == {"nccl.network", "nccl.gpudirect", "nccl.peer-access", "nccl.channels"}
    assert "2 channels for collectives, 16 for NVLink SHARP" in findings["nccl.channels"].subject
    log = read_log(logs.TWO_NODES_2_27.splitlines())
    assert log.hosts == {"node1", "node2"} and log.num_ranks == 4 and log.rings[0] == (0, 1, 2, 3)
    assert log.cards == {"mlx5_0:1/RoCE", "mlx5_1:1/RoCE"} and log.versions == {"2.27.6 (CUDA 13.0)": 1}
    shown = dict(log_table(log).rows)
    assert shown["via NET/IB/GDRDMA"] == "2 connections" and shown["rings"] == "2; the first: 0 1 2 3"


@pytest.mark.parametrize(
    ("line", "transport", "id"),
    [
        # of many versions and plugins, as in NVIDIA/nccl #333, #952, #1189, #1814
        ("h:1:2 [0] NCCL INFO Channel 09/0 : 33[1] -> 41[1] [send] via NET/IBext_v8/4", "NET/IBext_v8", "no-gpudirect"),
        ("h:1:2 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA", "NET/IB/GDRDMA", "gpudirect"),
        ("h:1:2 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read", "P2P/IPC/read", "peer-access"),
        ("h:1:2 [0] NCCL INFO Channel 07/0 : 15[7] -> 6[6] [send] via NET/Socket/3", "NET/Socket", "sockets"),
        ("h:1:2 [0] NCCL INFO Channel 00 : 0[1a000] -> 1[1b000] via P2P/IPC", "P2P/IPC", "peer-access"),
        ("h:1:2 [0] NCCL INFO Ring 00 : 15 -> 0 [receive] via NET/IB/0", "NET/IB", "no-gpudirect"),
        ("h:1:2 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via direct shared memory", "direct shared memory", "host-memory"),
        (
            "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA",
            "NET/AWS Libfabric/GDRDMA",
            "gpudirect",
        ),
        ("h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] via NET/FastSocket/0", "NET/FastSocket", "sockets"),
        ("h:1:2 [0] NCCL INFO Channel 0/0 : 0[0] -> 8[0] via NET/GPUDirectTCPX_v7/1(2)", None, "gpudirect"),
    ],
)
def test_transports_of_many_versions(line: str, transport: str | None, id: str) -> None:
    if transport is not None:
        assert list(read_log([line]).transports) == [transport]
    assert f"nccl.{id}" in found(line)


def test_rings_of_an_old_version() -> None:
    assert read_log(["x:1:2 [0] NCCL INFO Channel 00 :    0   1"]).rings == {0: (0, 1)}


def test_cards_of_several_ports() -> None:
    line = "x:1:2 [1] NCCL INFO NET/IB : Using [0]hfi1_0:1/IB [1]hfi1_1:1/IB/SHARP ; OOB ib0:10.10.10.2<0>"
    log = read_log([line])
    assert log.cards == {"hfi1_0:1/IB", "hfi1_1:1/IB/SHARP"} and log.interfaces == {"ib0"}


def test_without_gpudirect() -> None:
    finding = found(logs.NO_GPUDIRECT)["nccl.no-gpudirect"]
    assert "disabled for a card (2 lines)" in finding.evidence and "not determined" in finding.evidence
    assert "peermem" in finding.next_step


# ---- inside nodes


def test_host_memory_transport() -> None:  # case 36
    finding = found(logs.HOST_MEMORY)["nccl.host-memory"]
    assert "SHM/direct/direct" in finding.subject and "0-1" in finding.subject
    assert "switched off" in finding.evidence
    unset = logs.HOST_MEMORY.replace("NCCL_P2P_DISABLE", "NCCL_CROSS_NIC")
    assert "not determined" in found(unset)["nccl.host-memory"].evidence


def test_variables_that_nccl_names_are_judged() -> None:
    assert "env.p2p-disabled" in found(logs.HOST_MEMORY)
    assert "env.debug" not in found(logs.HOST_MEMORY + "n:1:2 [0] NCCL INFO NCCL_DEBUG set by environment to INFO.\n")


# ---- failures


def test_small_shared_memory() -> None:  # case 39
    finding = found(logs.SMALL_SHM)["nccl.shm-full"]
    assert "--shm-size" in finding.next_step and "No disk is full" in finding.evidence


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("Bootstrap : no socket interface found", "nccl.no-interface"),  # case 40 b
        ("Net : Connect to 10.0.0.7<41234> failed : No route to host", "nccl.no-route"),  # case 40 c
        ("node:1:2 [0] transport/nvls.cc:123 NCCL WARN Cuda failure 1 'invalid argument'", "nccl.nvls"),  # case 41
        ("n:1:2 [0] NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory ... CUDA error 401", "nccl.nvls"),
        ("n:1:2 [0] misc/ibvwrap.cc:288 NCCL WARN Call to ibv_reg_dmabuf_mr failed with error X", "nccl.dmabuf"),
        ("n:1:2 [0] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "nccl.memlock"),
        (
            "n:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.1<5> with status=12 opcode=1 vendor err 129",
            "nccl.ib-timeout",
        ),
        ("n:1:2 [0] NCCL WARN Message truncated : received 1024 bytes instead of 256", "nccl.mismatched-calls"),
        ("n:1:2 [0] NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "nccl.same-gpu"),
        ("n:1:2 [0] enqueue.cc:1 NCCL WARN Cuda failure 'out of memory'", "nccl.out-of-memory"),
        ("[2026-03-01 12:00:00] n:1:2 [0] x.cc:1 NCCL WARN a message nobody knows", "nccl.warning"),
        ("0: n:1:2 [0] NCCL WARN another 0x7f00 message", "nccl.warning"),
    ],
)
def test_messages(line: str, id: str) -> None:
    assert id in found(line)
    if id == "nccl.no-route":
        assert "no fault of CUDA" in found(line)[id].evidence
    if id == "nccl.nvls":
        assert "NCCL_NVLS_ENABLE=0" in found(line)[id].next_step
    if id == "nccl.warning":
        assert "not determined" in found(line)[id].evidence


def test_fabric_manager_by_the_card() -> None:  # case 41
    line = "CUDA error 802 system not yet initialized"
    sxm, pcie = (
        found(line, "NVIDIA H200")["nccl.fabric-manager"],
        found(line, "NVIDIA H100 PCIe")["nccl.fabric-manager"],
    )
    assert "nvidia-fabricmanager" in sxm.next_step
    assert "fabricmanager" not in pcie.next_step and "no fabric manager" in pcie.subject
    assert "not determined" in found(line)["nccl.fabric-manager"].subject


def test_the_same_warning_of_many_ranks_counts_once() -> None:
    text = "".join(
        f"n:{rank}:2 [0] NCCL WARN odd thing at 0x{rank:x} from 10.0.0.{rank}<4{rank}>\n" for rank in range(64)
    )
    warnings = [one for one in judge(read_log(text.splitlines())) if one.id == "nccl.warning"]
    assert len(warnings) == 1 and "64 times" in warnings[0].subject


def test_start_that_did_not_finish() -> None:
    cut = "\n".join(line for line in logs.TWO_NODES_2_27.splitlines() if "rank 3" not in line or "COMPLETE" not in line)
    assert "1 of 4 ranks" in found(cut)["nccl.start-incomplete"].subject
    silent = "\n".join(line for line in cut.splitlines() if "COMPLETE" not in line and "rank 2" not in line)
    assert "Of ranks 2 there is no line" in found(silent)["nccl.start-incomplete"].evidence


def test_versions_that_differ() -> None:
    text = logs.TWO_NODES_2_27 + "node2:1:2 [0] NCCL INFO NCCL version 2.21.5+cuda12.4\n"
    assert "2.21.5 (CUDA 12.4), 2.27.6 (CUDA 13.0)" in found(text)["nccl.versions-differ"].subject


# ---- timeouts (case 42)


def test_all_ranks_in_one_collective() -> None:
    text = "".join(logs.watchdog(rank) for rank in range(4))
    finding = found(text)["nccl.timeout"]
    assert "4 ranks" in finding.subject and "1580, ALLREDUCE" in finding.subject
    assert "Last completed: 1579" in finding.evidence and "not determined" in finding.next_step


def test_a_silent_rank_is_looked_at_first() -> None:
    started = "".join(
        f"n:{rank}:2 [0] NCCL INFO comm 0x1 rank {rank} nranks 4 cudaDev 0 commId 0x7 - Init {word}\n"
        for rank in range(4)
        for word in ("START", "COMPLETE")
    )
    text = started + "".join(logs.watchdog(rank) for rank in (0, 1, 3))
    assert "Ranks 2 say nothing" in found(text)["nccl.timeout"].evidence


def test_a_rank_that_skipped_a_collective() -> None:
    text = "".join(logs.watchdog(rank, 10, "ALLREDUCE") for rank in (0, 1, 3)) + logs.watchdog(2, 10, "_ALLGATHER_BASE")
    assert found(text)["nccl.diverged"].subject.endswith("on rank 2")


def test_sizes_that_differ() -> None:
    # as in pytorch/pytorch #140563: ranks 22 and 110 of many expect another size
    text = "".join(logs.watchdog(rank, 7, elements=1025 if rank in (22, 110) else 262144) for rank in range(128))
    finding = found(text)["nccl.diverged"]
    assert finding.subject.endswith("on rank 22, 110") and "1,025 in" in finding.evidence


def test_two_ranks_that_differ_leave_the_side_open() -> None:
    text = logs.watchdog(0, 10, "ALLREDUCE") + logs.watchdog(1, 11, "ALLREDUCE")
    assert "not determined" in found(text)["nccl.diverged"].subject


# ---- bad input


@pytest.mark.parametrize("text", ["", "hello\n", "\x00\x01\x02" * 100, "step 1 loss 2.0\n" * 10])
def test_what_is_no_log(text: str) -> None:
    assert read_log(text.splitlines()).lines == 0


def test_a_long_log_takes_little_room() -> None:
    log = read_log(
        f"n{index % 64}:1:2 [0] NCCL INFO Channel {index % 16:02d}/0 : {rank}[0] -> {(rank + 1) % 512}[1] via P2P/IPC"
        for index in range(50_000)
        for rank in [index % 512]
    )
    assert log.transports == {"P2P/IPC": 50_000} and len(log.pairs["P2P/IPC"]) == 512
    assert isinstance(log, NcclLog) and not log.others
