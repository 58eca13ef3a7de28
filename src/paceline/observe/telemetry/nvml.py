"""What is this GPU doing? Clock, power, temperature and throttling, asked of the driver's own library through ctypes.

No Python package is needed, no stream is touched, nothing waits for the GPU. Where the library, the card or a single
function is missing, that figure stays unknown.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

from paceline.observe.telemetry.columns import GPU, UNKNOWN

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
_GRAPHICS, _SM, _MEMORY = 0, 1, 2
_TEMPERATURE_GPU = 0

SLOW_BITS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
"""Throttle reasons that lower clocks; idle (0x1), set clocks (0x2) and sync boost (0x10) are no fault."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuProbe:
    """One GPU. ``facts`` are what does not change: the greatest clock and the power limit."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle
        self.facts = {
            "gpu_clock_max_mhz": self._clock("nvmlDeviceGetMaxClockInfo", _SM),
            "gpu_power_limit_w": _divided(self._number("nvmlDeviceGetEnforcedPowerLimit"), 1000),
        }

    @classmethod
    def open(cls, uuid: str, *, load: Callable[[str], Any] = ctypes.CDLL) -> GpuProbe | None:
        """The GPU with this UUID; None where NVML does not know it.

        Args:
            load: gives the library of a name; another one in tests.
        """
        try:
            library = load(LIBRARY)
            handle = ctypes.c_void_p()
            codes = library.nvmlInit_v2(), library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        except (OSError, AttributeError) as error:
            log.debug("no figures of the GPU: %s", error)
            return None
        if any(codes):
            log.debug("no figures of the GPU %s: NVML gave %s", uuid, codes)
            return None
        return cls(library, handle)

    def read(self) -> dict[str, int]:
        """By name of `columns.GPU`."""
        values = (
            self._clock("nvmlDeviceGetClockInfo", _SM),
            self._clock("nvmlDeviceGetClockInfo", _MEMORY),
            _divided(self._number("nvmlDeviceGetPowerUsage"), 1000),
            self._call("nvmlDeviceGetTemperature", ctypes.c_uint(_TEMPERATURE_GPU)),
            self._throttle(),
            self._busy(),
        )
        return dict(zip(GPU, values, strict=True))

    def _clock(self, function: str, kind: int) -> int:
        return self._call(function, ctypes.c_uint(kind))

    def _number(self, function: str) -> int:
        return self._call(function)

    def _call(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_uint()
        return value.value if self._ok(function, *arguments, ctypes.byref(value)) else UNKNOWN

    def _throttle(self) -> int:
        value = ctypes.c_ulonglong()
        # renamed in driver 535; both are there in newer ones
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            if self._ok(function, ctypes.byref(value)):
                return value.value
        return UNKNOWN

    def _busy(self) -> int:
        value = _Utilization()
        return int(value.gpu) if self._ok("nvmlDeviceGetUtilizationRates", ctypes.byref(value)) else UNKNOWN

    def _ok(self, function: str, *arguments: Any) -> bool:
        found = getattr(self._library, function, None)
        return found is not None and found(self._handle, *arguments) == 0


def _divided(value: int, divisor: int) -> int:
    return value if value == UNKNOWN else value // divisor
