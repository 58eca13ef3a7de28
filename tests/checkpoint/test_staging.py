"""Copies on the host do not change when the state does, and their memory is used again."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint import staging
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.staging import HostBuffers
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import CheckpointWriter, Contents, load_into, open_checkpoint


def blocks(device: str = "cpu") -> dict:
    shapes = {"a": (100, 30), "b": (), "c": (7,), "d": (64, 64)}
    made = {(name, (0,) * len(shape)): torch.randn(shape, device=device) for name, shape in shapes.items()}
    made["e", (0, 0)] = torch.randn(30, 20, device=device).bfloat16().t()
    return made


@pytest.mark.parametrize("slab_bytes", [4096, 2**20])
def test_copies_are_apart_and_memory_is_reused(monkeypatch, slab_bytes):
    monkeypatch.setattr(staging, "_SLAB_BYTES", slab_bytes)
    buffers = HostBuffers()
    sizes = []
    for _ in range(3):
        state = blocks()
        kept = {key: tensor.clone() for key, tensor in state.items()}
        staged = buffers.copy(state)
        for tensor in state.values():
            tensor.zero_()
        staged.wait()
        for key, tensor in kept.items():
            assert torch.equal(staged.blocks[key], tensor), key
        sizes.append(buffers.num_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0


def test_blocks_are_packed_without_gaps(monkeypatch):
    monkeypatch.setattr(staging, "_SLAB_BYTES", 4 * 4096)
    state = {}
    for index in range(8):
        state[f"large{index}", (0,)] = torch.zeros(1024)
        state[f"small{index}", (0,)] = torch.zeros(8)
    buffers = HostBuffers()
    buffers.copy(state)
    # 8 large ones fill two slabs to the last byte, the small ones share a third
    assert buffers.num_bytes == 3 * 4 * 4096
    state["one more", (0,)] = torch.ones(3)
    assert buffers.copy(state).blocks["one more", (0,)].tolist() == [1.0] * 3
    assert buffers.num_bytes == 3 * 4 * 4096


@pytest.mark.gpu
def test_an_update_queued_right_after_the_save_does_not_leak(tmp_path):
    weights = torch.full((50_000_000,), 1.0, device="cuda")
    writer = CheckpointWriter(Ranks())
    for step in range(1, 4):
        weights.fill_(step)
        value = ShardedValue.from_full(weights)
        folder = tmp_path / f"step_{step:08d}"
        writer.save(folder, Contents(values={"model/a": value}, state=TrainState(step=step)), background=True)
        # no synchronisation: the copies above are still in the queue
        weights.fill_(-1.0)
    writer.close()
    for step in range(1, 4):
        into = torch.zeros(50_000_000, device="cuda")
        checkpoint = open_checkpoint(tmp_path / f"step_{step:08d}")
        load_into(checkpoint, {"model/a": ShardedValue.from_full(into)})
        assert into.eq(step).all()
    assert writer._buffers._slabs[0].is_pinned()
