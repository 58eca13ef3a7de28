"""Boxes of tensors into safetensors files.

A file has its final size and its header from the start, so any thread or process may write any part, in any order.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.files import sync_folder
from paceline.checkpoint.pieces import Box
from paceline.interop.safetensors_files import INDEX, NAMES, SINGLE, bytes_of, runs


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which file each tensor goes to, and where. The same on every process that computes it."""

    places: Mapping[str, tuple[str, torch.dtype, torch.Size, int]]
    """Name -> file, dtype, shape, byte of the file."""
    headers: Mapping[str, bytes]
    """File -> its first bytes."""
    sizes: Mapping[str, int]
    """File -> bytes in all."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


def plan_files(tensors: Mapping[str, tuple[torch.Size, torch.dtype]], shard_bytes: int) -> Layout:
    """Fills files of at most ``shard_bytes`` in the order of ``tensors``; one file keeps the single name."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, (shape, dtype) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    places, headers, sizes = {}, {}, {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset, starts = 0, {}
        # the widest first: data of every dtype then begins where its size divides the offset
        for name in sorted(names, key=lambda name: -tensors[name][1].itemsize):
            shape, dtype = tensors[name]
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            starts[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        sizes[file] = len(headers[file]) + offset
        for name, start in starts.items():
            places[name] = (file, tensors[name][1], tensors[name][0], len(headers[file]) + start)
    return Layout(places=places, headers=headers, sizes=sizes)


class SafetensorsWriter:
    """A ``RawSink`` that fills the files of a layout in a folder.

    One process calls ``create`` before any writes, each calls ``close``, and one calls ``finish`` after all have.
    """

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self._open: dict[str, int] = {}

    def create(self) -> None:
        """Makes the files in their final sizes, with their headers."""
        for file, header in self.layout.headers.items():
            with (self.folder / file).open("wb") as stream:
                stream.write(header)
                stream.truncate(self.layout.sizes[file])

    def write(self, name: str, box: Box, value: Tensor) -> None:
        """Converts to the dtype of the file."""
        file, dtype, shape, start = self.layout.places[name]
        value = value.to(dtype).contiguous()
        flat = bytes_of(value)
        descriptor = self._descriptor(file)
        position = 0
        for offset, count in runs(shape, box):
            size = count * dtype.itemsize
            _write_exactly(descriptor, flat[position : position + size], start + offset * dtype.itemsize)
            position += size

    def close(self) -> None:
        """Flushes what this process wrote to the device."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.close(descriptor)
        self._open.clear()

    def finish(self) -> None:
        """Writes the index, where there are several files."""
        if len(self.layout.headers) > 1:
            total = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in self.layout.places.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: place[0] for name, place in sorted(self.layout.places.items())},
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync_folder(self.folder)

    def _descriptor(self, file: str) -> int:
        descriptor = self._open.get(file)
        if descriptor is None:
            opened = os.open(self.folder / file, os.O_WRONLY)
            descriptor = self._open.setdefault(file, opened)
            if descriptor != opened:
                os.close(opened)
        return descriptor


def _write_exactly(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
