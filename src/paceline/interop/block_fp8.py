"""Weights published in fp8 with a scale for each block of 128 x 128, read as bf16.

DeepSeek-V3 and others are released so: beside ``NAME`` in e4m3 lies ``NAME_scale_inv``, by which a block is multiplied.
Source: the model card and ``inference/fp8_cast_bf16.py`` of deepseek-ai/DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box
from paceline.interop.links import RawSource

SUFFIX = "_scale_inv"
CONFIG_KEY = "quantization_config"


def block_sizes(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the config asks for another way of quantizing, or for none."""
    quantized = config.get(CONFIG_KEY)
    if not isinstance(quantized, Mapping) or quantized.get("quant_method") != "fp8":
        return None
    if quantized.get("fmt", "e4m3") != "e4m3":
        return None
    sizes = quantized.get("weight_block_size")
    if isinstance(sizes, list) and len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    return None


class BlockFp8:
    """A source whose fp8 matrices appear in bf16, and whose scales do not appear."""

    def __init__(self, raw: RawSource, block: tuple[int, int]) -> None:
        self._raw = raw
        self._block = block
        names = raw.shapes()
        self._scaled = frozenset(name for name in names if f"{name}{SUFFIX}" in names)

    def problems(self) -> list[str]:
        """Scales that do not fit their matrices, and fp8 matrices that have none."""
        shapes = self._raw.shapes()
        found = []
        for name, shape in shapes.items():
            fp8 = self._raw.dtype(name) == torch.float8_e4m3fn
            if fp8 != (name in self._scaled):
                found.append(f"{name} is {self._raw.dtype(name)} and has {'no' if fp8 else 'a'} scale")
            elif fp8:
                wanted = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
                if tuple(shapes[f"{name}{SUFFIX}"]) != wanted:
                    found.append(f"{name}{SUFFIX} is {list(shapes[f'{name}{SUFFIX}'])}, {list(wanted)} is needed")
        return found

    def shapes(self) -> dict[str, torch.Size]:
        scales = {f"{name}{SUFFIX}" for name in self._scaled}
        return {name: shape for name, shape in self._raw.shapes().items() if name not in scales}

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._scaled else self._raw.dtype(name)

    def read(self, name: str, box: Box) -> Tensor:
        value = self._raw.read(name, box)
        if name not in self._scaled:
            return value
        firsts = [offset // block for offset, block in zip(box.offsets, self._block, strict=True)]
        ends = [
            -(-(offset + size) // block)
            for offset, size, block in zip(box.offsets, box.sizes, self._block, strict=True)
        ]
        sizes = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        scale = self._raw.read(f"{name}{SUFFIX}", Box(offsets=tuple(firsts), sizes=sizes)).float()
        for dim, block in enumerate(self._block):
            inside = box.offsets[dim] - firsts[dim] * block
            scale = scale.repeat_interleave(block, dim).narrow(dim, inside, box.sizes[dim])
        return (value.float() * scale).bfloat16()
