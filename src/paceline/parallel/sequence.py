"""Which positions of a sequence does each rank of the context-parallel axis hold?

    ring      2n chunks; rank i holds chunk i and chunk 2n - 1 - i     4 ranks: 0 7 | 1 6 | 2 5 | 3 4
    ulysses   n chunks; rank i holds chunk i                           4 ranks: 0 | 1 | 2 | 3

Under a causal mask a late token sees more keys than an early one: an early chunk with its mirror image is the same work
on every rank. The positions of a rank rise in both layouts.

Sequence parallelism cuts a rank's part further, contiguously, over tp: the parts of all ranks of `cp_tp`, one after the
other, are the parts of the ranks of `cp`, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ContextMethod = Literal["ring", "ulysses"]


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences lie on `size` ranks. T is the length of a rank's part, `size` times T the length of a sequence."""

    size: int
    method: ContextMethod

    @property
    def num_chunks(self) -> int:
        """A sequence's length is a multiple of this."""
        return 2 * self.size if self.method == "ring" and self.size > 1 else self.size

    def chunks(self, index: int) -> tuple[int, ...]:
        """The chunks that rank ``index`` holds, in rising order."""
        assert 0 <= index < self.size, f"rank {index} of {self.size}"
        return (index,) if self.num_chunks == self.size else (index, self.num_chunks - 1 - index)

    def positions(self, index: int, length: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [length]: where in its sequence each token of rank ``index`` stands; ``length`` tokens a rank."""
        chunk = self._chunk_length(length)
        # made where they are needed: copied there, they would make the host wait
        pieces = [torch.arange(n * chunk, (n + 1) * chunk, device=device) for n in self.chunks(index)]
        return torch.cat(pieces)

    def natural_order(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """int64 [size * length]: ``torch.cat(parts of all ranks)[natural_order]`` is the sequence."""
        held = torch.cat([self.positions(index, length, device) for index in range(self.size)])
        order = torch.empty_like(held)
        order[held] = torch.arange(len(held), device=device)
        return order

    def part(self, whole: Tensor, index: int, dim: int) -> Tensor:
        """What rank ``index`` holds of a tensor with the sequence along ``dim``."""
        length = whole.shape[dim]
        assert length % self.num_chunks == 0, (
            f"{length} positions do not divide into {self.num_chunks} chunks ({self.method} over {self.size} ranks)"
        )
        chunk = length // self.num_chunks
        pieces = [whole.narrow(dim, number * chunk, chunk) for number in self.chunks(index)]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous()

    def _chunk_length(self, length: int) -> int:
        per_rank = self.num_chunks // self.size
        assert length % per_rank == 0, f"{length} positions a rank do not divide into {per_rank} chunks"
        return length // per_rank
