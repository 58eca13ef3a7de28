from __future__ import annotations

import pytest

from paceline.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [(8_030_261_248, "8.03B"), (1_235_814_400, "1.24B"), (950, "950"), (999_999, "1.00M"), (12_345, "12.3K"), (0, "0"),
     (405e9, "405B"), (1.8e12, "1.80T"), (0.5, "0.50"), (-2_000, "-2.00K")],
)  # fmt: skip
def test_count(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00085, "850 µs"), (0.0123, "12.3 ms"), (4.2, "4.20 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"),
     (273_600, "3 d 04 h"), (float("inf"), "?")],
)  # fmt: skip
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_a_zero_has_no_sign() -> None:
    assert units.percent(-1e-9) == "0.0 %" and units.percent(-1e-9, 0) == "0 %" and units.duration(-1e-12) == "0 µs"
    assert units.apart(-1e-9) == "+0.00 ms" and units.apart(-0.00125) == "-1.25 ms"


def test_sizes_and_rates() -> None:
    assert units.size(512) == "512 B" and units.size(13.5 * 2**30) == "13.50 GiB"
    assert units.gib(2**29) == "0.50 GiB"
    assert units.rate(12_345, "tokens") == "12.3K tokens/s"
    assert units.tflops(420.4) == "420 TFLOP/s" and units.tflops(0.03123) == "0.0312 TFLOP/s"
    assert units.tflops(1979) == "1979 TFLOP/s"
    assert units.percent(0.4249) == "42.5 %"
