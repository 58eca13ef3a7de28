"""One optimizer step: the only place where sums become means.

Every micro-batch adds ``loss_sum / count`` with the count of the whole global batch, over all ranks and micro-batches,
known before the first backward. Gradients are then plain sums, and the result does not depend on how the global batch
was cut: into micro-batches, over ranks, along the sequence, or by masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.models.transformer import Transformer
from paceline.observe.capture import owned_by
from paceline.observe.phases import NO_PHASES, Phases
from paceline.optim.build import Optimizer
from paceline.optim.schedule import lr_factor
from paceline.parallel.collectives import all_reduce
from paceline.parallel.delayed_scales import DelayedScales
from paceline.parallel.engine import Engine
from paceline.parallel.mesh import ParallelMesh
from paceline.runtime.seed import stream_seed
from paceline.training.staged import StagedTask, StageTerms
from paceline.training.totals import Totals


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step leaves on the device; nothing here has been waited for.

    Sums are this rank's part: the metrics divide what all ranks have together. Where ranks hold the same loss (tensor
    parallelism) each has it with its count, and a pipeline stage without the loss has 0 of both.
    """

    loss_sum: Tensor
    """Scalar, at least fp32: sum of losses; with multi-token prediction the next token's alone, and where a loss has
    several terms their sum in units of the first"""
    mtp_loss_sum: Tensor | None
    """fp32 scalar: the same for multi-token prediction, its coefficient not included; None if there is none here"""
    count: Tensor
    """int64 scalar: units over all ranks and micro-batches"""
    local_count: Tensor
    """int64 scalar: units behind `loss_sum`"""
    aux_loss_sum: Tensor | None
    """fp32 scalar: router losses of this rank's layers and part of the sequences; None if there are none here"""
    sequences: int
    """sequences that this rank counts for the mean of `aux_loss_sum`: over all ranks, the global batch"""
    grad_norm: Tensor
    """fp32 scalar, before clipping"""
    finite: Tensor
    """bool scalar, the same on all ranks: False means that the update was skipped"""
    lr: float
    expert_load: tuple[Tensor | None, ...]
    """int64 [L, E] for each stage of this rank: tokens that chose each expert, over the ranks of the stage"""
    experts_dropped: tuple[Tensor | None, ...]
    """int64 [L] for each stage of this rank: dropped assignments, the same"""
    router_entropy: tuple[Tensor | None, ...]
    """int64 [L] for each stage of this rank: `Routing.entropy`, the same"""
    means: Mapping[str, Tensor]
    """By name of the task's `means`: [2], a sum and its number; nothing where the loss is not"""


class TrainStep:
    """Forward, backward, reduction, clipping, update."""

    def __init__(
        self,
        config: RunConfig,
        *,
        staged: StagedTask,
        engine: Engine,
        optimizer: Optimizer,
        mesh: ParallelMesh,
        scales: DelayedScales,
        on_backward_end: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.staged = staged
        self.engine = engine
        self.optimizer = optimizer
        self.mesh = mesh
        self.scales = scales
        self.on_backward_end = on_backward_end
        self.phases: Phases = NO_PHASES
        model_config = config.model
        self._draws_random = any(
            (
                model_config.dropout,
                model_config.attention_dropout,
                model_config.moe.jitter,
                model_config.moe.expert_dropout,
                config.lora.on and config.lora.dropout,
            )
        )

    @property
    def stages(self) -> tuple[Transformer, ...]:
        """This rank's parts of the model."""
        return self.staged.stages

    def announce_to(self, phases: Phases) -> None:
        """From now on ``phases`` is told what the step is doing."""
        self.phases = phases
        self.staged.announce_to(phases)

    def train(self) -> None:
        """Dropout and the like are on from here on."""
        for stage in self.stages:
            stage.train()

    def run(self, step: int, batches: Sequence[Batch]) -> StepOutcome:
        """Runs step number ``step`` (from 1) on this rank's micro-batches of whole sequences."""
        self.phases.mark("sync")
        batches, local_count, count = self._prepare(batches)
        first_count = _first(local_count)
        totals = self._forward_backward(step, batches, count)
        self.phases.mark("reduce")
        self.engine.reduce_gradients()
        if self.on_backward_end is not None:
            self.on_backward_end(step)
        self.phases.mark("optimizer")
        gradients = self.optimizer.gradient_norm()
        factor = lr_factor(self.config.optim, step, self.config.train.steps)
        self.optimizer.step(factor, gradients)
        self.scales.advance(gradients.finite)
        load, dropped, entropy = self._balance_experts(totals, gradients.finite)
        self.phases.mark("publish")
        self.engine.publish_weights(cast=not self.optimizer.writes_compute_weights)
        self.engine.zero_gradients()
        self.phases.mark("other")
        with owned_by("metrics"):
            return StepOutcome(
                loss_sum=totals.main_loss_sum(local_count.device),
                mtp_loss_sum=totals.stat("loss_sum_mtp"),
                count=_first(count),
                local_count=first_count if self.staged.has_loss else torch.zeros_like(first_count),
                aux_loss_sum=totals.aux_loss,
                sequences=self._counted_sequences,
                grad_norm=gradients.norm,
                finite=gradients.finite,
                lr=self.config.optim.lr * factor,
                expert_load=load,
                experts_dropped=dropped,
                router_entropy=entropy,
                means=totals.means(self.staged.traits.means),
            )

    @property
    def _counted_sequences(self) -> int:
        """The sequences of a data-parallel rank, counted once among the ranks that share their layers and tokens."""
        first = all(self.mesh[axis].index == 0 for axis in ("pp", "cp", "tp"))
        return self.config.train.global_batch_size // self.mesh.dp_size if first else 0

    def rerun(self, step: int, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward, backward and reduction once more, without an update, for a diagnosis: the loss of each micro-batch.

        On a stage without the loss there are none. Gradients are left in the main parameters; `engine.zero_gradients`
        clears them. Collective.
        """
        prepared, _, count = self._prepare(batches)
        losses = self._forward_backward(step, prepared, count).losses
        self.engine.reduce_gradients()
        self.scales.forget()
        return losses

    def _prepare(self, batches: Sequence[Batch]) -> tuple[list[Batch], Tensor, Tensor]:
        """This rank's part of each sequence; units on this rank, and over all ranks."""
        if self.staged.runs_reference:
            self.phases.mark("forward")
        prepared = self.staged.prepare(batches)
        self.phases.mark("sync")
        local_count = torch.stack([self.staged.task.count(batch) for batch in prepared]).sum(dim=0)
        count = local_count.clone()
        all_reduce(count, self.mesh["dp" if self.staged.traits.whole else "dp_cp"], "dp/step/count")
        return prepared, local_count, count

    def _forward_backward(self, step: int, batches: Sequence[Batch], count: Tensor) -> Totals:
        totals = Totals(len(self.stages))
        divisor = count.clamp(min=1)  # a step whose every label is masked has loss 0, not nan

        def loss(found: StageTerms) -> Tensor | None:
            terms = found.terms
            means = terms.loss_sum / divisor
            whole = means.sum() if found.is_last else None
            if means.dim() and whole is not None:
                # several terms with units of their own: one number for the metrics, in units of the first
                found = replace(found, terms=terms._replace(loss_sum=whole * divisor[0]))
            totals.add(found)
            if terms.aux_loss is None:
                return whole
            aux_loss = terms.aux_loss / self.config.train.global_batch_size
            return aux_loss if whole is None else whole + aux_loss

        self.staged.train(
            batches, step=step, before=lambda stage, micro_batch: self._seed(step, micro_batch, stage), loss=loss
        )
        return totals

    def _seed(self, step: int, micro_batch: int, stage: int) -> None:
        # By position, not by history: a resumed run draws the same masks without storing any generator's state. Every
        # activation that dropout sees is cut along the sequence or over heads, so no two ranks may draw alike.
        if self._draws_random:
            place = {axis: self.mesh[axis].index for axis in ("pp", "cp", "tp")}
            seed = stream_seed(
                self.config.run.seed,
                "dropout",
                step=step,
                micro=micro_batch,
                dp=self.mesh.dp_rank,
                stage=stage,
                **{axis: index for axis, index in place.items() if self.mesh.size(axis) > 1},
            )
            torch.manual_seed(seed)

    def _balance_experts(self, totals: Totals, finite: Tensor) -> tuple[tuple[Tensor | None, ...], ...]:
        """Sums what the routers counted over the ranks of each stage, and moves their biases."""
        loads: list[Tensor | None] = []
        drops: list[Tensor | None] = []
        entropies: list[Tensor | None] = []
        for index, stage in enumerate(self.stages):
            load, *others = (totals.stat(f"moe/{name}", index) for name in ("load", "dropped", "entropy"))
            dropped, entropy = others
            if load is not None and dropped is not None and entropy is not None:
                counts = torch.cat((load, dropped[:, None], entropy[:, None]), dim=1)
                all_reduce(counts, self.mesh["stage"], "stage/moe/load")
                load, dropped, entropy = counts[:, :-2], counts[:, -2], counts[:, -1]
                # equal loads move no bias: a skipped step leaves them as they are
                if not self.config.lora.on:  # what routes is frozen too
                    stage.update_expert_bias(torch.where(finite, load, torch.zeros_like(load)).float())
            loads.append(load)
            drops.append(dropped)
            entropies.append(entropy)
        return tuple(loads), tuple(drops), tuple(entropies)


def _first(count: Tensor) -> Tensor:
    """Of a loss with several terms, what the first is averaged over."""
    return count[0] if count.dim() else count
