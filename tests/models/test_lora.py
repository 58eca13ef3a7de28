"""Adapters of the plain model: what is frozen, what is computed, and how they are put out of work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.config.lora import LoraConfig, is_adapter
from paceline.config.model import ModelConfig
from paceline.models.init import WeightInit
from paceline.models.lora import LoraLinear, adapters_off, attach_adapters, lora_linears
from paceline.models.transformer import Transformer
from tests.parallel.tiny import tiny_config, tiny_model

PLAIN = LoraConfig(rank=3, alpha=5)


def adapted(lora: LoraConfig = PLAIN, config: ModelConfig | None = None, *, seed: int = 7) -> Transformer:
    """A tiny model with adapters that say something: the second matrices are not 0."""
    config = config or tiny_config()
    model = tiny_model(config, device="cpu")
    attach_adapters(model, lora)
    init = WeightInit(config, seed, lora)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        init(name, parameter.data, parameter.shape, (0,) * parameter.dim())
        if name.endswith("lora_b"):
            parameter.data.normal_(generator=generator).mul_(0.3)
        if name.endswith("lora_magnitude"):
            parameter.data.uniform_(0.5, 2.0, generator=generator)
    model.reset_buffers()
    return model


def logits(model: Transformer) -> Tensor:
    found = model(torch.arange(6)[None]).logits
    assert found is not None
    return found


def by_hand(linear: LoraLinear, x: Tensor) -> Tensor:
    """The definition, with the changed matrix written out."""
    changed = linear.weight + linear.adapter.scale * linear.lora_b @ linear.lora_a
    if linear.lora_magnitude is not None:
        changed = changed * (linear.lora_magnitude / changed.norm(dim=1).detach())[:, None]
    return x @ changed.T + (0 if linear.bias is None else linear.bias)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_computes_what_the_papers_define(dora: bool, bias: bool) -> None:
    lora = LoraConfig(rank=4, alpha=6, dora=dora)
    model = adapted(lora, tiny_config(qkv_bias=bias, position="learned" if bias else "rope"))
    for linear in (model.get_submodule("blocks.1.attention.q_proj"), model.get_submodule("blocks.0.attention.o_proj")):
        assert isinstance(linear, LoraLinear)
        if linear.bias is not None:
            linear.bias.data.normal_()
        x = torch.randn(5, linear.weight.shape[1], dtype=torch.float64)
        linear.double()
        own = [parameter for parameter in linear.parameters() if parameter.requires_grad]
        assert len(own) == (3 if dora else 2)
        expected = torch.autograd.grad(by_hand(linear, x).sin().sum(), own)
        found = torch.autograd.grad(linear(x).sin().sum(), own)
        torch.testing.assert_close(linear(x), by_hand(linear, x))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_only_adapters_learn() -> None:
    model = adapted()
    assert all(parameter.requires_grad == is_adapter(name) for name, parameter in model.named_parameters())
    assert len(lora_linears(model)) == 3 * 7


def test_targets_are_those_that_are_named() -> None:
    model = tiny_model(tiny_config())
    names = attach_adapters(model, LoraConfig(rank=2, targets=("v_proj", "down_proj")))
    assert names == [f"blocks.{i}.{n}.weight" for i in range(3) for n in ("attention.v_proj", "feed_forward.down_proj")]


def test_rank_0_changes_nothing() -> None:
    model = tiny_model(tiny_config())
    assert attach_adapters(model, LoraConfig()) == []
    assert not lora_linears(model) and all(parameter.requires_grad for parameter in model.parameters())


def test_shared_experts_have_adapters_and_routed_ones_are_frozen() -> None:
    model = tiny_model(tiny_config(moe=True))
    names = attach_adapters(model, PLAIN)
    assert not any("router" in name or ".experts." in name for name in names)
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".experts." in name)


def test_a_new_adapter_changes_nothing_yet() -> None:
    config = tiny_config()
    plain = tiny_model(config, device="cpu")
    plain.init_weights(7)
    model = tiny_model(config, device="cpu")
    attach_adapters(model, PLAIN)
    init = WeightInit(config, 7, PLAIN)
    for name, parameter in model.named_parameters():
        init(name, parameter.data, parameter.shape, (0,) * parameter.dim())
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=0)


def test_adapters_off_is_the_base() -> None:
    model = adapted()
    base = tiny_model(tiny_config(), device="cpu")
    base.load_state_dict({name: value for name, value in model.state_dict().items() if not is_adapter(name)})
    whole = logits(model)
    with adapters_off(model):
        torch.testing.assert_close(logits(model), logits(base), rtol=0, atol=0)
        with adapters_off(model):
            pass
        torch.testing.assert_close(logits(model), logits(base), rtol=0, atol=0)
    torch.testing.assert_close(logits(model), whole, rtol=0, atol=0)
    assert not torch.allclose(whole, logits(base))


def test_adapters_off_of_a_part_is_off_for_all_of_its_model() -> None:
    model = adapted()
    first, last = model.part(range(1), first=True, last=False), model.part(range(1, 3), first=False, last=True)
    tokens = torch.arange(6)[None]

    def through() -> Tensor:
        found = last(tokens, hidden=first(tokens).hidden).logits
        assert found is not None
        return found

    with adapters_off(first, last):
        off = through()
    with adapters_off(model):
        torch.testing.assert_close(off, logits(model))
    torch.testing.assert_close(through(), logits(model))


def test_adapters_off_of_a_model_without_any_does_nothing() -> None:
    with adapters_off(nn.Linear(2, 2)):
        pass


def test_a_switch_comes_back_after_an_error() -> None:
    model = adapted()
    with pytest.raises(ZeroDivisionError), adapters_off(model):
        raise ZeroDivisionError
    assert lora_linears(model)[0].adapter.switch.on


def test_dropout_is_on_the_adapter_alone() -> None:
    model = adapted(LoraConfig(rank=3, dropout=0.5))
    linear = lora_linears(model)[0]
    x = torch.ones(4, linear.weight.shape[1])
    assert not torch.equal(linear(x), linear(x))
    with adapters_off(model):
        assert torch.equal(linear(x), linear(x))
    model.eval()
    assert torch.equal(linear(x), linear(x))


def test_first_matrices_begin_as_peft_has_them() -> None:
    bound = 1 / 16**0.5
    down = lora_linears(adapted(LoraConfig(rank=64)))[0].lora_a.detach()
    assert down.abs().max() <= bound and abs(float(down.std()) - bound / 3**0.5) < 0.02 * bound
    down = lora_linears(adapted(LoraConfig(rank=64, init="gaussian")))[0].lora_a.detach()
    assert abs(float(down.std()) * 64 - 1) < 0.1
