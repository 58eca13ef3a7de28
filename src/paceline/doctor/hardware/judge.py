"""Which GPU is not what it should be? Each against its product, and all of a node against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from paceline.costs.hardware import find_hardware
from paceline.doctor.hardware.card import Card
from paceline.report import units
from paceline.report.finding import Finding, Severity

_MANY_ERRORS = 100


def judge(cards: list[Card]) -> list[Finding]:
    """Findings about the GPUs of a node."""
    return [
        *_product(cards),
        *_alike(cards),
        *_mig(cards),
        *_power(cards),
        *_clocks(cards),
        *_memory_errors(cards),
        *_pcie(cards),
        *_busy(cards),
        *_persistence(cards),
        *_fabric(cards),
    ]


def no_cards(reason: str, *, wanted: bool) -> Finding:
    """That no GPU could be looked at, and why."""
    return Finding(
        id="hardware.no-gpu",
        severity="error" if wanted else "note",
        subject="no GPU can be looked at here",
        evidence=reason,
        next_step="On a machine with GPUs: is the driver loaded (lsmod | grep nvidia, /dev/nvidia0)? In a container: "
        "--gpus all. For another machine: nvidia-smi topo -m > topo.txt and nvidia-smi -q -x > smi.xml there, then "
        "paceline doctor --topo topo.txt --smi smi.xml.",
    )


def _which(cards: list[Card], test: Callable[[Card], bool]) -> list[Card]:
    return [card for card in cards if test(card)]


def _named(cards: list[Card]) -> str:
    return ("GPU " if len(cards) == 1 else "GPUs ") + ", ".join(str(card.index) for card in cards)


def _finding(
    id: str, severity: Severity, subject: str, evidence: str, next_step: str, gain: str | None = None
) -> Finding:
    return Finding(
        id=f"hardware.{id}", severity=severity, subject=subject, evidence=evidence, next_step=next_step, gain=gain
    )


def _product(cards: list[Card]) -> Iterator[Finding]:
    unknown = sorted({card.name for card in cards if find_hardware(card.name) is None})
    if unknown:
        yield _finding(
            "unknown-card",
            "note",
            f"{', '.join(unknown)}: not in the table of hardware",
            "What it should reach is not determined; MFU is not available, never a guess.",
            "Describe it in ten lines for the planner: paceline plan RECIPE --gpu my_gpu.toml.",
        )


def _alike(cards: list[Card]) -> Iterator[Finding]:
    for what, values in (
        ("models", {card.name for card in cards}),
        ("sizes of memory", {round(card.memory_bytes / 2**30) for card in cards if card.memory_bytes}),
        ("power limits", {round(card.power_limit_w) for card in cards if card.power_limit_w}),
        ("greatest clocks", {card.sm_max_mhz for card in cards if card.sm_max_mhz}),
        ("PCIe widths", {card.pcie_width for card in cards if card.pcie_width}),
    ):
        if len(values) > 1:
            yield _finding(
                "unlike",
                "warning",
                f"GPUs of this node have different {what}: {', '.join(sorted(map(str, values)))}",
                "Every step waits for the slowest of them.",
                "Train on equal ones (CUDA_VISIBLE_DEVICES), or set them equal.",
            )


def _mig(cards: list[Card]) -> Iterator[Finding]:
    found = _which(cards, lambda card: bool(card.mig))
    if found:
        yield _finding(
            "mig",
            "error" if len(cards) > 1 else "warning",
            f"{_named(found)}: MIG is on",
            "A process sees one slice of a GPU, and slices cannot reach each other: no data or tensor parallelism.",
            f"As root, with no job on it: nvidia-smi -i {found[0].index} -mig 0.",
        )


def _power(cards: list[Card]) -> Iterator[Finding]:
    found = _which(
        cards,
        lambda card: bool(
            card.power_limit_w and card.power_default_w and card.power_limit_w < 0.97 * card.power_default_w
        ),
    )
    if found:
        card = found[0]
        limit, usual = card.power_limit_w or 0, card.power_default_w or 1
        yield _finding(
            "power-cap",
            "warning",
            f"{_named(found)}: power limit {limit:.0f} W, {usual:.0f} W is usual",
            "Large matrix products run against the power limit: clocks fall with it.",
            f"As root: nvidia-smi -i {card.index} -pl {usual:.0f}; or ask whether the data center needs the cap.",
            f"up to {units.percent(min(1.0, usual / limit - 1), 0)} in matrix products; measure it",
        )


def _clocks(cards: list[Card]) -> Iterator[Finding]:
    slowed = _which(cards, lambda card: bool(card.slowdowns))
    if slowed:
        reasons = sorted({reason.replace("_", " ") for card in slowed for reason in card.slowdowns})
        hot = [f"{card.temperature_c} °C" for card in slowed if card.temperature_c is not None]
        yield _finding(
            "throttled",
            "error",
            f"{_named(slowed)}: clocks are held down now ({', '.join(reasons)})",
            f"Cooling or power supply fails, so this GPU holds all others back.{' ' + ', '.join(hot) if hot else ''}",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE; look at fans, airflow and power supplies; take the node out.",
        )
    tops = [card.sm_max_mhz for card in cards if card.sm_max_mhz]
    working = _which(cards, lambda card: not card.is_idle and card.sm_mhz is not None and not card.slowdowns)
    if len(working) >= 3 and tops:
        usual = median(card.sm_mhz or 0 for card in working)
        slow = _which(working, lambda card: (card.sm_mhz or 0) < 0.85 * usual)
        if slow:
            yield _finding(
                "slow-clock",
                "warning",
                f"{_named(slow)}: {slow[0].sm_mhz} MHz under load, the others {usual:.0f}",
                "Every step waits for the slowest GPU.",
                "nvidia-smi -q -d CLOCK,PERFORMANCE; nvidia-smi -rgc lifts clocks that were locked.",
            )


def _memory_errors(cards: list[Card]) -> Iterator[Finding]:
    off = _which(cards, lambda card: card.ecc is False)
    if (off and len(off) < len(cards)) or (off and find_hardware(off[0].name) and "RTX" not in off[0].name):
        yield _finding(
            "ecc-off",
            "note",
            f"{_named(off)}: ECC is off",
            "A flipped bit in memory goes unnoticed into weights.",
            "As root: nvidia-smi -e 1, then a reset.",
        )
    broken = _which(cards, lambda card: bool(card.uncorrected_errors) or bool(card.rows_failed))
    if broken:
        yield _finding(
            "memory-errors",
            "error",
            f"{_named(broken)}: uncorrectable errors of memory",
            ", ".join(f"{card.uncorrected_errors or 0} on GPU {card.index}" for card in broken)
            + " since the driver was loaded"
            + ("; remapping of rows failed" if any(card.rows_failed for card in broken) else "")
            + ". A run on it crashes or computes wrong numbers.",
            "Reset the GPU; if errors come back or remapping fails, have it replaced.",
        )
    pending = _which(cards, lambda card: bool(card.rows_pending) and card not in broken)
    if pending:
        yield _finding(
            "rows-pending",
            "warning",
            f"{_named(pending)}: a bad row of memory waits to be remapped",
            "It happens at the next reset of the GPU.",
            f"With no job on it: nvidia-smi -r -i {pending[0].index}.",
        )


def _pcie(cards: list[Card]) -> Iterator[Finding]:
    narrow = _which(
        cards, lambda card: bool(card.pcie_width and card.pcie_width_max and card.pcie_width < card.pcie_width_max)
    )
    if narrow:
        card = narrow[0]
        yield _finding(
            "pcie-width",
            "warning",
            f"{_named(narrow)}: PCIe x{card.pcie_width} of x{card.pcie_width_max}",
            "The link lost lanes: copies from and to host memory (and GPUDirect) take longer in proportion.",
            "Re-seat the card or the riser; look at the slot's width.",
            f"{(card.pcie_width_max or 1) / (card.pcie_width or 1):.3g} times the rate of copies",
        )
    low = _which(cards, lambda card: bool(card.pcie_gen and card.pcie_gen_max and card.pcie_gen < card.pcie_gen_max))
    if low:
        card = low[0]
        idle = all(one.is_idle for one in low)
        yield _finding(
            "pcie-generation",
            "note" if idle else "warning",
            f"{_named(low)}: PCIe generation {card.pcie_gen} of {card.pcie_gen_max}",
            "An idle GPU saves power so; whether it is slow under load is not determined by this."
            if idle
            else "It is not idle, so the link is slower than it could be.",
            "Measure it: paceline doctor --measure (host to device)."
            if idle
            else "Look at the BIOS (PCIe speed), the riser and dmesg (AER).",
        )


def _busy(cards: list[Card]) -> Iterator[Finding]:
    busy = _which(cards, lambda card: bool(card.processes) or (card.used_bytes or 0) > 2 * 2**30)
    if busy:
        card = busy[0]
        yield _finding(
            "busy",
            "warning",
            f"{_named(busy)}: in use ({units.size(card.used_bytes or 0)} of memory, {card.processes or '?'} processes)",
            "Another program takes memory and time from this run, and makes measurements wrong.",
            "nvidia-smi lists the processes; wait for them or take other GPUs.",
        )


def _persistence(cards: list[Card]) -> Iterator[Finding]:
    off = _which(cards, lambda card: card.persistence is False)
    if off:
        yield _finding(
            "persistence",
            "note",
            f"{_named(off)}: persistence mode is off",
            "The driver unloads the GPU when nobody uses it: the first CUDA call of a job takes seconds longer.",
            "As root: nvidia-smi -pm 1 (or the nvidia-persistenced service).",
        )


def _fabric(cards: list[Card]) -> Iterator[Finding]:
    unset = _which(cards, lambda card: card.fabric is not None and card.fabric != "completed")
    if unset:
        yield _finding(
            "fabric",
            "error",
            f"{_named(unset)}: the NVSwitch fabric is not set up ({unset[0].fabric})",
            "CUDA then fails with error 802 (system not yet initialized), or NVLink SHARP does.",
            "systemctl status nvidia-fabricmanager on the host, of the driver's version; then reset the GPUs or "
            "reboot.",
        )
    errors = _which(cards, lambda card: bool(card.nvlink_errors))
    if errors:
        worst = max(errors, key=lambda card: card.nvlink_errors or 0)
        yield _finding(
            "nvlink-errors",
            "warning" if (worst.nvlink_errors or 0) >= _MANY_ERRORS else "note",
            f"{_named(errors)}: NVLink had errors (most: {worst.nvlink_errors:,} replays and recoveries on GPU "
            f"{worst.index})",
            "A link that repeats what it sends is slower; a few since the driver was loaded do no harm.",
            f"nvidia-smi nvlink -e -i {worst.index}, again after a run: if the number grows, have the GPU or its board "
            "looked at.",
        )
