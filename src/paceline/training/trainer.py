"""The loop: step after step until the end, a stop request, or something that cannot be gone on from."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.checkpoint.manager import CheckpointManager
from paceline.config.run import RunConfig
from paceline.data.batch import Batch
from paceline.models.router import ENTROPY_UNIT
from paceline.observe.capture import owned_by
from paceline.observe.experts import ExpertMeter
from paceline.observe.hooks import BackwardEnd, CheckpointSaved, Hooks, StepEnd, StepStart
from paceline.observe.metrics import Meter, Reading
from paceline.observe.phases import NO_PHASES, Phases
from paceline.runtime.collection import GarbageCollection
from paceline.runtime.process import any_rank
from paceline.runtime.signals import StopRequest
from paceline.training.feed import Feed
from paceline.training.nonfinite import SkipWatch, explain_nonfinite
from paceline.training.step import StepOutcome, TrainStep
from paceline.training.validate import Evaluation, Evaluator, with_prefix

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far the run is: what a checkpoint stores beside tensors."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed_samples: int = 0
    tokens: int = 0
    """Tokens read, padding included."""
    skipped_steps: int = 0
    """As of the last logged or saved step."""


class Saver(Protocol):
    """Where checkpoints go; `training/persist.py` has the real one."""

    def save(self, progress: Progress) -> None:
        """Starts to write a checkpoint of the current state; returns when the state may change again."""


class Exporter(Protocol):
    """Where weights for other programs go; `training/foreign.py` has the real one."""

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether to export after ``step``; ``last`` is the end of the run."""

    def export(self, step: int) -> None:
        """Writes the current weights; returns when they are written."""


class Sampler(Protocol):
    """What the model says in between; `training/live_samples.py` has the real one."""

    def due(self, step: int) -> bool:
        """Whether the evaluation after ``step`` has samples."""

    def draw(self, step: int, *, should_stop: Callable[[], bool]) -> tuple[tuple[str, str], ...]:
        """(prompt, text) by the current weights, on rank 0; nothing on others, or once any rank is asked to stop."""


class Trainer:
    """Runs the steps of one start of a run.

    Knows contracts only: a step, a feed, an evaluator, a saver, hooks. `training/run.py` puts them together.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        step: TrainStep,
        feed: Feed,
        meter: Meter,
        saver: Saver,
        exporter: Exporter | None = None,
        manager: CheckpointManager,
        hooks: Hooks,
        evaluator: Evaluator | None,
        progress: Progress,
        device: torch.device,
        experts: ExpertMeter | None = None,
        phases: Phases = NO_PHASES,
        sampler: Sampler | None = None,
    ) -> None:
        self.config = config
        self.experts = experts
        self.step = step
        self.feed = feed
        self.meter = meter
        self.saver = saver
        self.exporter = exporter
        self.manager = manager
        self.hooks = hooks
        self.evaluator = evaluator
        self.sampler = sampler
        self.progress = progress
        self.phases = phases
        step.announce_to(phases)
        self.watch = SkipWatch(device)
        # on a GPU a skipped step may be known only a step or two later: its batches are kept for the diagnosis
        self._recent: deque[tuple[int, Sequence[Batch]]] = deque(maxlen=3)
        self.collection = GarbageCollection(config.train.gc_interval)
        self._saved_step = progress.step
        self._stop: StopRequest | None = None
        self.last_reading: Reading | None = None
        self.first_loss: float | None = None

    def run(self, stop: StopRequest) -> str:
        """Runs to the end of the recipe. Returns why it stopped before it, or "".

        Raises:
            TrainingError: too many steps in a row were not finite.
        """
        self.step.on_backward_end = lambda number: self.hooks.on_backward_end(BackwardEnd(step=number))
        self.step.train()
        self._stop = stop
        self.meter.start()
        if self.progress.step:
            self._export()  # an earlier start may have been cut off between the checkpoint and the export of this step
        with self.collection:
            # an error leaves its step open: the recorder drops it
            reason = self._run_steps(stop)
            self.phases.end()
        if reason or self.config.checkpoint.save_last:
            self._save_last()
        if not reason:
            self._export(last=True)
        return reason

    def _run_steps(self, stop: StopRequest) -> str:
        while self.progress.step < self.config.train.steps:
            self._one_step()
            self.phases.mark("sync")
            # one vote a step: a signal, or a row of skipped steps, may be known to one rank and not yet to another
            if any_rank(bool(stop) or self._has_failed()):
                self._refuse_nonfinite()
                if self.progress.step == self.config.train.steps:
                    break  # a stop at the last step stops nothing
                return stop.reason or "another rank was asked to stop"
        return ""

    def _save_last(self) -> None:
        self._save()
        self.manager.wait()
        self._announce_saved()

    def _one_step(self) -> None:
        number = self.progress.step + 1
        self.hooks.on_step_start(StepStart(step=number))
        self.phases.mark("data")
        waited = self.feed.wait_seconds
        batches = self.feed.next_step()
        self.meter.add_data_wait(self.feed.wait_seconds - waited)
        self._recent.append((number, batches))
        outcome = self.step.run(number, batches)
        # rows of a step have one length, which may be another one than train.seq_len (data.packing = "buckets")
        with owned_by("metrics"):
            self._count(outcome, self.config.train.global_batch_size * batches[0].tokens.shape[1])
        self.collection.after_step(number)
        self.phases.mark("log")
        reading = self._read(number, outcome)
        self.phases.mark("evaluation")
        evaluation = self._evaluate(number)
        samples = () if evaluation is None else self._draw_samples(number)
        self.phases.mark("checkpoint")
        if self.manager.due(number):
            self._save()
        self._export()
        self._announce_saved()
        self.phases.mark("other")
        self.hooks.on_step_end(
            StepEnd(
                step=number,
                record=reading.record if reading else None,
                evaluation=with_prefix("valid", evaluation.values()) if evaluation else None,
                samples=samples,
            )
        )

    def _count(self, outcome: StepOutcome, tokens: int) -> None:
        self.progress.step += 1
        self.progress.consumed_samples += self.config.train.global_batch_size
        self.progress.tokens += tokens
        means: dict[str, tuple[Tensor, Tensor | int]] = {}
        if self.config.model.is_moe:
            # a stage without experts may be the one that counts the sequences
            aux_loss = torch.zeros_like(outcome.loss_sum) if outcome.aux_loss_sum is None else outcome.aux_loss_sum
            means["aux_loss"] = (aux_loss, outcome.sequences)
        if outcome.mtp_loss_sum is not None:
            means["mtp_loss"] = (outcome.mtp_loss_sum, outcome.local_count)
        means |= {name: (value[0], value[1]) for name, value in outcome.means.items()}
        self.meter.add_micro_batch(outcome.loss_sum, outcome.local_count, means)
        self.meter.end_step(outcome.grad_norm, ~outcome.finite, tokens)
        if self.experts is not None:
            counted = (outcome.expert_load, outcome.experts_dropped, outcome.router_entropy)
            for stage, load, dropped, entropy in zip(self.step.stages, *counted, strict=True):
                if load is not None and dropped is not None and entropy is not None:
                    self.experts.add(stage.moe_layer_names(), load, dropped, entropy.double() * ENTROPY_UNIT)
        self.watch.add(self.progress.step, outcome.finite)

    def _read(self, number: int, outcome: StepOutcome) -> Reading | None:
        last = number == self.config.train.steps
        if number % self.config.observe.log_interval and not last and self.first_loss is not None:
            return None
        reading = self.meter.read(number, outcome.lr, None if self.experts is None else self.experts.read())
        self.progress.skipped_steps = reading.record.skipped_steps
        for finding in reading.findings:
            log.warning("%s %s %s", finding.subject, finding.evidence, finding.next_step)
        if self.first_loss is None:
            self.first_loss = reading.record.loss
        self.last_reading = reading
        return reading

    def _evaluate(self, number: int) -> Evaluation | None:
        interval = self.config.train.eval_interval
        if self.evaluator is None or not interval or number % interval:
            return None
        with self.meter.excluded():
            self.step.engine.wait_for_weights()
            return self.evaluator.run(self.config.train.eval_steps, should_stop=lambda: bool(self._stop))

    def _draw_samples(self, number: int) -> tuple[tuple[str, str], ...]:
        if self.sampler is None or not self.sampler.due(number):
            return ()
        with self.meter.excluded():
            return self.sampler.draw(number, should_stop=lambda: bool(self._stop))

    def _save(self) -> None:
        if self._saved_step == self.progress.step:
            return
        with self.meter.excluded():
            self.step.engine.wait_for_weights()
            self.saver.save(self.progress)
        self._saved_step = self.progress.step

    def _export(self, *, last: bool = False) -> None:
        if self.exporter is not None and self.exporter.due(self.progress.step, last=last):
            with self.meter.excluded():
                self.step.engine.wait_for_weights()
                self.exporter.export(self.progress.step)

    def _announce_saved(self) -> None:
        """Tells the hooks of a checkpoint once it is whole on disk, which is some steps after it was begun."""
        saved = self.manager.completed()
        if saved is not None:
            self.hooks.on_checkpoint(CheckpointSaved(step=saved.step, path=saved.folder))

    @property
    def _limit(self) -> int:
        return 1 if self.config.train.on_nonfinite == "stop" else self.config.train.max_skipped_steps

    def _has_failed(self) -> bool:
        return self.watch.longest >= self._limit

    def _refuse_nonfinite(self) -> None:
        if any_rank(self._has_failed()):
            last = self.watch.last_skipped()
            number, batches = next((entry for entry in self._recent if entry[0] == last), self._recent[-1])
            raise explain_nonfinite(number, self._limit, batches, self.step, self.step.mesh)
