"""What is known of one GPU: model, memory, clocks, power, errors, PCIe, MIG. None where the driver does not say."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report.table import Table, table

SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons for low clocks that are faults of cooling or power, not of load."""


@dataclass(frozen=True, kw_only=True)
class Card:
    index: int
    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    ecc: bool | None = None
    uncorrected_errors: int | None = None
    """Of memory, since the driver was loaded."""
    rows_pending: bool | None = None
    """A bad row of memory waits for a reset to be remapped."""
    rows_failed: bool | None = None
    slowdowns: tuple[str, ...] = ()
    """Of `SLOWDOWNS`, now."""
    mig: bool | None = None
    persistence: bool | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    processes: int | None = None
    fabric: str | None = None
    """Of NVSwitch machines: `completed` when the fabric manager has set the GPU up, else how far it is."""
    nvlink_errors: int | None = None
    """Replays and recoveries of all links, since the driver was loaded."""

    @property
    def is_idle(self) -> bool:
        return self.power_w is not None and self.power_limit_w is not None and self.power_w < 0.4 * self.power_limit_w


def card_table(cards: list[Card]) -> Table:
    rows = [
        (
            str(card.index),
            card.name,
            _size(card.memory_bytes),
            _pair(card.sm_mhz, card.sm_max_mhz, "MHz"),
            _pair(card.power_limit_w, card.power_default_w, "W"),
            "?" if card.ecc is None else "on" if card.ecc else "off",
            "?" if card.mig is None else "on" if card.mig else "off",
            f"gen {card.pcie_gen or '?'} of {card.pcie_gen_max or '?'}, "
            f"x{card.pcie_width or '?'} of x{card.pcie_width_max or '?'}",
        )
        for card in cards
    ]
    columns = ("GPU", "model", ">memory", ">SM clock of most", ">power limit of usual", "ECC", "MIG", "PCIe")
    return table(columns, rows, title="GPUs")


def _size(value: int | None) -> str:
    return "?" if value is None else f"{value / 2**30:.0f} GiB"


def _pair(value: float | None, of: float | None, unit: str) -> str:
    return f"{'?' if value is None else f'{value:.0f}'} of {'?' if of is None else f'{of:.0f}'} {unit}"
