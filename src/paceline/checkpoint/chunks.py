"""Boxes of tensors out of files in the format of torch.distributed.checkpoint, without a process group.

DCP reads whole chunks; the last ones are kept, so that boxes which share a chunk read it once.
"""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from paceline.checkpoint.pieces import Box, BoxIndex
from paceline.errors import CheckpointError

CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    name: str
    box: Box


class ChunkReader:
    """Tensors by name and box. Safe to use from several threads; holds at most about ``cache_bytes``, or one chunk."""

    def __init__(self, folder: Path, metadata: Metadata, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._stored = metadata.storage_data
        self._index: dict[str, BoxIndex[_Chunk]] = {}
        self._limit = cache_bytes
        self._lock = Lock()
        self._cache: OrderedDict[tuple[str, tuple[int, ...]], Future[Tensor]] = OrderedDict()
        self._sizes: dict[tuple[str, tuple[int, ...]], int] = {}

    def shapes(self) -> dict[str, torch.Size]:
        return {name: entry.size for name, entry in self.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].properties.dtype

    def read(self, name: str, box: Box) -> Tensor:
        """The numbers of ``box``, in the dtype that was saved.

        Raises:
            CheckpointError: a file is missing or damaged, or the chunks do not cover the box.
        """
        value = torch.empty(box.sizes, dtype=self.dtype(name))
        filled = 0
        for common, chunk in self._touched(name, box):
            part = self._load(chunk)
            target = value
            for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
                part = part.narrow(dim, start - chunk.box.offsets[dim], size)
                target = target.narrow(dim, start - box.offsets[dim], size)
            target.copy_(part)
            filled += common.numel
        if filled != box.numel:
            raise CheckpointError(
                f"{name} is not whole in {self.folder}",
                evidence=f"Its files hold {filled} of {box.numel} numbers of the part {box.sizes} at {box.offsets}.",
                next_step="Use another checkpoint of the run.",
            )
        return value

    def _touched(self, name: str, box: Box) -> Iterator[tuple[Box, _Chunk]]:
        index = self._index.get(name)
        if index is None:  # two threads may both make it; they make the same
            boxes = [Box(offsets=tuple(e.offsets), sizes=tuple(e.sizes)) for e in self.tensors[name].chunks]
            index = self._index[name] = BoxIndex([(own, _Chunk(name=name, box=own)) for own in boxes])
        return index.touched(box)

    def _load(self, chunk: _Chunk) -> Tensor:
        key = (chunk.name, chunk.box.offsets)
        with self._lock:
            future = self._cache.get(key)
            mine = future is None
            if future is None:
                future = self._cache[key] = Future()
                self._sizes[key] = math.prod(chunk.box.sizes) * self.dtype(chunk.name).itemsize
                self._make_room(key)
            self._cache.move_to_end(key)
        if mine:
            try:
                future.set_result(self._read_chunk(chunk))
            except Exception as error:  # noqa: BLE001 - the threads that wait for this chunk must hear of it
                future.set_exception(error)
        return future.result()

    def _make_room(self, newest: tuple[str, tuple[int, ...]]) -> None:
        for key in list(self._cache):
            if sum(self._sizes.values()) <= self._limit:
                return
            if key != newest and self._cache[key].done():
                del self._cache[key], self._sizes[key]

    def _read_chunk(self, chunk: _Chunk) -> Tensor:
        # DCP's record of file, offset and length
        info: Any = self._stored[MetadataIndex(chunk.name, torch.Size(chunk.box.offsets))]
        path = self.folder / info.relative_path
        try:
            with path.open("rb") as stream:
                stream.seek(info.offset)
                data = stream.read(info.length)
            if len(data) != info.length:
                raise EOFError(f"it ends {info.length - len(data)} bytes too early")
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read: {chunk.name} is in it",
                evidence=f"{type(error).__name__}: {error}",
                next_step="Use another checkpoint of the run.",
            ) from error
        if not isinstance(value, Tensor) or tuple(value.shape) != chunk.box.sizes:
            raise CheckpointError(
                f"{path} holds something else than {chunk.name}",
                evidence=f"{list(chunk.box.sizes)} is said, {list(getattr(value, 'shape', ()))} is there.",
                next_step="Use another checkpoint of the run.",
            )
        return value
