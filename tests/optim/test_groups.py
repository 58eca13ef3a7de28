"""Global shapes and names decide who decays (case 74)."""

from __future__ import annotations

import pytest

from paceline.config.optim import OptimConfig
from paceline.optim.groups import describe_groups, parameter_groups, parameter_kind
from tests.optim.engines import SHAPES, Layout, ToyEngine, toy_values

VECTORS = {
    "blocks.0.norm.weight",
    "blocks.0.attention.q.bias",
    "blocks.1.moe.experts.up_bias",
    "blocks.1.moe.shared_gate.weight",
    "norm.weight",
}


def test_kinds() -> None:
    kinds = {name: parameter_kind(name, shape) for name, shape in SHAPES.items()}
    assert {name for name, kind in kinds.items() if kind == "vector"} == VECTORS
    assert kinds["embed.weight"] == "embedding"
    assert kinds["head.weight"] == "head"
    assert kinds["blocks.1.moe.experts.up_weight"] == kinds["blocks.1.moe.router.weight"] == "matrix"


@pytest.mark.parametrize("layout", ["whole", "flat", "rows"])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon"])
def test_shards_of_any_layout_are_grouped_by_what_they_are_part_of(layout: Layout, name: str) -> None:
    config = OptimConfig(name=name)
    for rank in range(3):
        parameters = ToyEngine(toy_values(0), layout, rank, 3).main_parameters()
        for group in parameter_groups(config, parameters):
            for parameter in group.parameters:
                assert (group.weight_decay == 0) == (parameter.name in VECTORS)
                matrix = parameter_kind(parameter.name, parameter.global_shape) == "matrix"
                assert (group.rule == "muon") == (name == "muon" and matrix)


def test_embeddings_without_decay() -> None:
    config = OptimConfig(decay_embeddings=False)
    groups = parameter_groups(config, ToyEngine(toy_values(0)).main_parameters())
    assert {group.name: group.weight_decay for group in groups} == {
        "matrices": 0.1,
        "embeddings": 0.0,
        "norms and biases": 0.0,
    }


def test_report_counts_every_parameter_once() -> None:
    assert describe_groups(OptimConfig(name="muon"), SHAPES).splitlines() == [
        "matrices: 5 tensors, 2,172 parameters, muon, lr 0.02, weight decay 0.1",
        "head: 1 tensors, 600 parameters, adamw, lr 0.0003, weight decay 0.1",
        "embeddings: 1 tensors, 600 parameters, adamw, lr 0.0003, weight decay 0.1",
        "norms and biases: 5 tensors, 132 parameters, adamw, lr 0.0003, weight decay 0",
    ]
