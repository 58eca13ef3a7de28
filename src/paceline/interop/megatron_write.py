"""A model as a Megatron-LM `torch_dist` checkpoint.

The format does not depend on a layout: Megatron-LM reads it with any tp, pp and ep. Names are those of Transformer
Engine's layers, layers are stacked where they are all alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box, BoxIndex, Piece, ShardedValue
from paceline.checkpoint.streamed import write_tensors
from paceline.config.model import ModelConfig
from paceline.errors import CheckpointError
from paceline.interop.links import Link, LinkTable, whole
from paceline.interop.megatron_config import args_of
from paceline.interop.megatron_files import COMMON, KIND, LATEST
from paceline.interop.megatron_links import NewNames, megatron_links

Read = Callable[[str, Box], Tensor]
"""A part of one of our tensors, in the dtype that is to be written."""


def write_megatron(
    folder: Path, model: ModelConfig, dtypes: Mapping[str, torch.dtype], read: Read, *, step: int, threads: int
) -> None:
    """Fills ``folder`` with one iteration and the file that names it: what ``--load`` takes.

    Raises:
        ConfigError: Megatron-LM has no arguments for the model.
    """
    args = args_of(model)
    table = megatron_links(model, NewNames(model))
    inside = folder / ("release" if not step else f"iter_{step:07d}")
    inside.mkdir()
    reverse = _Reverse(table, dtypes, read)
    write_tensors(inside, reverse.values(), reverse.read, threads=threads)
    # as Megatron-LM's own: it reads these two before anything else
    args |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "ckpt_format": "torch_dist"}
    common: dict[str, Any] = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": step}
    torch.save(common, inside / COMMON)
    kind = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    kind |= {"common_backend": "torch", "common_backend_version": 1}
    (inside / KIND).write_text(json.dumps(kind))
    (folder / LATEST).write_text("release" if not step else str(step))


class _Reverse:
    """Their tensors, made of parts of ours."""

    def __init__(self, table: LinkTable, dtypes: Mapping[str, torch.dtype], read: Read) -> None:
        self._read = read
        self._shapes = table.their_shapes()
        self._parts: dict[str, list[tuple[str, Link]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name, links in table.links.items():
            for link in links:
                self._parts.setdefault(link.theirs, []).append((name, link))
                known = self._dtypes.setdefault(link.theirs, dtypes[name])
                self._dtypes[link.theirs] = torch.promote_types(known, dtypes[name])

        self._index = {
            name: BoxIndex([(link.theirs_at, (ours, link)) for ours, link in parts])
            for name, parts in self._parts.items()
        }

    def values(self) -> dict[str, ShardedValue]:
        """What DCP's planner needs to know; a piece for each layer where layers are stacked."""
        values = {}
        for name, shape in self._shapes.items():
            dtype = self._dtypes[name]
            lead = max(link.theirs_lead for _, link in self._parts[name])
            boxes = [Box(offsets=(), sizes=())]
            for dim in range(lead):
                boxes = [
                    Box(offsets=(*box.offsets, i), sizes=(*box.sizes, 1)) for box in boxes for i in range(shape[dim])
                ]
            rest = whole(torch.Size(shape[lead:]))
            pieces = tuple(
                Piece(
                    offsets=(*box.offsets, *rest.offsets),
                    tensor=torch.empty((*box.sizes, *rest.sizes), dtype=dtype, device="meta"),
                )
                for box in boxes
            )
            values[name] = ShardedValue(global_shape=shape, dtype=dtype, pieces=pieces)
        return values

    def read(self, name: str, box: Box) -> Tensor:
        """A block of one of their tensors."""
        value = torch.empty(box.sizes, dtype=self._dtypes[name])
        target = _Block(box, value)
        for common, (ours, link) in self._index[name].touched(box):
            wanted = link.ours_of(common)
            link.write(target, wanted, self._read(ours, wanted))
        if target.filled != box.numel:
            raise CheckpointError(f"{name} would be written with holes: {target.filled} of {box.numel} numbers")
        return value


class _Block:
    """Takes what lies in one block and leaves the rest: a ``RawSink``."""

    def __init__(self, box: Box, value: Tensor) -> None:
        self._box = box
        self._value = value
        self.filled = 0

    def write(self, name: str, box: Box, value: Tensor) -> None:
        common = self._box.common(box)
        if common is None:
            return
        target = self._value
        for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            target = target.narrow(dim, start - self._box.offsets[dim], size)
            value = value.narrow(dim, start - box.offsets[dim], size)
        target.copy_(value)
        self.filled += common.numel
