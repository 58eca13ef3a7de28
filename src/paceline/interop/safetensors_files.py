"""Boxes of tensors out of safetensors files, one file or many with an index.

Nothing is mapped into memory: a box is read by its byte ranges.

The format: 8 bytes little-endian length of a JSON header, the header (name -> dtype, shape, begin and end of the data),
the data, row-major. Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box
from paceline.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where one tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Byte of the file at which its data begins."""


class SafetensorsFolder:
    """All tensors of the safetensors files of a folder: a ``RawSource``. Safe to read from several threads.

    Raises:
        CheckpointError: a file is missing, cut short or not of the format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        for file in files_of(folder):
            found = _read_header(file)
            if twice := sorted(found.keys() & self.tensors.keys()):
                raise CheckpointError(
                    f"{folder} has {twice[0]} twice: in {self.tensors[twice[0]].file.name} and in {file.name}",
                    evidence=f"So have {len(twice)} tensors." if len(twice) > 1 else "",
                    next_step="Files of two different models have been mixed: download the folder again.",
                )
            self.tensors.update(found)
        self._check_index()
        self._open: dict[Path, int] = {}

    def shapes(self) -> dict[str, torch.Size]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        """The numbers of ``box``, in the dtype of the file."""
        stored = self.tensors[name]
        value = torch.empty(box.sizes, dtype=stored.dtype)
        if not value.numel():
            return value
        flat = bytes_of(value)
        item = stored.dtype.itemsize
        descriptor = self._descriptor(stored.file)
        position = 0
        for offset, count in runs(stored.shape, box):
            _read_exactly(descriptor, flat[position : position + count * item], stored.start + offset * item, stored)
            position += count * item
        return value

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, file: Path) -> int:
        descriptor = self._open.get(file)
        if descriptor is None:
            opened = os.open(file, os.O_RDONLY)
            descriptor = self._open.setdefault(file, opened)
            if descriptor != opened:  # another thread was faster
                os.close(opened)
        return descriptor

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if not index.is_file():
            return
        missing = [name for name in _index_map(index) if name not in self.tensors]
        if missing:
            raise CheckpointError(
                f"{index} names {len(missing)} tensors that are in none of the files",
                evidence=", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "."),
                next_step="Download the folder again; files of two different models may have been mixed.",
            )


def files_of(folder: Path) -> list[Path]:
    """The safetensors files that make up the model of a folder: those that the index names, or the single one.

    Raises:
        CheckpointError: there is none, or one that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_index_map(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:5])}",
                evidence=f"{INDEX} names them.",
                next_step="Download or copy the missing files.",
            )
        return [folder / name for name in names]
    single = folder / SINGLE
    if single.is_file():
        return [single]
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    raise CheckpointError(
        f"{folder} has no {SINGLE} and no {INDEX}",
        evidence=f"It has {', '.join(others[:5])}." if others else "It has no weights at all.",
        next_step="Pickled weights (.bin, .pt) are not read: they can run code. Save the model as safetensors first."
        if others
        else "Give the folder that holds the weights.",
    )


def _index_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight files", evidence=repr(error), next_step="Download that file again."
        ) from error


def _read_header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_HEADER_LIMIT, size - 8):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found = {name: _stored(file, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file",
            evidence=str(error) or type(error).__name__,
            next_step="Download or copy it again.",
        ) from error
    needed = max((_end(stored) for stored in found.values()), default=8 + length)
    if size < needed:
        raise CheckpointError(
            f"{file} is cut short: it has {size} bytes of {needed}",
            evidence="Its header is whole, its data is not.",
            next_step="Download or copy it again.",
        )
    return found


def _stored(file: Path, data: int, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"the dtype {entry['dtype']} is not known")
    stored = Stored(file=file, dtype=DTYPES[entry["dtype"]], shape=torch.Size(entry["shape"]), start=data + int(begin))
    if _end(stored) != data + int(end):
        raise ValueError(f"a tensor of shape {entry['shape']} ({entry['dtype']}) has {end - begin} bytes of data")
    return stored


def _end(stored: Stored) -> int:
    return stored.start + math.prod(stored.shape) * stored.dtype.itemsize


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """(first element, count) of each stretch of a row-major tensor that a box is made of, in the box's order."""
    # trailing dims that the box has whole are one stretch with the dim before them
    dim = len(shape)
    while dim > 0 and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    inner = math.prod(shape[dim:])
    if dim == 0:
        yield 0, inner
        return
    strides = [math.prod(shape[i + 1 :]) for i in range(dim)]
    count = box.sizes[dim - 1] * inner
    base = sum(offset * stride for offset, stride in zip(box.offsets[:dim], strides, strict=True))
    index = [0] * (dim - 1)
    for _ in range(math.prod(box.sizes[: dim - 1])):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), count
        for axis in reversed(range(dim - 1)):
            index[axis] += 1
            if index[axis] < box.sizes[axis]:
                break
            index[axis] = 0


def bytes_of(value: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return value.reshape(-1).view(torch.uint8).numpy().data


def _read_exactly(descriptor: int, into: memoryview, offset: int, stored: Stored) -> None:
    done = 0
    while done < len(into):
        read = os.preadv(descriptor, [into[done:]], offset + done)
        if not read:
            raise CheckpointError(
                f"{stored.file} ended while it was read", next_step="It was changed or cut short: copy it again."
            )
        done += read
