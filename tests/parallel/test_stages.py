"""Each rank gets its parts, under the plain model's names; an embedding at both ends is summed and saved once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.shards import Shard
from paceline.parallel.stages import split_into_stages, tied_shards
from tests.parallel.tiny import tiny_config, tiny_model

CUT = (range(0, 1), range(1, 3), range(3, 5), range(5, 6))
LAYOUTS: list[tuple[int, str, int, dict[str, Any]]] = [
    (4, "1f1b", 1, {"tied": True}),
    (4, "1f1b", 1, {"tied": False}),
    (4, "1f1b", 1, {"tied": False, "mtp_layers": 1}),
    (2, "interleaved_1f1b", 2, {"tied": True}),
    (2, "zbv", 2, {"tied": True}),
]


def parts(rank: int, world_size: int) -> list[tuple[list[list[str]], dict[str, tuple[Any, ...]]]]:
    found = []
    for pp, schedule, per_rank, model in LAYOUTS:
        config = ParallelConfig(pp=pp, pipeline_schedule=schedule, stages_per_rank=per_rank)  # type: ignore[arg-type]
        mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
        plain = tiny_model(tiny_config(num_layers=6, **model))
        stages = split_into_stages(plain, config, mesh, CUT)
        cut = {"embed.weight": Shard(whole=torch.Size((67, 16)), offsets=(5, 0), replicas=(mesh["stage"],))}
        tied = {
            name: (tuple(axis.name for axis in s.replicas), s.replicas[-1].ranks, s.saved, s.offsets)
            for name, s in tied_shards(stages, cut, mesh).items()
        }
        found.append(([[name for name, _ in stage.named_parameters()] for stage in stages], tied))
    return found


def test_parts_and_what_both_ends_hold() -> None:
    by_rank = run(parts, 4)
    for index, (pp, schedule, _, model) in enumerate(LAYOUTS):
        plain = tiny_model(tiny_config(num_layers=6, **model))
        results = [result[index] for result in by_rank]
        held = [name for names, _ in results[:: 4 // pp] for stage in names for name in stage]
        both_ends = model["tied"] or "mtp_layers" in model
        assert set(held) == {name for name, _ in plain.named_parameters()}
        assert sorted(held) == sorted([name for name, _ in plain.named_parameters()] + ["embed.weight"] * both_ends)
        tied = [shards for _, shards in results[:: 4 // pp]]
        if both_ends and schedule != "zbv":
            ends = (0, 4 - 4 // pp)
            assert tied[0] == {"embed.weight": (("stage", "ends"), ends, True, (5, 0))}
            assert tied[-1] == {"embed.weight": (("stage", "ends"), ends, False, (5, 0))}
            assert not any(tied[1:-1])
        else:
            assert not any(tied)


def test_stages_of_a_v_share_the_embedding() -> None:
    config = ParallelConfig(pp=1, pipeline_schedule="zbv", stages_per_rank=2)
    mesh = ParallelMesh(config, world_size=1, rank=0, device_type="cpu")
    first, last = split_into_stages(tiny_model(tiny_config(tied=True)), config, mesh, (range(0, 2), range(2, 3)))
    assert first.embed is not None and first.embed is last.embed
    assert first.head is None and first.norm is None and last.head is not None


def test_a_cut_of_another_length_is_a_mistake() -> None:
    config = ParallelConfig()
    mesh = ParallelMesh(config, world_size=1, rank=0, device_type="cpu")
    with pytest.raises(AssertionError, match="2 stages were cut"):
        split_into_stages(tiny_model(tiny_config()), config, mesh, (range(0, 2), range(2, 3)))
