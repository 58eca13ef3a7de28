"""One start of a run, from recipe to exit code: takes the folder, builds, resumes, trains, sums up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from paceline.checkpoint.adapters import BaseReference
from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.store import Checkpoint
from paceline.config.check import check, refuse_errors
from paceline.config.load import Recipe, dump_recipe
from paceline.config.run import RunConfig
from paceline.data.build import Datasets
from paceline.errors import PacelineError
from paceline.observe.events import RunFolder
from paceline.observe.hooks import Hook, Hooks, RunEnd
from paceline.observe.phases import NO_PHASES
from paceline.observe.progress import ProgressHook
from paceline.observe.recorder import Recorder
from paceline.observe.sinks import EventHook, SinkHook, build_sinks
from paceline.report.console import make_console, print_findings
from paceline.report.finding import Finding
from paceline.runtime.device import choose_device
from paceline.runtime.log import logging_to
from paceline.runtime.process import ProcessInfo, launch_findings, process_group
from paceline.runtime.seed import seed_all, set_deterministic
from paceline.runtime.signals import StopRequest
from paceline.runtime.start_clock import StartClock
from paceline.training.adapters import begin_adapters, load_base
from paceline.training.ending import finish
from paceline.training.exports import mark_outdated
from paceline.training.feed import Feed, documents_of, open_datasets, samples_needed
from paceline.training.foreign import Exporter, load_initial
from paceline.training.live_samples import LiveSampler
from paceline.training.persist import RunSaver, restore
from paceline.training.recording import build_capture, build_recorder
from paceline.training.reference_cache import ReferenceCache
from paceline.training.resume import Start, check_sample_order, claim_folder, find_start
from paceline.training.samples import keep_tokenizer
from paceline.training.setup import Parts, build_expert_meter, build_meter, build_parts
from paceline.training.start_facts import run_start
from paceline.training.start_up import StartUpHook
from paceline.training.start_weights import load_reference
from paceline.training.trainer import Progress, Trainer
from paceline.training.validate import Evaluator

log = logging.getLogger(__name__)


def run_recipe(recipe: Recipe, info: ProcessInfo) -> int:
    """Runs this process's part of a recipe and returns its exit code: 0, or 130 after Ctrl-C.

    Raises:
        PacelineError: something is wrong that the user can mend; nothing is half-written.
    """
    config, clock = recipe.config, StartClock.of_process()
    findings = [*check(config, recipe.registry, info.world_size), *launch_findings(info, torch.cuda.device_count())]
    refuse_errors(findings)
    device = choose_device(info, config.cluster.device)
    set_deterministic(config.run.deterministic)
    alone = info.launcher == "single"
    with (
        StopRequest(announce=alone) as stop,
        process_group(info, device, timeout_seconds=config.cluster.timeout_seconds),
    ):
        clock.done("process group")
        run_in_group(recipe, info, device, stop, findings, clock)
    # a launcher takes any other code than 0 for a failure, and ends processes that are still at work
    return stop.exit_code if alone else 0


def run_in_group(
    recipe: Recipe,
    info: ProcessInfo,
    device: torch.device,
    stop: StopRequest,
    findings: Sequence[Finding] = (),
    clock: StartClock | None = None,
) -> Progress:
    """As `run_recipe`, in a process group that is there already. Collective; returns how far the run is."""
    ranks = Ranks.create(timedelta(seconds=recipe.config.cluster.timeout_seconds))
    run = _Run(recipe, info, device, ranks, stop, clock or StartClock())
    with run.folder_held(), logging_to(run.folder.logs, rank=info.rank):
        if info.is_main:
            print_findings(make_console(stderr=True), findings)
        return run.execute()


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What a start needs, once it is known where it begins."""

    start: Start
    datasets: Datasets
    parts: Parts
    saver: RunSaver
    trainer: Trainer
    hooks: Hooks


class _Run:
    """One start of a run on one rank."""

    def __init__(
        self,
        recipe: Recipe,
        info: ProcessInfo,
        device: torch.device,
        ranks: Ranks,
        stop: StopRequest,
        clock: StartClock,
    ) -> None:
        self.config: RunConfig = recipe.config
        self.registry = recipe.registry
        self.info = info
        self.device = device
        self.ranks = ranks
        self.stop = stop
        self.folder = RunFolder(self.config.run.folder)
        self.manager = CheckpointManager(
            self.folder.checkpoints, self.config.checkpoint, ranks=ranks, report=self._report
        )
        self.clock = clock

    @contextmanager
    def folder_held(self) -> Iterator[None]:
        """Rank 0 holds the run folder; all ranks fail together where it cannot."""
        recipe = dump_recipe(self.config)
        self.ranks.from_first("taking the run folder", lambda: claim_folder(self.folder, self.config, recipe))
        try:
            yield
        finally:
            if self.info.is_main:
                self.folder.release()
            if self.info.world_size == 1:
                self.folder.remove_untouched()

    def execute(self) -> Progress:
        """Everything from the checkpoint to the summary."""
        try:
            opened = self._open()
        except BaseException as raised:
            self._keep_trace(raised)
            self.manager.close()
            raise
        error: BaseException | None = None
        reason = ""
        try:
            opened.hooks.on_start(run_start(opened.parts, self.folder.path, opened.start.progress.step))
            reason = opened.trainer.run(self.stop)
            self.manager.close()
            finish(
                opened.parts,
                opened.trainer,
                opened.datasets,
                self.folder,
                self.registry,
                reason=reason,
                stop=self.stop,
                start_up=self.clock.phases,
            )
        except BaseException as raised:
            error = raised
            self._keep_trace(raised)
            raise
        finally:
            try:
                opened.trainer.feed.close()
            finally:
                opened.hooks.on_end(RunEnd(step=opened.trainer.progress.step, reason=reason, error=error))
        return opened.trainer.progress

    def _keep_trace(self, error: BaseException) -> None:
        """What nobody foresaw goes into this rank's log file: with a launcher that may be all that is left of it."""
        if isinstance(error, Exception) and not isinstance(error, PacelineError):
            log.error("the run ends here", exc_info=error, extra={"file_only": True})

    def _open(self) -> _Opened:
        checkpoint = self.manager.latest()
        # once for all ranks, so that a refusal is told once
        start = self.ranks.from_first("finding where to go on", lambda: find_start(checkpoint, self.config))
        datasets = self._datasets(start)
        self._phase("data")
        parts = build_parts(self.config, self.registry, self.info, self.device, done=self._phase)
        seed_all(self.config.run.seed, rank=self.info.rank)
        early = not self.config.lora.on
        datasets = self._with_reference(parts, datasets) if early else datasets
        base = self._load(parts, checkpoint)
        parts.base.settle()
        datasets = datasets if early else self._with_reference(parts, datasets)
        load_reference(parts.reference, self.config, self.registry, self.ranks)
        if self.info.is_main:
            self.folder.truncate_metrics(start.progress.step)
            keep_tokenizer(self.folder.path, datasets.tokenizer_info, self.config)
            log.info("optimizer groups\n%s", parts.optimizer.describe(self.config.learns))
            for report in datasets.reports:
                log.info("%s", report)
            for warning in datasets.warnings:
                log.warning("%s", warning)
        parts = replace(parts, documents=documents_of(datasets, self.ranks))
        self._mark_exports(start.progress.step)
        saver = RunSaver(parts, self.manager, datasets, base)
        saver.prepare()
        recorder = build_recorder(parts)
        hooks = self._hooks([] if recorder is None else [recorder, build_capture(parts, recorder)])
        trainer = self._trainer(parts, datasets, saver, hooks, start.progress, recorder)
        return _Opened(start=start, datasets=datasets, parts=parts, saver=saver, trainer=trainer, hooks=hooks)

    def _mark_exports(self, step: int) -> None:
        marked = self.ranks.from_first("looking at exports", lambda: mark_outdated(self.folder.path, step))
        for folder in marked if self.info.is_main else ():
            log.warning("%s is from before this run went on from step %d: it is written anew at its step", folder, step)

    def _with_reference(self, parts: Parts, datasets: Datasets) -> Datasets:
        """What a reference model says of the data, where it is to be known before the first step."""
        task, cache_dir = self.config.task, self.config.data.cache_dir
        if not (task.reads_reference and task.precompute_reference):
            return datasets
        folder = Path(cache_dir) if cache_dir else self.folder.path / "reference"
        found = ReferenceCache(parts, self.registry, self.ranks, folder).attach(datasets)
        self._phase("reference")
        return found

    def _datasets(self, start: Start) -> Datasets:
        progress = start.progress
        wanted = samples_needed(self.config, consumed=progress.consumed_samples, steps_done=progress.step)
        # rank 0 first: it writes the index cache that the others then only map
        self.ranks.from_first("opening the data", lambda: len(self._open_data(wanted).train))
        datasets = self._open_data(wanted)
        if start.checkpoint is not None and not check_sample_order(start.checkpoint.state(), datasets, self.config):
            progress.consumed_samples = 0
            datasets = self._open_data(samples_needed(self.config, consumed=0, steps_done=progress.step))
        return datasets

    def _open_data(self, train_samples: int) -> Datasets:
        return open_datasets(self.config, self.registry, train_samples=train_samples)

    def _load(self, parts: Parts, checkpoint: Checkpoint | None) -> BaseReference | None:
        """Returns, with adapters, the weights that they belong to."""
        base = None
        if self.config.lora.on:
            base = load_base(parts, self.registry, self.folder.path, self.ranks, checkpoint)
            self._phase("base")
        if checkpoint is not None:
            restore(parts, self.manager, checkpoint)
            log.info("going on from %s", checkpoint.folder)
            self._phase("checkpoint")
        elif base is not None:
            begin_adapters(parts, self.registry, self.ranks)
        elif self.config.model.init_from:
            load_initial(parts, self.registry, self.folder.path, self.ranks)
            log.info("weights from %s; optimizer, schedule and data start anew", self.config.model.init_from)
            self._phase("weights")
        return base

    def _hooks(self, first: Sequence[Hook]) -> Hooks:
        hooks = list(first)
        observe = self.config.observe
        if self.info.is_main:
            sinks = build_sinks(
                self.folder,
                tensorboard=observe.tensorboard,
                wandb_project=observe.wandb_project,
                mlflow_experiment=observe.mlflow_experiment,
                trackio_project=observe.trackio_project,
            )
            hooks += [EventHook(self.folder), SinkHook(sinks)]
            if observe.progress != "none":
                live = {"auto": None, "live": True, "lines": False}[observe.progress]
                hooks.append(ProgressHook(make_console(), live=live))
        hooks += [factory(self.config) for factory in self.registry.hooks]
        # last: a first step ends when its record is written
        return Hooks([*hooks, StartUpHook(self.clock, self.folder if self.info.is_main else None)])

    def _trainer(
        self,
        parts: Parts,
        datasets: Datasets,
        saver: RunSaver,
        hooks: Hooks,
        progress: Progress,
        recorder: Recorder | None,
    ) -> Trainer:
        feed = Feed.open(datasets.train, self.config, parts.mesh, self.device, start_sample=progress.consumed_samples)
        if recorder is not None:
            recorder.ready = lambda: feed.ready
        return Trainer(
            self.config,
            step=parts.step,
            feed=feed,
            meter=build_meter(parts, tokens_before=progress.tokens, skipped_before=progress.skipped_steps),
            saver=saver,
            exporter=Exporter(parts, self.registry, self.folder.path, self.ranks),
            manager=self.manager,
            hooks=hooks,
            evaluator=self._evaluator(parts, datasets),
            progress=progress,
            device=self.device,
            experts=build_expert_meter(self.config, self.device),
            phases=NO_PHASES if recorder is None else recorder.clock,
            sampler=LiveSampler.open(parts, self.folder.path, self.ranks),
        )

    def _evaluator(self, parts: Parts, datasets: Datasets) -> Evaluator | None:
        if datasets.valid is None:
            return None
        return Evaluator(self.config, datasets.valid, staged=parts.staged, device=self.device)

    def _phase(self, name: str) -> None:
        log.info("%s ready after %.1f s", name, self.clock.done(name))

    def _report(self, finding: Finding) -> None:
        log.warning("%s %s %s", finding.subject, finding.evidence, finding.next_step)
