"""Checkpoints are written and read block by block, and are as whole as any."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.checkpoint import planner
from paceline.checkpoint.chunks import ChunkReader
from paceline.checkpoint.locate import find_checkpoint
from paceline.checkpoint.pieces import Box, ShardedValue
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import load_into
from paceline.checkpoint.streamed import write_streamed
from paceline.errors import CheckpointError

VALUES = {
    "model/a": torch.arange(60.0).view(12, 5),
    "model/b": torch.arange(7, dtype=torch.bfloat16),
    "model/c": torch.arange(24, dtype=torch.float64).view(2, 3, 4),
}


def write(folder, read=None, threads=3):
    folder.mkdir()
    write_streamed(
        folder,
        {name: (value.shape, value.dtype) for name, value in VALUES.items()},
        read or part_of,
        state=TrainState(step=7),
        recipe="",
        files={"hub/note.txt": b"kept"},
        threads=threads,
    )


def part_of(name: str, box: Box) -> torch.Tensor:
    value = VALUES[name]
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        value = value.narrow(dim, start, size)
    return value


@pytest.mark.parametrize("threads", [1, 3, 20])
def test_reads_back(tmp_path, monkeypatch, threads):
    monkeypatch.setattr(planner, "BLOCK_BYTES", 48)
    write(tmp_path / "done", threads=threads)
    checkpoint = find_checkpoint(tmp_path / "done")
    assert checkpoint.step == 7 and (checkpoint.folder / "hub/note.txt").read_bytes() == b"kept"
    into = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    load_into(checkpoint, {name: ShardedValue.from_full(value) for name, value in into.items()})
    assert all(torch.equal(into[name], value) for name, value in VALUES.items())


def test_boxes_across_chunks_from_many_threads(tmp_path, monkeypatch):
    """A cache that holds one chunk only, asked by all at once."""
    monkeypatch.setattr(planner, "BLOCK_BYTES", 48)
    write(tmp_path / "done")
    reader = ChunkReader(tmp_path / "done", find_checkpoint(tmp_path / "done").metadata(), cache_bytes=1)
    box = Box(offsets=(1, 2), sizes=(9, 2))
    wrong: list[int] = []

    def look() -> None:
        for _ in range(20):
            if not torch.equal(reader.read("model/a", box), part_of("model/a", box)):
                wrong.append(1)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and reader.read("model/b", Box(offsets=(7,), sizes=(0,))).numel() == 0
    assert len(reader._cache) <= 5  # one, and what the last of each thread left


def test_the_first_error_is_the_one_that_is_told(tmp_path):
    def broken(name: str, box: Box) -> torch.Tensor:
        if name == "model/b":
            raise CheckpointError("the source ended")
        return part_of(name, box)

    for threads in (1, 3):
        with pytest.raises(CheckpointError, match="the source ended"):
            write(tmp_path / f"broken{threads}", broken, threads)
        assert not (tmp_path / f"broken{threads}" / "manifest.json").exists()


def test_a_damaged_chunk_is_named(tmp_path):
    write(tmp_path / "done", threads=1)
    metadata = find_checkpoint(tmp_path / "done").metadata()
    (file,) = (tmp_path / "done").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="model/c is in it"):
        ChunkReader(tmp_path / "done", metadata).read("model/c", Box(offsets=(0, 0, 0), sizes=(2, 3, 4)))
