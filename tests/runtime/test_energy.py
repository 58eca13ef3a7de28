"""The energy counter, on a library that answers as NVML does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.runtime.device import device_uuid
from paceline.runtime.energy import LIBRARY, EnergyCounter

UUID = "GPU-12345678-1234-1234-1234-123456789abc"
NOT_SUPPORTED, NOT_FOUND = 3, 6


class Nvml:
    """What `ctypes.CDLL` gives: functions that return a code and write through pointers."""

    def __init__(self, *, init: int = 0, energy: int = 0) -> None:
        self.millijoules = 5_000_000

        def by_uuid(uuid: bytes, handle: Any) -> int:
            handle._obj.value = 77
            return 0 if uuid == UUID.encode() else NOT_FOUND

        def total(handle: Any, value: Any) -> int:
            assert handle.value == 77
            value._obj.value = self.millijoules
            return energy

        self.nvmlInit_v2: Callable[..., int] = lambda: init
        self.nvmlDeviceGetHandleByUUID = by_uuid
        self.nvmlDeviceGetTotalEnergyConsumption = total


def opened(library: Any, uuid: str = UUID) -> EnergyCounter | None:
    def load(name: str) -> Any:
        assert name == LIBRARY
        if isinstance(library, OSError):
            raise library
        return library

    return EnergyCounter.open(uuid, load=load)


def test_joules() -> None:
    library = Nvml()
    counter = opened(library)
    assert counter is not None and counter.joules() == 5000.0
    library.millijoules += 1234
    assert counter.joules() == pytest.approx(5001.234)


@pytest.mark.parametrize(
    "library", [OSError("cannot open"), object(), Nvml(init=9), Nvml(energy=NOT_SUPPORTED)], ids=str
)
def test_nothing_where_something_is_missing(library: Any) -> None:
    assert opened(library) is None


def test_nothing_for_a_card_that_nvml_does_not_know() -> None:
    assert opened(Nvml(), "GPU-other") is None


def test_nothing_where_the_library_fails() -> None:
    def fails() -> int:
        raise OSError("exception: access violation")

    library = Nvml()
    library.nvmlInit_v2 = fails
    assert opened(library) is None


def test_a_cpu_has_no_uuid() -> None:
    assert device_uuid(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_card_s_own_counter_rises() -> None:
    uuid = device_uuid(torch.device("cuda", 0))
    assert uuid is not None
    counter = EnergyCounter.open(uuid)
    assert counter is not None, "data-centre cards since Volta count their energy"
    first = counter.joules()
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(100):
        a @ a
    torch.cuda.synchronize()
    last = counter.joules()
    assert first is not None and last is not None and last >= first > 0
