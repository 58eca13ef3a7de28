"""Measurements that were never made: healthy machines of a size, and one thing wrong with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from paceline.doctor.measured.record import CollectiveRecord, Measured, RankRecord

H200 = {
    "gemm_bf16_burst": 768.0, "gemm_bf16": 664.0, "gemm_fp8_burst": 1444.0, "gemm_fp8": 1271.0,
    "attention_forward": 553.0, "attention": 522.0, "memory_copy": 4280.0, "host_to_device": 55.0,
    "device_to_host": 55.0,
}  # fmt: skip
"""Two of them, as measured."""

BUS = {
    ("all_reduce", 2**24): 178.0, ("all_reduce", 2**26): 239.0, ("all_reduce", 2**28): 290.0,
    ("all_reduce", 2**30): 325.0, ("all_gather", 2**30): 276.0, ("reduce_scatter", 2**30): 257.0,
    ("all_to_all", 2**30): 322.0, ("send", 2**30): 349.0,
}  # fmt: skip


def healthy(nodes: int, per_node: int, *, seed: int = 0, spread: float = 0.01, device: str = "NVIDIA H200") -> Measured:
    """Ranks that differ by one percent, as like machines do."""
    draw = random.Random(seed)

    def about(value: float) -> float:
        return value * draw.gauss(1.0, spread)

    count = nodes * per_node
    ranks = tuple(
        RankRecord(
            rank=rank, node=rank // per_node, host=f"node{rank // per_node}", gpu=rank % per_node, device=device,
            rates={name: about(rate) for name, rate in H200.items()}, versions={"torch": "2.11.0", "nccl": "2.28.9"},
        )
        for rank in range(count)
    )  # fmt: skip
    pairs = {
        (a, b): about(340.0) for a in range(count) for b in range(count) if a != b and a // per_node == b // per_node
    }
    between = {(a, (a + shift) % nodes): about(380.0) for a in range(nodes) for shift in range(1, min(nodes, 4))}
    collectives = tuple(
        CollectiveRecord(name=name, size_bytes=size, seconds=1e-3, bus_gb_per_s=bus)
        for (name, size), bus in BUS.items()
    )
    return Measured(
        ranks=ranks, backend="nccl" if count > 1 else "", pairs=pairs, nodes=between if nodes > 1 else {},
        collectives=collectives if count > 1 else (),
    )  # fmt: skip


def slowed(measured: Measured, name: str, share: float, which: Callable[[RankRecord], bool]) -> Measured:
    """The ranks that `which` names reach only a share of a rate."""
    ranks = tuple(
        replace(one, rates={**one.rates, name: one.rates[name] * share}) if which(one) else one
        for one in measured.ranks
    )
    return replace(measured, ranks=ranks)
