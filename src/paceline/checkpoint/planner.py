"""Which blocks are written and read, in the terms of torch.distributed.checkpoint?

DCP's default planners look inside DTensors and plain tensors only, and find other objects through a private protocol
that serves tensor subclasses alone (2.11 to 2.13). These two build the same public plans from ``ShardedValue``;
duplicates, validation and the files stay DCP's, so its own tools read our checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from paceline.checkpoint.pieces import Piece, ShardedValue

BLOCK_BYTES = 64 * 2**20
"""Pieces are cut into blocks of at most so many bytes: host buffers pack well, and a reader that needs a part of a
large tensor (DCP reads whole blocks) reads little more than that."""

BlockKey = tuple[str, tuple[int, ...]]
"""Name and offsets: an element is held by one block of a name, so this says which."""


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the blocks of a ``dict[str, ShardedValue]``.

    ``blocks`` is what ``resolve_data`` hands to the writer; it may be replaced by copies of the same shapes.
    """

    blocks: dict[BlockKey, Tensor]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self.blocks = {(name, block.offsets): block.tensor for name, block in _blocks(state_dict)}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [_write_item(name, self.state_dict[name], block) for name, block in _blocks(self.state_dict)]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.blocks[block_key(write_item)]


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans reading into the pieces of a ``dict[str, ShardedValue]``, from blocks cut in any other way."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.pieces = {
            (name, piece.offsets): piece.tensor
            for name, value in state_dict.items()
            for piece in value.pieces
            if piece.tensor.numel()
        }

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata), name
            wanted = [_chunk(piece) for piece in value.pieces if piece.tensor.numel()]
            items += create_read_items_for_chunk_list(name, saved, wanted)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        tensor = self.pieces[index.fqn, tuple(index.offset)]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor


def block_key(item: WriteItem) -> BlockKey:
    assert item.index.offset is not None
    return item.index.fqn, tuple(item.index.offset)


def unfilled(metadata: Metadata) -> list[str]:
    """Names whose blocks do not add up to the whole tensor: no rank held the rest.

    DCP checks this itself with two ranks or more, and that blocks do not overlap.
    """
    return [
        name
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
        and sum(math.prod(chunk.sizes) for chunk in saved.chunks) != math.prod(saved.size)
    ]


def _blocks(values: Mapping[str, ShardedValue]) -> Iterator[tuple[str, Piece]]:
    for name, value in values.items():
        if math.prod(value.global_shape) == 0:
            # nobody holds anything of it, but it has a name and a shape to keep
            nothing = torch.empty(value.global_shape, dtype=value.dtype)
            yield name, Piece(offsets=(0,) * nothing.dim(), tensor=nothing)
            continue
        for piece in value.pieces:
            if piece.saved and piece.tensor.numel():
                for block in _cut(piece):
                    yield name, block


def _cut(piece: Piece) -> Iterator[Piece]:
    """Cuts along the first dimension that has more than one row, at places that depend on the piece alone: ranks that
    hold the same piece cut it alike, and so write it once."""
    tensor = piece.tensor
    if tensor.nbytes <= BLOCK_BYTES:
        yield piece
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    row_bytes = tensor.nbytes // tensor.shape[dim]
    rows = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, tensor.shape[dim], rows):
        offsets = list(piece.offsets)
        offsets[dim] += start
        part = tensor.narrow(dim, start, min(rows, tensor.shape[dim] - start))
        yield from _cut(Piece(offsets=tuple(offsets), tensor=part))


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


def _write_item(name: str, value: ShardedValue, block: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(block.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(block), properties=TensorProperties(dtype=value.dtype), size=value.global_shape
        ),
    )
