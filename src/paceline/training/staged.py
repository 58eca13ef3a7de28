"""A task's batches on this rank's part of the model: what a training step and an evaluation have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.models.precision import model_dtype
from paceline.models.transformer import Transformer
from paceline.observe.capture import owned_by
from paceline.observe.phases import Phases
from paceline.parallel.context import context_part
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.pipeline import Forwarded, Pipeline
from paceline.tasks.documents import REFERENCE, SumParts, log_prob_sums, with_lengths
from paceline.tasks.task import LossTerms, Task, Traits, traits_of
from paceline.training.noise import EmbeddingNoise
from paceline.training.reference import Reference


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
        sum_parts: over the ranks that hold parts of the same sequences.
        reference: the model that the task compares with, where it needs one that is here.
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
        sum_parts: SumParts,
        reference: Reference | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.task = task
        self.traits: Traits = traits_of(task)
        self.stages = tuple(stages)
        self.mesh = mesh
        self._config = config
        self._pipeline = pipeline
        self._sum_parts = sum_parts
        self._reference = reference
        self._noise = EmbeddingNoise.of(config, mesh)
        self._hidden_dtype = model_dtype(config.train) if dtype == torch.float32 else dtype

    def announce_to(self, phases: Phases) -> None:
        """From now on ``phases`` is told of each forward and backward."""
        self._pipeline.phases = phases

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return any(stage.is_last for stage in self.stages)

    @property
    def runs_reference(self) -> bool:
        """Whether `prepare` computes with a reference model."""
        return self._reference is not None

    def prepare(self, batches: Sequence[Batch]) -> list[Batch]:
        """This rank's part of each sequence, with what the task adds. Runs the reference model, where there is one:
        collective, as `evaluate`."""
        prepared = [self._own_part(batch) for batch in batches]
        if self._reference is None or not prepared or REFERENCE in prepared[0].fields:
            return prepared
        found = self.reference_log_probs(prepared, self._reference)
        return [replace(batch, fields={**batch.fields, **found[index]}) for index, batch in enumerate(prepared)]

    def reference_log_probs(self, batches: Sequence[Batch], reference: Reference) -> dict[int, dict[str, Tensor]]:
        """By micro-batch: the field `REFERENCE` [B, D] of prepared batches; empty on ranks without the last stage."""
        found: dict[int, dict[str, Tensor]] = {index: {} for index in range(len(batches))}
        with reference.stages() as stages:

            def forward(index: int, micro_batch: int, hidden: Tensor | None) -> Forwarded:
                batch, stage = batches[micro_batch], stages[index]
                labels = batch.labels if stage.is_last else None
                output = stage(
                    batch.tokens,
                    labels,
                    **batch.places,
                    hidden=hidden,
                    log_probs=stage.is_last,
                )
                if stage.is_last:
                    found[micro_batch][REFERENCE] = log_prob_sums(output, batch, self._sum_parts)
                return Forwarded(hidden=output.hidden, loss=None)

            self._pipeline.evaluate(len(batches), self._hidden_shape(batches[0]), self._hidden_dtype, forward)
        return found

    def _own_part(self, batch: Batch) -> Batch:
        whole = self.task.prepare(batch)
        if self._noise is not None:
            whole = with_lengths(whole)
        return context_part(whole, self.mesh["cp"], self._config.parallel.cp_method)

    def train(
        self,
        batches: Sequence[Batch],
        *,
        step: int = 0,
        before: Callable[[int, int], None],
        loss: Callable[[StageTerms], Tensor | None],
    ) -> None:
        """Forward and backward of prepared micro-batches of one shape.

        Args:
            step: its number, which decides noise.
            before: called with (stage on this rank, micro-batch) before each forward.
            loss: what is to be back-propagated from a stage, if anything.
        """

        def forward(stage: int, micro_batch: int, hidden: Tensor | None) -> Forwarded:
            before(stage, micro_batch)
            noise = None
            if self._noise is not None and self.stages[stage].is_first:
                noise = self._noise.draw(step, micro_batch, batches[micro_batch]).to(self._hidden_dtype)
            # the model and its modules are inside: what is left is the task's own
            with owned_by("loss"):
                found, after = self._forward(stage, batches[micro_batch], hidden, noise)
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

    def logits(self, batches: Sequence[Batch], each: Callable[[int, Batch, Tensor], None]) -> None:
        """Forward alone of whole sequences, without the task and its labels. Collective.

        Args:
            each: where the last stage is, called with the number of a micro-batch, this rank's part of its sequences
                (with positions) and the logits of that part, [B, T, V].
        """
        axis, method = self.mesh["cp"], self._config.parallel.cp_method
        parts = [context_part(batch, axis, method) for batch in batches]

        def forward(index: int, micro_batch: int, hidden: Tensor | None) -> Forwarded:
            stage, batch = self.stages[index], parts[micro_batch]
            output = stage(batch.tokens, positions=batch.positions, hidden=hidden)
            if stage.is_last:
                each(micro_batch, batch, output.logits)
            return Forwarded(hidden=output.hidden, loss=None)

        self._pipeline.evaluate(len(parts), self._hidden_shape(parts[0]), self._hidden_dtype, forward)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Dropout and the like are off, and no gradients are made; afterwards as before."""
        training = self.stages[0].training
        for stage in self.stages:
            stage.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for stage in self.stages:
                stage.train(training)

    def _forward(
        self, index: int, batch: Batch, hidden: Tensor | None, noise: Tensor | None = None
    ) -> tuple[StageTerms, Tensor | None]:
        stage = self.stages[index]
        more: dict[str, Tensor] = {} if hidden is None else {"hidden": hidden}
        if noise is not None:
            more["noise"] = noise
        if stage.is_last:
            terms = self.task.loss(partial(stage, **more) if more else stage, batch)
            return StageTerms(stage=index, terms=terms, is_last=True), None
        output = stage(batch.tokens, **batch.places, **more)
        nothing = torch.zeros((), device=batch.tokens.device)
        terms = LossTerms(nothing, nothing.long(), output.aux_loss, output.stats)
        return StageTerms(stage=index, terms=terms, is_last=False), output.hidden

    def _hidden_shape(self, batch: Batch) -> torch.Size:
        """[B, T, C] of what this rank hands to the stage after: its part of the sequence."""
        sequences, length = batch.tokens.shape
        return torch.Size((sequences, length // self.mesh.size("tp"), self._config.model.hidden_size))
