"""GPUs of a machine as ``nvidia-smi -q -x`` prints them: of this one, or of another in a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from paceline.doctor.hardware.card import SLOWDOWNS, Card
from paceline.errors import ConfigError

_HOW = "nvidia-smi -q -x > smi.xml; then paceline doctor --smi smi.xml."


def parse_smi(text: str, name: str) -> tuple[list[Card], str, str]:
    """(GPUs, version of the driver, CUDA version that it supports); the last two empty where they are not told.

    Raises:
        ConfigError: it is no such text.
    """
    try:
        # a declaration of a DTD is all that stands before; entities are not expanded from outside
        root = ElementTree.fromstring(text.lstrip("\ufeff \n"))
    except ElementTree.ParseError as error:
        failed = next((line for line in text.splitlines() if "NVIDIA-SMI" in line or "No devices" in line), "")
        raise ConfigError(
            f"{name} is no output of nvidia-smi -q -x",
            evidence=failed.strip()[:200] or ("It is empty." if not text.strip() else f"Not XML: {error}."),
            next_step=_HOW,
        ) from error
    if root.tag != "nvidia_smi_log":
        raise ConfigError(
            f"{name} is no output of nvidia-smi -q -x",
            evidence=f"It begins with <{root.tag}>, not with <nvidia_smi_log>.",
            next_step=_HOW,
        )
    cards = [_card(index, gpu) for index, gpu in enumerate(root.iter("gpu"))]
    return cards, root.findtext("driver_version", ""), root.findtext("cuda_version", "")


def _card(index: int, gpu: Element) -> Card:
    return Card(
        index=index,
        name=gpu.findtext("product_name", "unknown"),
        uuid=gpu.findtext("uuid", ""),
        memory_bytes=_mebibytes(gpu, "fb_memory_usage/total"),
        used_bytes=_mebibytes(gpu, "fb_memory_usage/used"),
        sm_mhz=_whole(gpu, "clocks/sm_clock"),
        sm_max_mhz=_whole(gpu, "max_clocks/sm_clock"),
        power_limit_w=_first(gpu, _power("current_power_limit", "power_limit", "enforced_power_limit")),
        power_default_w=_first(gpu, _power("default_power_limit")),
        power_w=_first(gpu, _power("instant_power_draw", "power_draw", "average_power_draw")),
        temperature_c=_whole(gpu, "temperature/gpu_temp"),
        ecc=_switch(gpu, "ecc_mode/current_ecc"),
        uncorrected_errors=_errors(gpu),
        rows_pending=_switch(gpu, "remapped_rows/remapped_row_pending"),
        rows_failed=_switch(gpu, "remapped_rows/remapped_row_failure"),
        slowdowns=tuple(reason for reason in SLOWDOWNS if _active(gpu, reason)),
        mig=_switch(gpu, "mig_mode/current_mig"),
        persistence=_switch(gpu, "persistence_mode"),
        pcie_gen=_whole(gpu, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        pcie_gen_max=_whole(gpu, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        pcie_width=_whole(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        pcie_width_max=_whole(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        processes=_processes(gpu),
        fabric=_fabric(gpu),
    )


def _power(*names: str) -> list[str]:
    return [f"{group}/{name}" for group in ("gpu_power_readings", "power_readings") for name in names]


def _number(gpu: Element, path: str) -> float | None:
    match = re.search(r"-?\d+(?:\.\d+)?", gpu.findtext(path, ""))
    return float(match[0]) if match else None


def _whole(gpu: Element, path: str) -> int | None:
    value = _number(gpu, path)
    return None if value is None else int(value)


def _first(gpu: Element, paths: Iterable[str]) -> float | None:
    return next((value for path in paths if (value := _number(gpu, path)) is not None), None)


def _mebibytes(gpu: Element, path: str) -> int | None:
    value = _number(gpu, path)
    return None if value is None else int(value * 2**20)


def _switch(gpu: Element, path: str) -> bool | None:
    return {"enabled": True, "yes": True, "disabled": False, "no": False}.get(gpu.findtext(path, "").strip().lower())


def _active(gpu: Element, reason: str) -> bool:
    paths = (f"clocks_event_reasons/clocks_event_reason_{reason}",
             f"clocks_throttle_reasons/clocks_throttle_reason_{reason}")  # fmt: skip
    return any(gpu.findtext(path, "").strip() == "Active" for path in paths)


def _errors(gpu: Element) -> int | None:
    """All uncorrectable errors since the driver was loaded; drivers name their parts in different ways."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return None
    found = [
        int(element.text)
        for element in volatile.iter()
        if "uncorrectable" in element.tag and element.text and element.text.strip().isdecimal()
    ]
    return sum(found) if found else None


def _processes(gpu: Element) -> int | None:
    listed = gpu.find("processes")
    return None if listed is None else len(list(listed.iter("process_info")))


def _fabric(gpu: Element) -> str | None:
    state = gpu.findtext("fabric/state", "").strip().lower()
    if state in ("", "n/a", "not supported"):
        return None
    status = gpu.findtext("fabric/status", "").strip().lower()
    return state if status in ("", "n/a", "success") else f"{state}, {status}"
