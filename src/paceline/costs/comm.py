"""How long does a collective take? Latency and a bandwidth that grows with the message, over a described topology.

A group of ranks lies in domains of fast links (NVLink in a node, or in a rack) that a network joins. With g ranks of
the group in a domain, all their cards carry its traffic, so the group's bus bandwidth is the smaller of the fast link's
and g network cards'. Ring figures, bytes on the wire of each rank for a tensor of S bytes over n ranks:

| collective | wire |
| --- | --- |
| all-gather, reduce-scatter | (n - 1) / n S |
| all-reduce | 2 (n - 1) / n S |
| all-to-all | (n - 1) / n of what a rank sends |
| send | S |

Time = latency + (wire + sqrt(wire * ramp)) / bandwidth: small messages do not fill the links. Measured between two
H200s (325, 290, 239 and 178 GB/s of an all-reduce of 1 GB, 256 MB, 64 MB and 16 MB) the ramp is about 10 MB.
Sources: NCCL's performance document (bus bandwidth), arXiv:1909.09756 (trees: latency grows as log n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.costs.workload import Cluster

RAMP_BYTES = 10e6


@dataclass(frozen=True, kw_only=True)
class Group:
    """Where the ranks of one axis lie: `size` of them, `stride` apart."""

    size: int
    inside: int
    """Of them in one domain of fast links."""
    fast_gb_per_s: float
    node_gb_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, size: int, stride: int) -> Group:
        """The ranks r, r + stride, r + 2 stride ... of one axis."""
        inside = max(1, min(size, cluster.domain // stride)) if stride < cluster.domain else 1
        fast = cluster.gpu.nvlink_gb_per_s or (cluster.gpu.pcie_gb_per_s or 16.0) * 0.5
        return cls(
            size=size,
            inside=inside,
            fast_gb_per_s=fast,
            node_gb_per_s=cluster.node_gb_per_s / cluster.oversubscription,
        )

    @property
    def crosses(self) -> bool:
        """Whether it leaves a domain."""
        return self.size > self.inside

    @property
    def fast_wire(self) -> float:
        """Seconds for a byte of wire at the fast link's full rate; 0 where nothing goes over it."""
        return 1e-9 / self.fast_gb_per_s if self.size > 1 and not self.crosses else 0.0

    @property
    def node_wire(self) -> float:
        """Seconds for a byte of wire of a collective that crosses domains: the cards of all its ranks carry it."""
        return 1e-9 / min(self.fast_gb_per_s, self.inside * self.node_gb_per_s) if self.crosses else 0.0

    @property
    def steps(self) -> float:
        """Latencies of a collective one after another: between domains as a tree, within one as one."""
        return 1.0 + math.log2(self.size / self.inside) if self.size > 1 else 0.0

    @property
    def share(self) -> float:
        """(n - 1) / n."""
        return 1.0 - 1.0 / self.size


def ramped(wire_bytes: float) -> float:
    """Bytes that, at full bandwidth, take as long as these do."""
    return wire_bytes + math.sqrt(wire_bytes * RAMP_BYTES)
