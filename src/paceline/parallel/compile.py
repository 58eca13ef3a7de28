"""Compiles each block: one graph, used by every layer that is built alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def compile_blocks(blocks: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Compiles blocks in place, for fixed shapes: ``forward`` is wrapped, names of parameters stay.

    Only ``forward`` is compiled, not the module's call, so hooks (FSDP2's gathers, waits for new weights) stay outside
    of the graph. Call after `recompute`, whose wrapper must lie inside the graph for the compiler to plan with it, and
    before data parallelism. Compilation itself happens at the first forward.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
