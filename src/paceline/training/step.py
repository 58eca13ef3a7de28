"""One optimizer step: the only place where sums become means.

Every micro-batch adds ``loss_sum / count`` with the count of the whole global batch, over all ranks and micro-batches,
known before the first backward. Gradients are then plain sums, and the result does not depend on how the global batch
was cut: into micro-batches, over ranks, or by masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.models.transformer import Transformer
from paceline.optim.build import Optimizer
from paceline.optim.schedule import lr_factor
from paceline.parallel.collectives import all_reduce
from paceline.parallel.engine import Engine
from paceline.parallel.mesh import ParallelMesh
from paceline.runtime.seed import stream_seed
from paceline.tasks.task import LossTerms, Task


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step leaves on the device; nothing here has been waited for."""

    loss_sum: Tensor
    """fp32 scalar: this rank's part of the sum of losses; with multi-token prediction the next token's alone"""
    mtp_loss_sum: Tensor | None
    """fp32 scalar: the same for multi-token prediction, its coefficient not included"""
    count: Tensor
    """int64 scalar: units over all ranks and micro-batches"""
    local_count: Tensor
    """int64 scalar: units on this rank"""
    aux_loss: Tensor | None
    """fp32 scalar: mean over this rank's sequences"""
    grad_norm: Tensor
    """fp32 scalar, before clipping"""
    finite: Tensor
    """bool scalar, the same on all ranks: False means that the update was skipped"""
    lr: float
    stats: Mapping[str, Tensor]


class TrainStep:
    """Forward, backward, reduction, clipping, update."""

    def __init__(
        self,
        config: RunConfig,
        *,
        task: Task,
        model: Transformer,
        engine: Engine,
        optimizer: Optimizer,
        mesh: ParallelMesh,
        on_backward_end: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.task = task
        self.model = model
        self.engine = engine
        self.optimizer = optimizer
        self.mesh = mesh
        self.on_backward_end = on_backward_end
        model_config = config.model
        self._draws_random = any(
            (
                model_config.dropout,
                model_config.attention_dropout,
                model_config.moe.jitter,
                model_config.moe.expert_dropout,
            )
        )

    def run(self, step: int, batches: Sequence[Batch]) -> StepOutcome:
        """Runs step number ``step`` (from 1) on this rank's micro-batches."""
        batches, local_count, count = self._prepare(batches)
        totals = self._forward_backward(step, batches, count)
        self.engine.reduce_gradients()
        if self.on_backward_end is not None:
            self.on_backward_end(step)
        gradients = self.optimizer.gradient_norm()
        factor = lr_factor(self.config.optim, step, self.config.train.steps)
        self.optimizer.step(factor, gradients)
        self._balance_experts(totals.stats, gradients.finite)
        self.engine.publish_weights()
        self.engine.zero_gradients()
        mtp_loss_sum = totals.stats.get("loss_sum_mtp")
        return StepOutcome(
            loss_sum=totals.loss_sum if mtp_loss_sum is None else totals.stats["loss_sum_main"],
            mtp_loss_sum=mtp_loss_sum,
            count=count,
            local_count=local_count,
            aux_loss=None if totals.aux_loss is None else totals.aux_loss / self._local_sequences,
            grad_norm=gradients.norm,
            finite=gradients.finite,
            lr=self.config.optim.lr * factor,
            stats=totals.stats,
        )

    @property
    def _local_sequences(self) -> int:
        return self.config.train.global_batch_size // self.mesh.dp_size

    def rerun(self, step: int, batches: Sequence[Batch]) -> list[Tensor]:
        """Forward, backward and reduction once more, without an update, for a diagnosis: the loss of each micro-batch.

        Gradients are left in the main parameters; `engine.zero_gradients` clears them. Collective.
        """
        prepared, _, count = self._prepare(batches)
        losses = [terms.loss_sum.detach() for terms in self._each_micro_batch(step, prepared, count)]
        self.engine.reduce_gradients()
        return losses

    def _prepare(self, batches: Sequence[Batch]) -> tuple[list[Batch], Tensor, Tensor]:
        prepared = [self.task.prepare(batch) for batch in batches]
        local_count = torch.stack([self.task.count(batch) for batch in prepared]).sum()
        count = local_count.clone()
        all_reduce(count, self.mesh["dp"], "dp/step/count")
        return prepared, local_count, count

    def _forward_backward(self, step: int, batches: Sequence[Batch], count: Tensor) -> _Totals:
        totals = _Totals()
        for terms in self._each_micro_batch(step, batches, count):
            totals.add(terms.loss_sum.detach(), terms.aux_loss, terms.stats)
        return totals

    def _each_micro_batch(self, step: int, batches: Sequence[Batch], count: Tensor) -> Iterator[LossTerms]:
        """Forward and backward of one micro-batch after the other."""
        divisor = count.clamp(min=1)  # a step whose every label is masked has loss 0, not nan
        for index, batch in enumerate(batches):
            self._seed(step, index)
            with self.engine.accumulate(last=index == len(batches) - 1):
                terms = self.task.loss(self.model, batch)
                loss = terms.loss_sum / divisor
                if terms.aux_loss is not None:
                    loss = loss + terms.aux_loss / self.config.train.global_batch_size
                # 1, or nan where the loss is not finite: then every gradient is, and with them the one norm that all
                # ranks share; else a nan that no gradient passes would go unnoticed
                loss.backward(loss.detach() * 0 + 1)
            yield terms

    def _seed(self, step: int, micro_batch: int) -> None:
        # by position, not by history: a resumed run draws the same masks without storing any generator's state
        if self._draws_random:
            seed = stream_seed(self.config.run.seed, "dropout", step=step, micro=micro_batch, dp=self.mesh.dp_rank)
            torch.manual_seed(seed)

    def _balance_experts(self, stats: Mapping[str, Tensor], finite: Tensor) -> None:
        if not (self.config.model.is_moe and self.config.model.moe.bias_balance) or "moe/load" not in stats:
            return
        load = stats["moe/load"].float()
        all_reduce(load, self.mesh["dp"], "dp/moe/load")
        # equal loads move no bias: a skipped step leaves them as they are
        self.model.update_expert_bias(torch.where(finite, load, torch.zeros_like(load)))


class _Totals:
    """Sums over the micro-batches of a step, kept on the device."""

    def __init__(self) -> None:
        self.loss_sum = torch.zeros(())
        self.aux_loss: Tensor | None = None
        self.stats: dict[str, Tensor] = {}
        self._empty = True

    def add(self, loss_sum: Tensor, aux_loss: Tensor | None, stats: Mapping[str, Tensor]) -> None:
        self.loss_sum = loss_sum.float() if self._empty else self.loss_sum + loss_sum
        if aux_loss is not None:
            aux_loss = aux_loss.detach()
            self.aux_loss = aux_loss if self.aux_loss is None else self.aux_loss + aux_loss
        for name, value in stats.items():
            self.stats[name] = value if name not in self.stats else self.stats[name] + value
        self._empty = False
