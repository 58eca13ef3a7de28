"""A parameter's start depends on seed, name and row, and on nothing else (case 73)."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.models.init import fill_normal, init_parameter, initial_std
from paceline.models.transformer import Transformer


def test_padding_rows_changes_no_other_row() -> None:
    for rows, padded in ((50257, 50304), (1000, 1024), (1024, 2048)):
        plain, wide = torch.empty(rows, 4), torch.empty(padded, 4)
        fill_normal(plain, 0.02, 7, "embed.weight")
        fill_normal(wide, 0.02, 7, "embed.weight")
        assert torch.equal(plain, wide[:rows])


def test_layers_do_not_depend_on_how_many_there_are() -> None:
    models = []
    for layers in (2, 4):
        config = ModelConfig(**preset("tiny_llama") | {"num_layers": layers, "scaled_residual_init": False})
        models.append(Transformer(config))
        models[-1].init_weights(5)
    short, long = (model.state_dict() for model in models)
    assert all(torch.equal(value, long[name]) for name, value in short.items())


def test_seeds_and_names_give_other_numbers() -> None:
    values = []
    for seed, name in ((1, "a.weight"), (2, "a.weight"), (1, "b.weight")):
        value = torch.empty(8, 8)
        fill_normal(value, 1.0, seed, name)
        values.append(value)
    assert not torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_llama", "tiny_moe", "tiny_switch", "tiny_deepseek"])
def test_meta_then_empty_then_init_equals_init(name: str) -> None:
    config = ModelConfig(**preset(name))
    direct = Transformer(config)
    direct.init_weights(3)
    late = Transformer(config, device="meta")
    late.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*late.parameters(), *late.buffers()]:
            tensor.fill_(float("nan"))
    late.init_weights(3)
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), late.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(direct.buffers(), late.buffers(), strict=True))
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in Transformer(config).parameters())


def test_kinds() -> None:
    config = ModelConfig(**preset("tiny_gpt"))
    model = Transformer(config)
    model.init_weights(0)
    values = dict(model.named_parameters())
    residual = 0.02 / math.sqrt(2 * config.num_layers)
    for name, value in values.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            wanted = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert float(value.detach().std()) == pytest.approx(wanted, rel=0.05), name
            assert float(value.detach().mean()) == pytest.approx(0.0, abs=5 * wanted / math.sqrt(value.numel())), name


def test_unit_offset_norms_start_at_zero_and_stacked_residuals_are_scaled() -> None:
    config = ModelConfig(norm_unit_offset=True, num_layers=8)
    value = torch.empty(4)
    init_parameter("blocks.0.attention.q_norm.weight", value, config, 0)
    assert not value.any()
    assert initial_std("blocks.0.feed_forward.experts.down_weight", config) == pytest.approx(0.02 / 4)
