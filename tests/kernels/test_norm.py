"""Norms compute in fp32 and keep the input's dtype."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.norm import layer_norm, rms_norm, rms_norm_reference


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype, unit_offset: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(16).to(weight_dtype)
    out = rms_norm(x, weight, 1e-2, unit_offset=unit_offset)
    scale = weight.double() + unit_offset
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt() * scale
    assert out.dtype == dtype
    # bf16: rounded at most twice, 2^-8 each
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 8e-3)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-2, unit_offset=unit_offset), out, atol=1e-5, rtol=8e-3)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(weight_dtype: torch.dtype, unit_offset: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 16), torch.randn(16).to(weight_dtype), torch.randn(16).to(weight_dtype)
    out = layer_norm(x, weight, bias, 1e-2, unit_offset=unit_offset)
    centred = x - x.mean(-1, keepdim=True)
    scale = weight.float() + unit_offset
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt() * scale + bias.float()
    torch.testing.assert_close(out, expected)
