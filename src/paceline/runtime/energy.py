"""How much energy has this GPU used? NVML's own counter, asked through the driver's library.

The library comes with every NVIDIA driver, and the three functions are as old as the counter (Volta), so no Python
package is needed. Where something is missing (no driver, an older card, a slice of a card) there is no figure, never a
zero.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_MILLI = 1e-3


class EnergyCounter:
    """Joules that one GPU has used since its driver was loaded; the driver renews the figure some ten times a second.

    Reading it takes well under a millisecond and does not wait for the GPU's streams.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def open(cls, uuid: str, *, load: Callable[[str], Any] = ctypes.CDLL) -> EnergyCounter | None:
        """The counter of the GPU with this UUID; None, with the reason in the log, where there is none.

        Args:
            load: gives the library of a name; another one in tests.
        """
        try:
            library = load(LIBRARY)
            functions = library.nvmlInit_v2, library.nvmlDeviceGetHandleByUUID
            energy = library.nvmlDeviceGetTotalEnergyConsumption
            return cls._opened(library, functions, energy, uuid)
        except (OSError, AttributeError) as error:
            log.debug("no figures of energy: %s", error)
            return None

    @classmethod
    def _opened(cls, library: Any, functions: tuple[Any, Any], energy: Any, uuid: str) -> EnergyCounter | None:
        functions[0].argtypes = []
        functions[1].argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)]
        energy.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulonglong)]
        handle = ctypes.c_void_p()
        for name, code in (
            ("nvmlInit", functions[0]()),
            ("nvmlDeviceGetHandleByUUID", functions[1](uuid.encode(), ctypes.byref(handle))),
        ):
            if code != _SUCCESS:
                log.debug("no figures of energy: %s of %s gave %d", name, uuid, code)
                return None
        counter = cls(library, handle)
        return counter if counter.joules() is not None else None

    def joules(self) -> float | None:
        """The counter now; None where the card does not keep one."""
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return millijoules.value * _MILLI if code == _SUCCESS else None
