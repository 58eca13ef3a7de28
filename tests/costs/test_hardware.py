"""Peaks by device name; nothing is guessed (case 2)."""

from __future__ import annotations

import pytest

from paceline.costs.hardware import find_hardware, hardware_names, mfu, peak_tflops
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("reported", "product", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989, 1979),
        ("NVIDIA H200", "H200 SXM", 989, 1979),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80", 312, None),
        ("A100-SXM4-40GB", "A100 SXM 40", 312, None),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80", 312, None),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756, 1513),
        ("NVIDIA GH200 480GB", "GH200 96", 989, 1979),
        ("NVIDIA B200", "B200 SXM", 2250, 4500),
        ("NVIDIA GB200", "GB200", 2500, 5000),
        ("NVIDIA L40S", "L40S", 362, 733),
        ("NVIDIA L4", "L4", 121, 242.5),
        ("NVIDIA A10", "A10", 125, None),
        ("NVIDIA A10G", "A10G", 70, None),
        ("NVIDIA L40", "L40", 181, 362),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 364, 728),
        ("NVIDIA RTX A5000", "RTX A5000", 111.1, None),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 71, None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2, 330),
        ("AMD Instinct MI300X OAM", "MI300X", 1307, 2610),
    ],
)
def test_names_as_devices_report_them(reported: str, product: str, bf16: float, fp8: float | None) -> None:
    entry = find_hardware(reported)
    assert entry is not None and entry.name == product
    assert peak_tflops(reported) == bf16
    assert peak_tflops(reported, "fp8") == fp8
    assert find_hardware(product) is entry


@pytest.mark.parametrize(
    "unknown",
    [
        "",
        "cpu",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX A5000 Laptop GPU",
        "NVIDIA A10M",
        "NVIDIA L40G",
        "Quadro RTX 6000",
    ],
)
def test_unknown_devices_have_no_peak_and_no_mfu(unknown: str) -> None:
    assert peak_tflops(unknown) is None
    assert mfu(420.0, peak_tflops(unknown)) is None


def test_precisions() -> None:
    assert peak_tflops("NVIDIA H200", "fp32") == 66.9
    assert peak_tflops("NVIDIA H200", "tf32") == 494.7
    assert peak_tflops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_tflops("Tesla V100-SXM2-32GB", "fp16") == 125
    assert peak_tflops("H200 SXM", "fp16") == 989


def test_published_mistakes() -> None:
    """420 TFLOP/s on an H200 is 42.5 %, not 21 %; 9600 tokens/s of a model of 0.05 TFLOP a token on an H100, 48.5 %."""
    assert mfu(420, peak_tflops("NVIDIA H200")) == pytest.approx(0.425, abs=5e-4)
    assert mfu(9600 * 0.05, peak_tflops("NVIDIA H100 80GB HBM3")) == pytest.approx(0.485, abs=5e-4)


def test_more_than_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"104\.0%"):
        mfu(324.5, peak_tflops("NVIDIA A100-SXM4-80GB"))


def test_every_row_is_complete() -> None:
    assert len(set(hardware_names())) == len(hardware_names()) == 31
    for name in hardware_names():
        entry = find_hardware(name)
        assert entry is not None and entry.source and entry.patterns and entry.memory_gb > 0
