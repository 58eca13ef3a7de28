"""Where fp8 runs, and what is said where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.parallel import fp8_device
from paceline.parallel.fp8_device import refuse_without_fp8

CPU = torch.device("cpu")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_without_fp8(CPU, "tensorwise")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(fp8_device, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    for found, scaling in (((8, 9), "tensorwise"), ((9, 0), "rowwise"), ((10, 0), "tensorwise")):
        monkeypatch.setattr(fp8_device, "capability", lambda device, found=found: found)
        refuse_without_fp8(gpu, scaling)
    monkeypatch.setattr(fp8_device, "capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="A100") as refused:
        refuse_without_fp8(gpu, "tensorwise")
    assert "8.0" in refused.value.evidence and "bf16" in refused.value.next_step


def test_a_cpu_without_rowwise_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("only per-tensor")

    monkeypatch.setattr(fp8_device, "product", product)
    with pytest.raises(ConfigError, match="rowwise"):
        refuse_without_fp8(CPU, "rowwise")
