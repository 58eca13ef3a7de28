"""Shards of DTensors, as FSDP2 and tensor parallelism make them, are the pieces they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed import run
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import CheckpointWriter, Contents, load_into, open_checkpoint

# 2 ranks x 2 ranks; 1003, 3 and 1 rows do not divide
SHAPES = {"a": (1003, 6), "b": (3, 4), "c": (1,), "d": (8, 1003)}
PLACEMENTS = {
    "rows": [Replicate(), Shard(0)],
    "rows of rows": [Shard(0), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
    "replicated": [Replicate(), Replicate()],
}


def full(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name) + SHAPES[name][0]))


def save_dtensors(rank: int, world_size: int, folder: str, placement: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    values = {}
    for name in SHAPES:
        placements = [p if not p.is_shard(1) or len(SHAPES[name]) > 1 else Replicate() for p in PLACEMENTS[placement]]
        sharded = distribute_tensor(full(name), mesh, placements)
        values[f"model/{name}"] = ShardedValue.from_dtensor(sharded)
    contents = Contents(values=values, state=TrainState(step=1))
    writer = CheckpointWriter(Ranks.create())
    writer.save(Path(folder), contents)
    writer.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_distributed_tensors_are_read_whole(tmp_path, placement):
    folder = tmp_path / "step_00000001"
    run(save_dtensors, 4, str(folder), placement)
    into = {f"model/{name}": torch.zeros(shape) for name, shape in SHAPES.items()}
    load_into(open_checkpoint(folder), {name: ShardedValue.from_full(tensor) for name, tensor in into.items()})
    for name in SHAPES:
        assert torch.equal(into[f"model/{name}"], full(name)), name


def two_layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7))


def save_fsdp_and_tp(rank: int, world_size: int, folder: str) -> None:
    """FSDP over tensor parallelism gives strided shards: the order of the two cuts is not that of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = two_layers()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    values = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        values[f"model/{name}"] = ShardedValue.from_dtensor(parameter)
    writer = CheckpointWriter(Ranks.create())
    writer.save(Path(folder), Contents(values=values, state=TrainState(step=1)))
    # and back into the shards
    before = {name: value.pieces[0].tensor.clone() for name, value in values.items() if value.pieces}
    for value in values.values():
        for piece in value.pieces:
            piece.tensor.zero_()
    load_into(open_checkpoint(Path(folder)), values, ranks=Ranks.create())
    for name, tensor in before.items():
        assert torch.equal(values[name].pieces[0].tensor, tensor), name
    writer.close()


def test_strided_shards_of_fsdp_and_tensor_parallel(tmp_path):
    folder = tmp_path / "step_00000001"
    run(save_fsdp_and_tp, 4, str(folder))
    expected = dict(two_layers().named_parameters())
    into = {f"model/{name}": torch.zeros_like(parameter) for name, parameter in expected.items()}
    load_into(open_checkpoint(folder), {name: ShardedValue.from_full(tensor) for name, tensor in into.items()})
    for name, parameter in expected.items():
        assert torch.equal(into[f"model/{name}"], parameter.detach()), name
