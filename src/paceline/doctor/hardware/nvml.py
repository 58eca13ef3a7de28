"""GPUs of this machine through NVML, by the package nvidia-ml-py (the extra `nvml`), if it is there."""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType
from typing import Any

from paceline.doctor.hardware.card import SLOWDOWNS, Card

_SLOWDOWN_BITS = {
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
_CLOCK_SM = 1
_TEMPERATURE_GPU = 0
_UNCORRECTED, _VOLATILE = 1, 0
_REPLAY, _RECOVERY = 0, 1


def load_nvml() -> ModuleType | None:
    """The package; None without it."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_nvml(nvml: Any) -> tuple[list[Card], str, str]:
    """(GPUs, version of the driver, CUDA version that it supports).

    Args:
        nvml: the module `pynvml`, or another with its functions.

    Raises:
        nvml.NVMLError: the driver does not answer; its text says why.
    """
    nvml.nvmlInit()
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    cards = [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    return cards, driver, f"{cuda // 1000}.{cuda % 1000 // 10}"


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        """None where this card, driver or container does not answer."""
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    ecc, mig, rows = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetRemappedRows")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        # the name until driver 535
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    persistence = ask("nvmlDeviceGetPersistenceMode")
    return Card(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "unknown"),
        uuid=_text(ask("nvmlDeviceGetUUID") or ""),
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        sm_mhz=ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
        sm_max_mhz=ask("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
        power_limit_w=_watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
        power_default_w=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
        power_w=_watts(ask("nvmlDeviceGetPowerUsage")),
        temperature_c=ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        slowdowns=tuple(name for name in SLOWDOWNS if (reasons or 0) & _SLOWDOWN_BITS[name]),
        mig=None if mig is None else bool(mig[0]),
        persistence=None if persistence is None else bool(persistence),
        pcie_gen=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        processes=None if processes is None else len(processes),
        fabric=_fabric(nvml, handle),
        nvlink_errors=_nvlink_errors(nvml, handle),
    )


def _fabric(nvml: Any, handle: Any) -> str | None:
    try:
        found = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(found))
    except (nvml.NVMLError, AttributeError):
        return None
    state = {1: "not started", 2: "in progress", 3: "completed"}.get(found.state)
    return f"{state}, error {found.status}" if state and found.status else state


def _nvlink_errors(nvml: Any, handle: Any) -> int | None:
    """Replays and recoveries; None without NVLink."""
    total, links = 0, 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            total += sum(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind) for kind in (_REPLAY, _RECOVERY))
            links += 1
        except (nvml.NVMLError, AttributeError):
            continue
    return total if links else None


def link_matrix_text(nvml: Any) -> str | None:
    """The matrix of this machine in the words of ``nvidia-smi topo -m``, for where that program is missing.

    Network cards and CPUs are not in it. None where the driver does not tell.
    """
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    names = [f"GPU{index}" for index in range(count)]
    links = [_active_links(nvml, handle) for handle in handles]
    try:
        rows = [
            [
                " X " if one == other else _label(nvml, handles[one], handles[other], links[one], links[other])
                for other in range(count)
            ]
            for one in range(count)
        ]
    except (nvml.NVMLError, AttributeError):
        return None
    lines = ["\t".join(["", *names])] + ["\t".join([name, *row]) for name, row in zip(names, rows, strict=True)]
    return "\n".join(lines) + "\n"


def _label(nvml: Any, one: Any, other: Any, links_of_one: int, links_of_other: int) -> str:
    try:
        joined = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == 0
    except (nvml.NVMLError, AttributeError):
        joined = False
    if joined:
        return f"NV{min(links_of_one, links_of_other) or 1}"
    ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}.get(ancestor, "N/A")


def _active_links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except (nvml.NVMLError, AttributeError):
            continue
    return active


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
