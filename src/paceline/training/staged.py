"""A task's batches on this rank's part of the model: what a training step and an evaluation have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.models.precision import model_dtype
from paceline.models.transformer import Transformer
from paceline.observe.phases import Phases
from paceline.parallel.context import context_part
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.pipeline import Forwarded, Pipeline
from paceline.tasks.task import LossTerms, Task


@dataclass(frozen=True, kw_only=True)
class StageTerms:
    """What one stage of this rank made of one micro-batch."""

    stage: int
    """Its index on this rank."""
    terms: LossTerms
    """From any stage but the last: no units, a loss of 0, and the router losses of its own layers."""
    is_last: bool


class StagedTask:
    """Runs micro-batches through the pipeline, with the task's loss at its end.

    Args:
        stages: this rank's parts of the model.
        dtype: of the model's main weights, float32 but for references.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        stages: Sequence[Transformer],
        pipeline: Pipeline,
        mesh: ParallelMesh,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.task = task
        self.stages = tuple(stages)
        self.mesh = mesh
        self._config = config
        self._pipeline = pipeline
        self._hidden_dtype = model_dtype(config.train) if dtype == torch.float32 else dtype

    def announce_to(self, phases: Phases) -> None:
        """From now on ``phases`` is told of each forward and backward."""
        self._pipeline.phases = phases

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return any(stage.is_last for stage in self.stages)

    def prepare(self, batch: Batch) -> Batch:
        """This rank's part of each sequence, with what the task adds."""
        return context_part(self.task.prepare(batch), self.mesh["cp"], self._config.parallel.cp_method)

    def train(
        self,
        batches: Sequence[Batch],
        *,
        before: Callable[[int, int], None],
        loss: Callable[[StageTerms], Tensor | None],
    ) -> None:
        """Forward and backward of prepared micro-batches of one shape.

        Args:
            before: called with (stage on this rank, micro-batch) before each forward.
            loss: what is to be back-propagated from a stage, if anything.
        """

        def forward(stage: int, micro_batch: int, hidden: Tensor | None) -> Forwarded:
            before(stage, micro_batch)
            found, after = self._forward(stage, batches[micro_batch], hidden)
            return Forwarded(hidden=after, loss=loss(found))

        self._pipeline.train(len(batches), self._hidden_shape(batches[0]), self._hidden_dtype, forward)

    def evaluate(self, batches: Sequence[Batch], each: Callable[[LossTerms], None]) -> None:
        """Forward alone; ``each`` is called with every micro-batch's terms where the loss is."""

        def forward(stage: int, micro_batch: int, hidden: Tensor | None) -> Forwarded:
            found, after = self._forward(stage, batches[micro_batch], hidden)
            if found.is_last:
                each(found.terms)
            return Forwarded(hidden=after, loss=None)

        self._pipeline.evaluate(len(batches), self._hidden_shape(batches[0]), self._hidden_dtype, forward)

    def _forward(self, index: int, batch: Batch, hidden: Tensor | None) -> tuple[StageTerms, Tensor | None]:
        stage = self.stages[index]
        if stage.is_last:
            terms = self.task.loss(stage if hidden is None else partial(stage, hidden=hidden), batch)
            return StageTerms(stage=index, terms=terms, is_last=True), None
        output = stage(batch.tokens, positions=batch.positions, documents=batch.documents, hidden=hidden)
        nothing = torch.zeros((), device=batch.tokens.device)
        terms = LossTerms(nothing, nothing.long(), output.aux_loss, output.stats)
        return StageTerms(stage=index, terms=terms, is_last=False), output.hidden

    def _hidden_shape(self, batch: Batch) -> torch.Size:
        """[B, T, C] of what this rank hands to the stage after: its part of the sequence."""
        sequences, length = batch.tokens.shape
        return torch.Size((sequences, length // self.mesh.size("tp"), self._config.model.hidden_size))
