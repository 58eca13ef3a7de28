"""Which dimension is cut over which axis, and who gets how much."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.costs.parameters import model_shapes
from paceline.costs.placement import copies, is_expert, local_box, placement, share

LLAMA = ModelConfig(**preset("tiny_llama"))  # 4 heads of 32 on 2 KV heads, width 384
MOE = ModelConfig(**preset("tiny_moe"))
MLA = ModelConfig(**preset("tiny_deepseek"))
GPT = ModelConfig(**preset("tiny_gpt"))


def _cut(model: ModelConfig, name: str) -> list[tuple[int, str, int]]:
    return [(cut.dim, cut.axis, cut.units) for cut in placement(name, model_shapes(model)[name], model)]


@pytest.mark.parametrize(
    ("model", "name", "cuts"),
    [
        (LLAMA, "embed.weight", [(0, "tp", 512)]),
        (LLAMA, "head.weight", [(0, "tp", 512)]),
        (LLAMA, "norm.weight", []),
        (LLAMA, "blocks.0.attention.q_proj.weight", [(0, "tp", 4)]),
        (LLAMA, "blocks.0.attention.k_proj.weight", [(0, "tp", 2)]),
        (LLAMA, "blocks.0.attention.o_proj.weight", [(1, "tp", 4)]),
        (LLAMA, "blocks.0.feed_forward.gate_proj.weight", [(0, "tp", 384)]),
        (LLAMA, "blocks.0.feed_forward.down_proj.weight", [(1, "tp", 384)]),
        (GPT, "embed.position_weight", []),
        (GPT, "blocks.0.attention.q_proj.bias", [(0, "tp", 4)]),
        (GPT, "blocks.0.attention.o_proj.bias", []),
        (GPT, "blocks.0.feed_forward.up_proj.bias", [(0, "tp", 512)]),
        (GPT, "blocks.0.feed_forward.down_proj.bias", []),
        (MOE, "blocks.0.feed_forward.router.weight", []),
        (MOE, "blocks.0.feed_forward.experts.up_weight", [(0, "ep", 8), (2, "etp", 96)]),
        (MOE, "blocks.0.feed_forward.experts.down_weight", [(0, "ep", 8), (2, "etp", 96)]),
        (MLA, "blocks.1.feed_forward.shared.up_proj.weight", [(0, "tp", 96)]),
        (MLA, "blocks.1.attention.q_down_proj.weight", []),
        (MLA, "blocks.1.attention.kv_down_proj.weight", []),
        (MLA, "blocks.1.attention.kv_up_proj.weight", [(0, "tp", 4)]),
        (MLA, "blocks.1.attention.kv_norm.weight", []),
        (MLA, "mtp.1.block.attention.q_up_proj.weight", [(0, "tp", 4)]),
        (MLA, "mtp.1.block.feed_forward.experts.up_weight", [(0, "ep", 8), (2, "etp", 96)]),
        (MLA, "mtp.1.proj.weight", []),
    ],
)
def test_cuts(model: ModelConfig, name: str, cuts: list[tuple[int, str, int]]) -> None:
    assert _cut(model, name) == cuts


def test_experts_are_the_stacked_matrices_alone() -> None:
    experts = {name.rsplit(".", 1)[-1] for name in model_shapes(MLA) if is_expert(name)}
    assert experts == {"up_weight", "down_weight"}


def test_key_value_heads_fewer_than_ranks_lie_on_runs_of_ranks() -> None:
    name, shape = "blocks.0.attention.k_proj.weight", (64, 128)
    boxes = [local_box(name, shape, LLAMA, {"tp": 4}, {"tp": rank}) for rank in range(4)]
    assert [box.offsets for box in boxes] == [(0, 0), (0, 0), (32, 0), (32, 0)]
    assert {box.shape for box in boxes} == {(32, 128)}
    assert copies(name, shape, LLAMA, "tp", 4) == 2 and copies(name, shape, LLAMA, "tp", 2) == 1
    assert copies("norm.weight", (128,), LLAMA, "tp", 4) == 4


def test_rows_of_the_vocabulary_are_uneven_and_never_padded() -> None:
    boxes = [local_box("embed.weight", (513, 128), LLAMA, {"tp": 4}, {"tp": rank}) for rank in range(4)]
    assert [box.shape[0] for box in boxes] == [129, 128, 128, 128]
    assert [box.offsets[0] for box in boxes] == [0, 129, 257, 385]


def test_axes_that_are_not_given_cut_nothing() -> None:
    for name, shape in model_shapes(MOE).items():
        assert local_box(name, shape, MOE, {}, {}).shape == shape


def test_shares_are_in_order_and_cover_everything() -> None:
    for units in range(1, 20):
        for size in range(1, units + 1):
            parts = [share(units, size, index) for index in range(size)]
            assert parts[0][0] == 0 and parts[-1][1] == units
            assert all(before[1] == after[0] for before, after in pairwise(parts))
