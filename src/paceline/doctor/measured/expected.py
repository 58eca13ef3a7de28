"""What should this hardware give? Published peaks times the share that healthy machines reach. Torch-free.

Shares come from what other scripts measured on two H200s of one host (torch 2.11, NCCL 2.28, driver 580), beside the
figures of `costs/hardware`:

| what | measured | of | share |
| --- | --- | --- | --- |
| bf16 product, sustained | 664 TFLOP/s | the best large product (0.80 x 989) | 0.84 |
| fp8 product, sustained | 1271 | the best (0.73 x 1979) | 0.88 |
| causal attention, 32 x 128, 8192 tokens: forward / with backward | 553 / 522 | bf16 peak | 0.56 / 0.53 |
| copy in device memory | 4.28 TB/s | 4.8 | 0.89 |
| copies over PCIe | 55 GB/s | 63 | 0.87 |

Collectives follow `costs/comm`: latency, a ramp with size, and the links' rate; all-gather and reduce-scatter reached
0.86 and 0.80 of what all-reduce did. Other cards may differ by ten percent from such shares; verdicts leave room.
"""

from __future__ import annotations

from paceline.costs.comm import Group, ramped
from paceline.costs.hardware import Hardware
from paceline.costs.profiles import PACELINE
from paceline.costs.workload import Cluster

SUSTAINED_BF16 = 0.84
SUSTAINED_FP8 = 0.88
ATTENTION_FORWARD = 0.56
ATTENTION = 0.53
MEMORY_COPY = 0.89
HOST_COPY = 0.87
COLLECTIVES = {"all_reduce": 1.0, "all_gather": 0.86, "reduce_scatter": 0.80, "all_to_all": 1.0, "send": 1.0}
"""Of what the model of `costs/comm` gives for an all-reduce of the same bytes on the wire."""


def expected_rate(name: str, card: Hardware) -> float | None:
    """What one GPU should reach alone, in the unit of `record.UNITS`; None where nothing is known."""
    bf16 = card.bf16 or card.fp16
    best = bf16 * card.matmul_share if bf16 else None
    best_fp8 = card.fp8 * card.fp8_matmul_share if card.fp8 else None
    found = {
        "gemm_bf16_burst": best,
        "gemm_bf16": best and SUSTAINED_BF16 * best,
        "gemm_fp8_burst": best_fp8,
        "gemm_fp8": best_fp8 and SUSTAINED_FP8 * best_fp8,
        "attention_forward": bf16 and ATTENTION_FORWARD * bf16,
        "attention": bf16 and ATTENTION * bf16,
        "memory_copy": MEMORY_COPY * 1e3 * card.memory_tb_per_s,
        "host_to_device": card.pcie_gb_per_s and HOST_COPY * card.pcie_gb_per_s,
        "device_to_host": card.pcie_gb_per_s and HOST_COPY * card.pcie_gb_per_s,
    }
    return found.get(name)


def wire_bytes(name: str, size_bytes: int, ranks: int) -> float:
    """Bytes that each rank puts on its link for a full tensor of `size_bytes`."""
    share = (ranks - 1) / ranks
    return {"all_reduce": 2 * share, "send": 1.0}.get(name, share) * size_bytes


def expected_bus(name: str, size_bytes: int, cluster: Cluster) -> float | None:
    """GB/s of bus bandwidth that a collective over all GPUs should reach at this size.

    None between nodes whose network nobody named, and without NVLink, where peers share PCIe in ways that differ.
    """
    if cluster.gpu.nvlink_gb_per_s is None or "PCIe" in cluster.gpu.name:
        return None
    group = Group.of(cluster, cluster.gpus, 1)
    wire = wire_bytes(name, size_bytes, cluster.gpus)
    per_byte = (
        group.node_wire / PACELINE.network_efficiency if group.crosses else group.fast_wire / PACELINE.nvlink_efficiency
    )
    seconds = 1e-6 * PACELINE.call_us * group.steps + ramped(wire) * per_byte
    return COLLECTIVES[name] * wire / seconds / 1e9


def expected_pair(card: Hardware) -> float | None:
    """GB/s from one GPU to another of its node, for large messages: NVLink's, all links together."""
    if card.nvlink_gb_per_s is None or "PCIe" in card.name:
        return None
    return PACELINE.nvlink_efficiency * card.nvlink_gb_per_s
