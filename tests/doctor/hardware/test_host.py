"""The host around the GPUs, from a made-up file system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.doctor.hardware.host import Host, Port, host_table, judge_host, read_host

GOOD = Host(
    name="node1", cpus=frozenset(range(128)), memory_bytes=2**41, shm_bytes=2**36,
    ports=(Port(name="mlx5_0:1", state="ACTIVE", gbit=400.0, layer="InfiniBand"),),
    peermem=True, dmabuf=False, memlock_bytes=None, interfaces=("lo", "eth0"), container=False,
)  # fmt: skip


def ids(host: Host, gpus: int = 8, nodes: int | None = 2) -> dict[str, str]:
    return {finding.id: finding.severity for finding in judge_host(host, gpus=gpus, nodes=nodes)}


def test_a_good_host() -> None:
    assert ids(GOOD) == {}


@pytest.mark.parametrize(
    ("change", "id", "severity"),
    [
        ({"shm_bytes": 64 * 2**20}, "host.shm", "error"),  # case 39: before the run
        ({"shm_bytes": 512 * 2**20}, "host.shm", "warning"),
        ({"cpus": frozenset(range(32))}, "host.cores", "warning"),
        ({"memory_bytes": 2**36}, "host.memory", "warning"),
        ({"ports": ()}, "host.no-rdma", "warning"),
        ({"ports": (Port(name="a:1", state="DOWN", gbit=10.0, layer="InfiniBand"),)}, "host.port-down", "error"),
        ({"ports": (*GOOD.ports, Port(name="a:1", state="DOWN", gbit=10.0, layer="E"))}, "host.port-down", "note"),
        ({"ports": (*GOOD.ports, Port(name="a:1", state="ACTIVE", gbit=25.0, layer="E"))}, "host.port-rate", "note"),
        ({"peermem": False}, "host.gpudirect", "warning"),
        ({"peermem": None, "dmabuf": None}, "host.gpudirect", "note"),
        ({"memlock_bytes": 65536}, "host.memlock", "error"),
    ],
)
def test_what_is_poor(change: dict[str, object], id: str, severity: str) -> None:
    assert ids(replace(GOOD, **change))[id] == severity  # type: ignore[arg-type]


def test_one_node_needs_no_network() -> None:
    assert ids(replace(GOOD, ports=(), peermem=None), nodes=1) == {}
    assert ids(replace(GOOD, shm_bytes=64 * 2**20), gpus=1)["host.shm"] == "warning"


def test_the_shm_finding_does_not_send_to_the_disk() -> None:  # case 39
    (finding,) = judge_host(replace(GOOD, shm_bytes=64 * 2**20), gpus=8, nodes=1)
    assert "--shm-size" in finding.next_step and "no disk is full" in finding.evidence


def test_files_of_the_system(tmp_path: Path) -> None:
    for path, text in (
        ("proc/modules", "nvidia_peermem 12288 0 - Live\nib_core 491520 9 nvidia_peermem, Live\n"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n"),
        ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand\n"),
        ("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    host = read_host(tmp_path)
    assert host.peermem is True and host.dmabuf is True and host.shm_bytes is None
    assert host.ports[0] == Port(name="mlx5_0:1", state="ACTIVE", gbit=400.0, layer="InfiniBand")
    assert host.ports[1] == Port(name="mlx5_1:1", state="DOWN", gbit=None, layer="unknown")
    shown = dict(host_table(host).rows)
    assert shown["GPUDirect"] == "nvidia_peermem is loaded" and "400" in shown["mlx5_0:1"]


def test_nothing_there(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    assert (host.peermem, host.dmabuf, host.shm_bytes, host.ports) == (None, None, None, ())
    assert host.cores >= 1 and "lo" in host.interfaces
