"""A product's share of the best rate, by its shape."""

from __future__ import annotations

import pytest

from paceline.costs.roofline import gemm_occupancy, gemm_seconds, linear_seconds

H200 = {"tflops": 791.0, "hbm_tb_per_s": 4.8, "multiprocessors": 132}


def test_large_products_reach_the_best_rate_and_none_passes_it() -> None:
    assert gemm_occupancy(8192, 8192, 8192, 132) > 0.93
    for m in (1, 64, 129, 1000, 4096, 65536):
        for n in (64, 1000, 4096):
            for k in (64, 4096):
                assert 0 < gemm_occupancy(m, n, k, 132) <= 1


def test_a_few_tiles_more_than_multiprocessors_cost_another_wave() -> None:
    full = gemm_occupancy(128 * 12, 256 * 11, 8192, 132)  # 132 tiles
    assert gemm_occupancy(128 * 12, 256 * 12, 8192, 132) < 0.95 * full


def test_a_narrow_product_is_as_slow_as_its_operands_are_read() -> None:
    seconds = gemm_seconds(1, 8192, 8192, **H200)
    assert seconds == pytest.approx(2 * 8192 * 8192 / (0.85 * 4.8e12), rel=0.01)


def test_the_products_of_llama_3_8b_as_measured() -> None:
    """649 to 685 TFLOP/s in short bursts at 8192 tokens on an H200 whose best burst is 768 (measured figures)."""
    shapes = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    seconds = sum(sum(linear_seconds(8192, inputs, outputs, **H200)) for inputs, outputs in shapes)
    flops = sum(6.0 * 8192 * inputs * outputs for inputs, outputs in shapes)
    assert 640 < flops / seconds / 1e12 * 768 / 791 < 768


def test_tiles_of_a_grouped_product_fill_the_device_together() -> None:
    """512 rows of each of 128 experts: alone, one expert's tiles leave most of the device idle."""
    alone, together = gemm_occupancy(512, 1536, 2048, 132), gemm_occupancy(512, 1536, 2048, 132, groups=128)
    assert alone < 0.55 < 0.8 < together <= 1.0
    one, many = (gemm_seconds(512, 1536, 2048, 791, 4.8, 132, groups) for groups in (1, 128))
    assert many < 0.6 * 128 * one
