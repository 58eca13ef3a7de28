"""A kernel that was compiled wrongly is found out before its first use."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline.kernels.fp8_cast import E4M3, E5M2
from paceline.kernels.fp8_check import difference, drawn, kernel_is_right, places


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_rounding_leaves_is_no_difference(dtype: torch.dtype) -> None:
    wide = drawn(torch.device("cpu")).float()
    values, turned = places(wide, dtype)
    values.copy_(wide)
    turned.copy_(wide.t())
    assert difference(wide, values, turned) == ""


@pytest.mark.parametrize("garbage", [0.0, 448.0, float("nan")])
def test_garbage_in_every_fourth_row_is_one(garbage: float) -> None:
    wide = drawn(torch.device("cpu")).float()
    values, turned = places(wide, E4M3)
    values.copy_(wide)
    spoiled = wide.t().clone()
    spoiled[1::4] = garbage
    turned.copy_(spoiled)
    assert difference(wide, values, turned) == "turns wrongly"
    spoiled = wide.clone()
    spoiled[::4] = garbage
    values.copy_(spoiled)
    assert difference(wide, values, turned) == "casts wrongly"


def test_a_wrong_kernel_is_named_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    with caplog.at_level(logging.WARNING):
        assert not kernel_is_right("casts", lambda: "turns wrongly")
    assert "casts are made of operations of torch" in caplog.text and "turns wrongly" in caplog.text
    assert kernel_is_right("casts", lambda: "")


def test_a_kernel_that_does_not_compile_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")

    def check() -> str:
        raise RuntimeError("Failed to find C compiler")

    with caplog.at_level(logging.WARNING):
        assert not kernel_is_right("casts", check)
    assert "RuntimeError: Failed to find C compiler" in caplog.text
