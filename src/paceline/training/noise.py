"""Noise on embeddings (NEFTune), the same whatever the layout.

A row's noise is drawn whole, from the seed, the step and the row's place in the global batch; each rank keeps its part.
On a GPU other numbers come out than on a CPU.

Dims: B rows, T tokens of a whole row, t of this rank's part, C hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.regions import own_part
from paceline.parallel.sequence import SequenceLayout
from paceline.runtime.seed import generator
from paceline.tasks.documents import LENGTHS, documents_of


class EmbeddingNoise:
    """Uniform in +- alpha / sqrt(L C), L the tokens of a document, which is what a row without padding or packing has.

    Source: arXiv:2310.05914, algorithm 1.
    """

    def __init__(self, config: RunConfig, mesh: ParallelMesh) -> None:
        self._seed, self._alpha = config.run.seed, config.task.neftune_alpha
        self._hidden_size = config.model.hidden_size
        self._layout = SequenceLayout(mesh.size("cp"), config.parallel.cp_method)
        self._mesh = mesh

    @classmethod
    def of(cls, config: RunConfig, mesh: ParallelMesh) -> EmbeddingNoise | None:
        """None where there is to be no noise."""
        return cls(config, mesh) if config.task.neftune_alpha else None

    def draw(self, step: int, micro_batch: int, batch: Batch) -> Tensor:
        """[B, t, C] fp32 for a prepared batch, t as the embedding gives it: cut over cp, and over tp."""
        rows = range(len(batch.tokens))
        drawn = torch.stack([self._row(step, self._place(micro_batch, row, len(rows)), batch) for row in rows])
        lengths_BD = batch.fields[LENGTHS].clamp(min=1)
        lengths_Bt = lengths_BD.gather(1, documents_of(batch).clamp(max=lengths_BD.shape[1] - 1))
        width_Bt = self._alpha * (lengths_Bt * self._hidden_size).float().rsqrt()
        return own_part(drawn * width_Bt[..., None], self._mesh["tp"], dim=1)

    def _place(self, micro_batch: int, row: int, rows: int) -> int:
        """Of a row in the global batch: neighbouring micro-batches go to neighbouring ranks (`data/loader.py`)."""
        return (micro_batch * self._mesh.dp_size + self._mesh.dp_rank) * rows + row

    def _row(self, step: int, place: int, batch: Batch) -> Tensor:
        """[t, C], uniform in -1 ... 1."""
        device, length = batch.tokens.device, batch.tokens.shape[1] * self._layout.size
        stream = generator(device, self._seed, "neftune", step=step, row=place)
        whole = torch.rand(length, self._hidden_size, generator=stream, device=device) * 2 - 1
        return whole if self._layout.size == 1 else self._layout.part(whole, self._mesh["cp"].index, dim=0)
