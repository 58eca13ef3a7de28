"""What do measured ceilings say to the planner? Its numbers, scaled by measured over expected. Torch-free.

A profile's efficiencies were found on machines that gave what is expected; where this one gives 0.9 of that, products
are predicted to take 1 / 0.9 as long. Runs say more than ceilings: `paceline plan calibrate` learns from those.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import tomli_w

from paceline.costs.hardware import Hardware, find_hardware
from paceline.costs.profiles import PACELINE
from paceline.costs.workload import Cluster
from paceline.doctor.measured.expected import expected_bus, expected_rate
from paceline.doctor.measured.record import Measured
from paceline.planner.fitting import RANGES

_SCALED: Mapping[str, tuple[str, ...]] = {
    "gemm_bf16": ("gemm_efficiency", "expert_gemm_efficiency"),
    "attention": ("attention_efficiency",),
    "memory_copy": ("hbm_efficiency", "cast_efficiency", "optimizer_efficiency"),
}
"""Rates of `record.UNITS`, and the numbers of a profile that they scale."""


def calibration(measured: Measured, cluster: Cluster | None) -> dict[str, float]:
    """Numbers of Paceline's profile; empty where the card is not known, or nothing that matters was measured."""
    card = find_hardware(measured.ranks[0].device)
    if card is None:
        return {}
    found = {}
    for rate, names in _SCALED.items():
        share = _share(measured, rate, card)
        if share is not None:
            found.update({name: _scaled(name, share) for name in names})
    if cluster is not None and (share := _links(measured, cluster)) is not None:
        name = "network_efficiency" if measured.num_nodes > 1 else "nvlink_efficiency"
        found[name] = _scaled(name, share)
    return found


def _share(measured: Measured, rate: str, card: Hardware) -> float | None:
    values, expected = measured.values(rate), expected_rate(rate, card)
    return median(values.values()) / expected if values and expected else None


def _links(measured: Measured, cluster: Cluster) -> float | None:
    """Of the largest all-reduce over all ranks."""
    found = [record for record in measured.collectives if record.name == "all_reduce"]
    if not found or measured.backend != "nccl":
        return None
    largest = max(found, key=lambda record: record.size_bytes)
    expected = expected_bus(largest.name, largest.size_bytes, cluster)
    return largest.bus_gb_per_s / expected if expected else None


def _scaled(name: str, share: float) -> float:
    low, high = RANGES[name]
    return round(min(high, max(low, getattr(PACELINE, name) * share)), 5)


def calibration_text(numbers: Mapping[str, float], measured: Measured) -> str:
    """The file that `paceline plan --calibration` reads."""
    first = measured.ranks[0]
    return (
        f"# Made by `paceline doctor --measure` on {len(measured.ranks)} x {first.device}, {measured.num_nodes} "
        "node(s): "
        "the planner's numbers\n# times measured over expected ceilings. `paceline plan calibrate` learns from runs.\n"
        + tomli_w.dumps({PACELINE.name: dict(numbers)})
    )
