"""Names and shapes are the built model's, and what ranks hold adds up to it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paceline.config.model import ModelConfig, MoEConfig
from paceline.config.presets import preset, preset_names
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.costs.parameters import Holdings, count_boxes, model_shapes, part_shapes, rank_parameters
from paceline.costs.placement import local_box
from paceline.costs.stages import cut_stages, stages_of_rank
from paceline.models.transformer import Transformer


def _built(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", preset_names())
def test_shapes_are_the_built_models(name: str) -> None:
    model = ModelConfig(**preset(name))
    assert model_shapes(model) == _built(Transformer(model, device="meta"))


EVERY_OPTION = ModelConfig(
    **{
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 4,
        "ffn_size": 48,
        "vocab_size": 65,
        "attention": "mla",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "norm": "layernorm",
        "post_norm": True,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "num_experts": 4,
        "top_k": 2,
        "mtp_layers": 2,
    },
    moe=MoEConfig(first_dense_layers=1, num_shared_experts=2, ffn_size=24, shared_gate=True, bias_balance=True),
)


def test_shapes_of_every_option_and_part() -> None:
    """Also options that no preset combines, and the parts that `Transformer.part` makes."""
    for model in (EVERY_OPTION, ModelConfig(**preset("tiny_gpt")), ModelConfig(**preset("tiny_llama"))):
        built = Transformer(model, device="meta")
        for blocks, first, last in ((range(2), True, False), (range(1, 3), False, False), (range(2, 4), False, True)):
            part = built.part(blocks, first=first, last=last)
            assert part_shapes(model, blocks, first=first, last=last) == _built(part)


def _config(model: ModelConfig, **parallel: Any) -> RunConfig:
    return RunConfig.model_validate({"model": model.model_dump(), "parallel": parallel, "train": {"seq_len": 64}})


LAYOUTS = [
    ("tiny_gpt", {"tp": 2, "pp": 2}, 8),
    ("tiny_llama", {"tp": 4, "pp": 2}, 16),  # two KV heads over four ranks
    ("tiny_llama", {"tp": 2, "pp": 4, "cp": 2}, 16),
    ("tiny_moe", {"ep": 4, "etp": 2, "pp": 2}, 16),
    ("tiny_moe", {"tp": 2, "ep": 8}, 8),
    ("tiny_switch", {"tp": 2, "ep": 2, "pp": 2}, 8),
    ("tiny_deepseek", {"tp": 4, "ep": 2, "pp": 2, "pipeline_schedule": "zbv", "stages_per_rank": 2}, 8),
    ("tiny_deepseek", {"ep": 8, "pp": 2, "dp_replicate": 2}, 16),
    ("tiny_deepseek", {"tp": 4, "pp": 2, "order": ("tp", "dp_shard", "pp", "cp", "dp_replicate")}, 16),
]


@pytest.mark.parametrize(("name", "parallel", "world_size"), LAYOUTS, ids=str)
def test_ranks_hold_what_a_build_of_their_stages_would(name: str, parallel: dict[str, Any], world_size: int) -> None:
    model = ModelConfig(**preset(name))
    config = _config(model, **parallel)
    built, holdings = Transformer(model, device="meta"), Holdings(config, world_size)
    stages = cut_stages(config, config.parallel.stages)
    for rank in range(world_size):
        place = holdings.grid.coordinate(rank)
        local: dict[str, tuple[int, ...]] = {}
        for stage in stages_of_rank(config.parallel, place["pp"]):
            part = built.part(stages[stage], first=stage == 0, last=stage == len(stages) - 1)
            for key, parameter in part.named_parameters():
                box = local_box(key, parameter.shape, model, holdings.grid.sizes, place)
                slices = [slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True)]
                local[key] = tuple(parameter[tuple(slices)].shape)
        boxes = rank_parameters(config, world_size, place)
        assert {key: box.shape for key, box in boxes.items()} == local
        assert holdings.of_rank(rank).total == count_boxes(boxes)
    held = [holdings.of_rank(rank).total for rank in range(world_size)]
    assert holdings.of_all_ranks == sum(held)
    for stage in range(config.parallel.pp):
        ranks = holdings.grid.order.stage(stage)
        assert held[ranks[0]] == max(held[rank] for rank in ranks)
        assert held[ranks[-1]] == min(held[rank] for rank in ranks)


@pytest.mark.parametrize(("name", "parallel", "world_size"), LAYOUTS, ids=str)
def test_what_ranks_hold_adds_up_to_the_model(name: str, parallel: dict[str, Any], world_size: int) -> None:
    """Without what is held more than once; and every element is somewhere, once in each distinct part."""
    model = ModelConfig(**preset(name))
    config = _config(model, **parallel)
    holdings = Holdings(config, world_size)
    held, again = holdings.one_copy
    assert held - again == count_parameters(model).total

    whole = model_shapes(model)
    times = {key: torch.zeros(shape, dtype=torch.int16) for key, shape in whole.items()}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    sizes = holdings.grid.sizes
    for pp, tp, ep, etp in itertools.product(*(range(sizes[axis]) for axis in ("pp", "tp", "ep", "etp"))):
        boxes = rank_parameters(config, world_size, {"pp": pp, "tp": tp, "ep": ep, "etp": etp})
        for key, box in boxes.items():
            if (key, box.offsets) not in seen:
                seen.add((key, box.offsets))
                part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.shape, strict=True))
                times[key][part] += 1
    assert all(bool((count == 1).all()) for count in times.values())


@pytest.mark.parametrize(
    ("name", "parallel", "world_size", "changes"),
    [("gpt3_175b", {"tp": 8, "pp": 16}, 1024, {}), ("deepseek_v3", {"tp": 2, "pp": 16, "ep": 64}, 2048, {})],
)
def test_large_models(name: str, parallel: dict[str, Any], world_size: int, changes: dict[str, Any]) -> None:
    model = ModelConfig(**preset(name))
    held, again = Holdings(_config(model, **parallel), world_size).one_copy
    assert held - again == count_parameters(model).total
