"""What was measured, as plain numbers: by every rank alone, and by ranks together. Torch-free, and JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

UNITS = {
    "gemm_bf16_burst": "TFLOP/s",
    "gemm_bf16": "TFLOP/s",
    "gemm_fp8_burst": "TFLOP/s",
    "gemm_fp8": "TFLOP/s",
    "gemm_fp32": "TFLOP/s",
    "attention_forward": "TFLOP/s",
    "attention": "TFLOP/s",
    "memory_copy": "GB/s",
    "host_to_device": "GB/s",
    "device_to_host": "GB/s",
    "storage_read": "GB/s",
    "storage_random": "GB/s",
    "checkpoint_write": "GB/s",
    "loader": "tokens/s",
}
"""Of one rank alone. GB are 10^9 bytes. `gemm_*` are sustained for seconds; `*_burst` is the best of short ones.
`attention` is forward and backward, 3.5 times the forward's FLOPs (the scores are computed again)."""

SHARED = ("storage_read", "storage_random", "checkpoint_write", "loader")
"""Rates that ranks of a node take from each other, and from what the system remembers: compared between nodes alone."""

TITLES = {
    "gemm_bf16_burst": "bf16 matrix product, burst",
    "gemm_bf16": "bf16 matrix product, sustained",
    "gemm_fp8_burst": "fp8 matrix product, burst",
    "gemm_fp8": "fp8 matrix product, sustained",
    "gemm_fp32": "fp32 matrix product, sustained",
    "attention_forward": "causal attention, forward",
    "attention": "causal attention, forward and backward",
    "memory_copy": "device memory, copy (read and write)",
    "host_to_device": "host to device, pinned",
    "device_to_host": "device to host, pinned",
    "storage_read": "storage, in order",
    "storage_random": "storage, at random places",
    "checkpoint_write": "checkpoint write, synced",
    "loader": "data loader",
}


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank: where it is, and its own rates by name of `UNITS`."""

    rank: int
    node: int
    host: str
    gpu: int
    """Number on its node."""
    device: str
    rates: Mapping[str, float]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """What was not measured, and why."""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord:
    """One collective over all ranks at one size."""

    name: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, send."""
    size_bytes: int
    """Of the full tensor: what all ranks together have in the end; of a send, what is sent."""
    seconds: float
    """Median over repetitions, of the slowest rank."""
    bus_gb_per_s: float
    """As nccl-tests counts it: comparable with the rate of a link."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything of one measurement."""

    ranks: tuple[RankRecord, ...]
    backend: str
    """nccl or gloo; empty for one rank."""
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """GB/s from one rank to another of the same node."""
    nodes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """GB/s from one node to another, all ranks of both together."""
    collectives: tuple[CollectiveRecord, ...] = ()
    seconds: float = 0.0
    """That measuring took."""

    @property
    def num_nodes(self) -> int:
        return len({record.node for record in self.ranks})

    def values(self, name: str) -> dict[int, float]:
        """A rate by rank, of those that have it."""
        return {record.rank: record.rates[name] for record in self.ranks if name in record.rates}

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "backend": self.backend,
            "ranks": [asdict(record) for record in self.ranks],
            "pairs": {f"{one}-{other}": rate for (one, other), rate in self.pairs.items()},
            "nodes": {f"{one}-{other}": rate for (one, other), rate in self.nodes.items()},
            "collectives": [asdict(record) for record in self.collectives],
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Measured:
        """What `as_dict` gave."""

        def two(text: str) -> tuple[int, int]:
            one, _, other = text.partition("-")
            return int(one), int(other)

        return cls(
            ranks=tuple(RankRecord(**record) for record in values["ranks"]),
            backend=values["backend"],
            pairs={two(name): rate for name, rate in values["pairs"].items()},
            nodes={two(name): rate for name, rate in values["nodes"].items()},
            collectives=tuple(CollectiveRecord(**record) for record in values["collectives"]),
            seconds=values["seconds"],
        )
