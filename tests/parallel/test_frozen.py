"""Frozen linears in 4 and 8 bits: what is computed, what is kept, and what is left of the weights."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from torch import Tensor, nn

from paceline.config.lora import LoraConfig
from paceline.errors import ConfigError
from paceline.kernels.fp8_cast import Scaling
from paceline.kernels.nf4 import Nf4Weight, nf4_linear
from paceline.models.lora import LoraLinear, attach_adapters
from paceline.models.transformer import Transformer
from paceline.parallel.adapters import join_adapters
from paceline.parallel.collectives import Axis
from paceline.parallel.flat import held_bytes
from paceline.parallel.frozen import FrozenBase, give_up, keep_in_nf4, refuse_without_torchao
from paceline.parallel.low_precision import Fp8Options, Fp8Weights, use_fp8
from tests.parallel.tiny import tiny_config, tiny_model

LORA = LoraConfig(rank=4, alpha=8)
ALONE = Axis.alone("tp", 0)
TOKENS = torch.arange(8)[None]


def adapted() -> Transformer:
    model = tiny_model(tiny_config(hidden_size=64, ffn_size=96, qkv_bias=True), device="cpu")
    model.init_weights(7)
    attach_adapters(model, LORA)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(generator=generator).mul_(0.2)
    return model


def results(model: Transformer) -> list[Tensor]:
    """Logits, and the gradients of all adapters."""
    logits = model(TOKENS).logits
    assert logits is not None
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [logits, *torch.autograd.grad(logits.float().logsumexp(-1).sum(), learned)]


def test_a_number_in_nf4_is_near() -> None:
    weight = torch.randn(64, 96)
    kept = Nf4Weight(weight)
    assert (kept.wide(torch.float32) - weight).abs().mean() < 0.1 * weight.abs().mean()
    assert kept.nbytes < 0.6 * weight.numel()
    x = torch.randn(5, 96, requires_grad=True)
    out = nf4_linear(x, kept, torch.ones(64))
    torch.testing.assert_close(out, x @ kept.wide(torch.float32).T + 1)
    (grad,) = torch.autograd.grad(out.sin().sum(), [x])
    torch.testing.assert_close(grad, out.detach().cos() @ kept.wide(torch.float32))


def test_nf4_computes_as_weights_that_were_rounded_to_it() -> None:
    model = adapted()
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if isinstance(module, LoraLinear):
            module.weight.data = Nf4Weight(module.weight).wide(torch.float32)
    base = FrozenBase()
    base.add(keep_in_nf4(model, ALONE))
    join_adapters(model, ALONE)
    before = results(model)
    base.settle()
    for ours, theirs in zip(results(model), results(rounded), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(results(model)[0], before[0], atol=1e-3)
    linears = [module for module in model.modules() if isinstance(module, LoraLinear)]
    elements = sum(linear.weight.numel() for linear in linears)
    assert all(linear.weight.isnan().all() for linear in linears)
    assert sum(held_bytes(linear.weight) for linear in linears) == 4 * len(linears)
    assert 0.5 * elements < base.nbytes < 0.6 * elements


@pytest.mark.parametrize("scaling", ["tensorwise"])
def test_fp8_is_cast_once_and_the_weights_are_given_up(scaling: Scaling) -> None:
    model = adapted().bfloat16()
    weights, base = Fp8Weights(), FrozenBase()
    products = use_fp8(model, Fp8Options(scaling=scaling), weights, cached=True)
    linears = [linear for product in products for linear in product.linears]
    base.keep_fp8(weights)
    join_adapters(model, ALONE)
    before = results(model)
    base.settle()
    weights.expire()  # as after every step
    for ours, theirs in zip(results(model), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(linear.weight.isnan().all() for linear in linears)
    elements = sum(linear.weight.numel() for linear in linears)
    assert 2 * elements <= base.nbytes < 2 * elements + 16 * len(linears)


def test_what_is_given_up_keeps_its_shape() -> None:
    linear = nn.Linear(6, 4, bias=False)
    give_up(linear)
    assert linear.weight.shape == (4, 6) and held_bytes(linear.weight) == 4 and math.isnan(linear.weight[3, 5])


def test_nf4_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "torchao.quantization", "torchao.dtypes.nf4tensor"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"lora\.base = 'nf4' needs torchao") as caught:
        refuse_without_torchao()
    assert "pip install -c constraints.txt -e '.[qlora]'" in caught.value.next_step
