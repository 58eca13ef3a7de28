"""A parameter's start depends on seed, name and row, and on nothing else (case 73)."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.models.init import WeightInit, initial_std
from paceline.models.transformer import Transformer


def filled(init: WeightInit, name: str, *whole: int, box: tuple[slice, ...] = ()) -> torch.Tensor:
    """The part ``box`` of a parameter, made alone."""
    place = torch.empty(whole)[box]
    offsets = [part.start or 0 for part in box] + [0] * (len(whole) - len(box))
    value = torch.full(place.shape, float("nan"))
    init(name, value, whole, offsets)
    return value


def test_a_part_is_the_same_part_of_the_whole() -> None:
    init = WeightInit(ModelConfig(), 3)
    boxes = {
        (2500, 6): [(slice(0, 7),), (slice(1000, 1030),), (slice(1024, 2048),), (slice(2499, 2500), slice(2, 5))],
        (4, 2, 700, 3): [(slice(1, 3),), (slice(0, 4), slice(0, 2), slice(350, 700)), (slice(3, 4), slice(1, 2))],
    }
    for whole, parts in boxes.items():
        everything = filled(init, "experts.up_weight", *whole)
        for box in parts:
            assert torch.equal(filled(init, "experts.up_weight", *whole, box=box), everything[box]), box


def test_padding_rows_changes_no_other_row() -> None:
    for rows, padded in ((50257, 50304), (1000, 1024), (1024, 2048)):
        plain, wide = (filled(WeightInit(ModelConfig(), 7), "embed.weight", count, 4) for count in (rows, padded))
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
        values.append(filled(WeightInit(ModelConfig(), seed), f"x.{name}", 8, 8))
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
    assert not filled(WeightInit(config, 0), "blocks.0.attention.q_norm.weight", 4).any()
    assert initial_std("blocks.0.feed_forward.experts.down_weight", config) == pytest.approx(0.02 / 4)
