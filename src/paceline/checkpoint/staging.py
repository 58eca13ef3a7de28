"""How does a training step get its state out of the way of the next update, quickly?

Blocks are copied into host memory that is kept from save to save. On a GPU the memory is pinned and the copies are
queued on the current stream: the update that follows on that stream cannot overtake them, so the step itself waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.planner import BlockKey

_SLAB_BYTES = 256 * 2**20
# a power of two: torch's pinned allocator rounds each request up to one, so larger odd sizes would waste up to half
_ALIGNMENT = 512


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Copies on the host, which may be read after ``wait()``."""

    blocks: dict[BlockKey, Tensor]
    wait: Callable[[], None]


class HostBuffers:
    """Host memory for the copies of one save. A new ``copy`` overwrites the one before: wait until it is written."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._pinned = False
        self._layout: dict[BlockKey, tuple[torch.Size, torch.dtype]] = {}
        self._places: dict[BlockKey, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def make_room(self, blocks: Mapping[BlockKey, Tensor]) -> None:
        """Takes the memory for blocks of these shapes, which the next ``copy`` then need not wait for.

        To pin memory takes a quarter of a second a GiB and more: seconds for what a GPU of a large model holds.
        """
        self._make_room(blocks, pinned=any(tensor.is_cuda for tensor in blocks.values()))

    def copy(self, blocks: Mapping[BlockKey, Tensor]) -> Staged:
        devices = {tensor.device for tensor in blocks.values() if tensor.is_cuda}
        self.make_room(blocks)
        for key, tensor in blocks.items():
            self._places[key].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        events = []
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def wait() -> None:
            for event in events:
                event.synchronize()

        return Staged(blocks=self._places, wait=wait)

    def _make_room(self, blocks: Mapping[BlockKey, Tensor], *, pinned: bool) -> None:
        """A place for every block, the same as before if the blocks are of the same shapes as before."""
        layout = {key: (tensor.shape, tensor.dtype) for key, tensor in blocks.items()}
        if layout == self._layout and (self._pinned or not pinned):
            return
        # pinned memory is worth its price only where a device copies into it without the processor's help
        if pinned and not self._pinned:
            self._pinned = True
            self._slabs = []
        packer = _Packer(self._slabs, pinned=self._pinned, num_bytes=sum(_padded(t) for t in blocks.values()))
        # the largest first: small ones then fill what is left at the end of each slab
        by_size = sorted(blocks, key=lambda key: -blocks[key].nbytes)
        self._places = {key: packer.place(blocks[key]) for key in by_size}
        self._layout = layout


class _Packer:
    """Places tensors in the first slab with room; adds a slab where none has."""

    def __init__(self, slabs: list[Tensor], *, pinned: bool, num_bytes: int) -> None:
        self._slabs = slabs
        self._used = [0] * len(slabs)
        self._pinned = pinned
        # a small state does not need a whole slab
        self._slab_bytes = min(_SLAB_BYTES, max(num_bytes, _ALIGNMENT))

    def place(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory of the shape and dtype of ``tensor``."""
        slab = next((i for i, used in enumerate(self._used) if used + tensor.nbytes <= self._slabs[i].nbytes), None)
        if slab is None:
            slab = len(self._slabs)
            size = max(self._slab_bytes, tensor.nbytes)
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            self._used.append(0)
        start = self._used[slab]
        self._used[slab] += _padded(tensor)
        return self._slabs[slab][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
