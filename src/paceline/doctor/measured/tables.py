"""What was measured beside what this hardware should give, as tables. Torch-free."""

from __future__ import annotations

from statistics import median

from paceline.costs.hardware import find_hardware
from paceline.costs.workload import Cluster
from paceline.doctor.measured.expected import expected_bus, expected_rate
from paceline.doctor.measured.record import TITLES, UNITS, Measured
from paceline.report import chart, units
from paceline.report.table import Table, table

GOOD = 0.85
"""Of what is expected, and more: as it should be."""
BROKEN = 0.5
_MOST_COLUMNS = 16


def verdict(share: float | None) -> str:
    """A word for a share of what is expected."""
    if share is None:
        return "no figure to compare with"
    if share >= GOOD:
        return "as it should be" if share < 1.15 else "better than expected"
    return "low" if share >= BROKEN else "far too low"


def number(value: float, unit: str) -> str:
    return f"{units.count(value)} {unit}" if unit == "tokens/s" else f"{value:,.4g} {unit}"


def rate_table(measured: Measured) -> Table:
    """Each rate: the middle and the least of all ranks, beside what the card should give."""
    card = find_hardware(measured.ranks[0].device)
    rows = []
    for name, unit in UNITS.items():
        values = measured.values(name)
        if not values:
            continue
        middle = median(values.values())
        expected = expected_rate(name, card) if card else None
        share = middle / expected if expected else None
        rows.append(
            (
                TITLES[name],
                number(middle, unit),
                number(min(values.values()), unit),
                number(expected, unit) if expected else "",
                units.percent(share, 0) if share else "",
                verdict(share),
            )
        )
    many = len(measured.ranks) > 1
    columns = ("what", ">median of ranks" if many else ">measured", ">least", ">expected", ">share", "verdict")
    return table(columns, rows, title=f"Ceilings of {len(measured.ranks)} x {measured.ranks[0].device}")


def collective_table(measured: Measured, cluster: Cluster | None) -> Table | None:
    if not measured.collectives:
        return None
    rows = []
    for record in measured.collectives:
        expected = (
            expected_bus(record.name, record.size_bytes, cluster) if cluster and measured.backend == "nccl" else None
        )
        share = record.bus_gb_per_s / expected if expected else None
        rows.append(
            (
                record.name,
                units.size(record.size_bytes),
                units.duration(record.seconds),
                f"{record.bus_gb_per_s:.4g}",
                f"{expected:.4g}" if expected else "",
                verdict(share) if expected else "",
            )
        )
    columns = ("collective", ">tensor", ">time", ">bus GB/s", ">expected", "verdict")
    note = f"{measured.backend} over {len(measured.ranks)} ranks; bus bandwidth as nccl-tests counts it."
    return table(columns, rows, title="Collectives", notes=(note,))


def pair_table(measured: Measured) -> Table | None:
    """GB/s from each rank to each other of the first node; None where none were measured."""
    first = measured.ranks[0].node
    ranks = [record.rank for record in measured.ranks if record.node == first][:_MOST_COLUMNS]
    if not any((a, b) in measured.pairs for a in ranks for b in ranks):
        return None
    rows = [
        (f"rank {a}", *(f"{measured.pairs[a, b]:.4g}" if (a, b) in measured.pairs else "" for b in ranks))
        for a in ranks
    ]
    return table(("from", *(f">to {b}" for b in ranks)), rows, title="GB/s between ranks of a node")


def share_bars(measured: Measured) -> str | None:
    """A picture: percent of what is expected, for each rate; None without any."""
    card = find_hardware(measured.ranks[0].device)
    names, shares = [], []
    for name in UNITS:
        values = measured.values(name)
        expected = expected_rate(name, card) if card else None
        if values and expected:
            names.append(TITLES[name])
            shares.append({"share of expected": 100 * median(values.values()) / expected})
    if not names:
        return None
    return chart.stacked_bars(names, shares, unit="%", limit=100.0, title="Percent of what is expected, by ceiling")
