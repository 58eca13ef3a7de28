"""How fast does a recipe train? The trainer's own loop on synthetic data, record of every step included."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.ranks import Ranks
from paceline.config.load import Recipe, dump_recipe, resolve
from paceline.config.run import RunConfig
from paceline.data.build import Datasets
from paceline.observe.events import RunFolder
from paceline.observe.hooks import Hook, Hooks, RunEnd, RunStart, StepEnd, StepStart
from paceline.observe.phases import NO_PHASES
from paceline.observe.recorder import Recorder
from paceline.observe.sinks import FolderSink, SinkHook
from paceline.parallel.collectives import all_reduce_number
from paceline.runtime.device import GIB, choose_device, device_name, memory_stats, reset_peak_memory, versions
from paceline.runtime.gemm import GemmRate, sustained_gemm
from paceline.runtime.process import ProcessInfo, process_group
from paceline.runtime.seed import set_deterministic
from paceline.runtime.signals import StopRequest
from paceline.runtime.start_clock import StartClock
from paceline.training.feed import Feed, documents_of, open_datasets
from paceline.training.recording import build_recorder
from paceline.training.setup import Parts, build_expert_meter, build_meter, build_parts, energy_reader
from paceline.training.start_up import StartUpHook
from paceline.training.trainer import Progress, Trainer


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """One measurement; printed as one JSON line."""

    step_seconds: float
    """median over the measured steps"""
    step_seconds_min: float
    step_seconds_max: float
    steps: int
    seconds_by_step: list[float]
    """of the measured steps, in their order"""
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    flops_convention: str
    peak_memory_gib: float
    """the highest of any rank, after the warm-up"""
    sustained_gemm_tflops: float
    """measured in this run, right after the steps, in the precision of its products"""
    fraction_of_gemm: float
    gemm_dtype: str
    sustained_bf16_gemm_tflops: float | None
    """beside it in an fp8 run"""
    mfu: float | None
    peak_tflops: float | None
    loss: float | None
    logged: list[dict[str, float | None]]
    """`step`, `loss` and `grad_norm` of the steps that were logged, the first and the last among them"""
    gradient_reduction: str
    tokens_per_joule: float | None
    """over the measured steps, all devices; None where one does not count its energy"""
    start_up_seconds: dict[str, float]
    """of each phase from the command to the end of the first step"""
    devices: str
    recipe: dict[str, Any]
    versions: dict[str, str]


def bench_train(
    recipe: Recipe,
    info: ProcessInfo,
    *,
    steps: int,
    warm_up: int,
    gemm_seconds: float | None = None,
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> BenchRecord | None:
    """Trains ``warm_up + steps`` steps on synthetic data and measures the last ``steps``. The record is rank 0's.

    Args:
        gemm_seconds: how long each matrix product is repeated; None = `sustained_gemm`'s own.
        keep: a run folder that stays, with recipe, metrics and record, for `paceline explain`; None = nothing stays.
        tell: called with a few words, a dozen times in all, to say what is going on. It must not wait for the device.

    Raises:
        PacelineError: as `paceline train` would; also where ``keep`` cannot be written or holds another recipe's run.
    """
    config, start_clock = _without_files(recipe, steps + warm_up), StartClock.of_process()
    device = choose_device(info, config.cluster.device)
    set_deterministic(config.run.deterministic)
    with ExitStack() as stack:
        stack.enter_context(process_group(info, device, timeout_seconds=config.cluster.timeout_seconds))
        start_clock.done("process group")
        stop = stack.enter_context(StopRequest())
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept = _claim(stack, keep, config, info, device)
        tell("building the model")
        parts = build_parts(config, recipe.registry, info, device, done=start_clock.done)
        samples = config.train.steps * config.train.global_batch_size
        datasets = open_datasets(config, recipe.registry, train_samples=samples)
        ranks = Ranks.create(timedelta(seconds=config.cluster.timeout_seconds))
        parts = replace(parts, documents=documents_of(datasets, ranks))
        clock, energy = StepClock(device), _EnergyAfterWarmUp(energy_reader(device), warm_up, steps)
        told, logged = _Teller(tell, warm_up, steps), _Logged()
        recorder = build_recorder(parts)
        hooks = Hooks(
            [
                *(() if recorder is None else (recorder,)),
                *(clock, energy, _PeakAfterWarmUp(device, warm_up), told, logged, StartUpHook(start_clock)),
                *(() if kept is None else (SinkHook([FolderSink(kept)]),)),
            ]
        )
        trainer = _trainer(parts, datasets, ranks, folder, hooks, recorder)
        try:
            trainer.run(stop)
        finally:
            trainer.feed.close()
            trainer.manager.close()
            if recorder is not None:
                recorder.on_end(RunEnd(step=trainer.progress.step))
        # of the fullest rank: pipeline stages differ
        peak = all_reduce_number(
            memory_stats(device).peak_bytes, parts.mesh["world"], "bench/peak_memory", device, op=dist.ReduceOp.MAX
        )
        joules = all_reduce_number(energy.used(), parts.mesh["world"], "bench/energy", device)
        # every rank: GPUs of one host share its power and cooling
        tell("measuring the matrix product")
        gemms = [sustained_gemm(device, seconds=gemm_seconds)]
        if config.train.precision == "fp8":
            gemms.append(sustained_gemm(device, seconds=gemm_seconds, fp8=True))
        if not info.is_main:
            return None
        if kept is not None:
            kept.write_event("end", step=trainer.progress.step)
        return _record(
            parts, trainer, clock.seconds(), peak / GIB, steps, gemms,
            logged=logged.records, joules=joules, start_up=start_clock.phases,
        )  # fmt: skip


def _claim(
    stack: ExitStack, keep: Path | None, config: RunConfig, info: ProcessInfo, device: torch.device
) -> RunFolder | None:
    """The run folder that stays, taken until ``stack`` ends; None without one, and on ranks that write no metrics."""
    if keep is None or not info.is_main:
        return None
    folder = stack.enter_context(RunFolder(keep))
    folder.claim(dump_recipe(config))
    folder.write_event(
        "start", step=0, world_size=info.world_size, device=device.type, facts={"device": device_name(device)}
    )
    return folder


def _without_files(recipe: Recipe, total_steps: int) -> RunConfig:
    tables = recipe.config.model_dump(mode="json")
    tables["data"] |= {"train": "synthetic", "valid": "", "test": "", "split": "", "tokenizer": ""}
    tables["train"] |= {"steps": total_steps, "eval_interval": 0}
    tables["checkpoint"] |= {"interval": 0, "save_last": False}
    tables["model"]["init_from"] = ""
    return resolve(tables).config


class StepClock(Hook):
    """Marks the end of every step on the device's own clock; reads nothing until asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def on_step_end(self, end: StepEnd) -> None:
        self.mark()

    def seconds(self) -> list[float]:
        """Time between neighbouring marks. Waits for the device."""
        pairs = list(zip(self.marks[:-1], self.marks[1:], strict=True))
        if self.device.type != "cuda":
            return [later - earlier for earlier, later in pairs]
        torch.cuda.synchronize(self.device)
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairs]


class _PeakAfterWarmUp(Hook):
    def __init__(self, device: torch.device, warm_up: int) -> None:
        self.device, self.warm_up = device, warm_up

    def on_step_end(self, end: StepEnd) -> None:
        if end.step == self.warm_up:
            reset_peak_memory(self.device)


class _EnergyAfterWarmUp(Hook):
    """Reads the device's counter where the measured steps begin and end, without waiting for the device."""

    def __init__(self, joules: Callable[[], float | None], warm_up: int, steps: int) -> None:
        self.joules = joules
        self.ends = (warm_up, warm_up + steps)
        self.readings: list[float | None] = []

    def on_step_end(self, end: StepEnd) -> None:
        if end.step in self.ends:
            self.readings.append(self.joules())

    def used(self) -> float:
        """Joules of the measured steps; nan where nobody knows."""
        known = [reading for reading in self.readings if reading is not None]
        return known[1] - known[0] if len(known) == len(self.ends) else math.nan


class _Logged(Hook):
    """Loss and gradient norm of logged steps, which were read anyway."""

    def __init__(self) -> None:
        self.records: list[dict[str, float | None]] = []

    def on_step_end(self, end: StepEnd) -> None:
        if end.record is not None:
            self.records.append({"step": end.step, "loss": end.record.loss, "grad_norm": end.record.grad_norm})


class _Teller(Hook):
    """Says which step begins, about five times in each part. The host counts them: nothing waits for the device."""

    def __init__(self, tell: Callable[[str], None], warm_up: int, steps: int) -> None:
        self.tell, self.warm_up, self.steps = tell, warm_up, steps

    def on_step_start(self, start: StepStart) -> None:
        done = start.step - 1
        name, number, total = (
            ("warm-up", done, self.warm_up) if done < self.warm_up else ("step", done - self.warm_up, self.steps)
        )
        if number % math.ceil(total / 5) == 0:
            self.tell(f"{name} {number + 1}/{total}")


class _NoSaver:
    def save(self, progress: Progress) -> None:
        """A bench keeps nothing."""


def _trainer(
    parts: Parts, datasets: Datasets, ranks: Ranks, folder: Path, hooks: Hooks, recorder: Recorder | None
) -> Trainer:
    """``recorder``: writes into ``folder``, from now on."""
    config = parts.config
    feed = Feed.open(datasets.train, config, parts.mesh, parts.device, start_sample=0)
    if recorder is not None:
        recorder.ready = lambda: feed.ready
        start = RunStart(
            run_name=config.run.name, run_dir=folder, start_step=0, total_steps=config.train.steps,
            rank=parts.info.rank, world_size=parts.info.world_size, device=str(parts.device),
        )  # fmt: skip
        recorder.on_start(start)
    return Trainer(
        config,
        step=parts.step,
        feed=feed,
        meter=build_meter(parts),
        saver=_NoSaver(),
        manager=CheckpointManager(folder, config.checkpoint, ranks=ranks),
        hooks=hooks,
        evaluator=None,
        progress=Progress(),
        device=parts.device,
        experts=build_expert_meter(config, parts.device),
        phases=NO_PHASES if recorder is None else recorder.clock,
    )


def _record(
    parts: Parts,
    trainer: Trainer,
    seconds: list[float],
    peak_gib: float,
    steps: int,
    gemms: Sequence[GemmRate],
    *,
    logged: list[dict[str, float | None]],
    joules: float,
    start_up: dict[str, float],
) -> BenchRecord:
    gemm = gemms[-1]  # of the precision that the run multiplies in
    config, info = parts.config, parts.info
    measured = seconds[-steps:]
    step_seconds = statistics.median(measured)
    tokens_per_second = config.train.global_batch_size * config.train.seq_len / step_seconds / info.world_size
    found = trainer.meter.rates
    assert found.flops_per_token is not None
    tflops = tokens_per_second * found.flops_per_token / 1e12
    reading = trainer.last_reading
    return BenchRecord(
        step_seconds=step_seconds,
        step_seconds_min=min(measured),
        step_seconds_max=max(measured),
        steps=len(measured),
        seconds_by_step=measured,
        tokens_per_second_per_gpu=tokens_per_second,
        tflops_per_gpu=tflops,
        flops_convention=found.flops_convention,
        peak_memory_gib=peak_gib,
        sustained_gemm_tflops=gemm.tflops,
        fraction_of_gemm=tflops / gemm.tflops,
        gemm_dtype=gemm.dtype,
        sustained_bf16_gemm_tflops=gemms[0].tflops if len(gemms) > 1 else None,
        mfu=tflops / found.peak_tflops if found.peak_tflops else None,
        peak_tflops=found.peak_tflops,
        loss=reading.record.loss if reading else None,
        logged=logged,
        gradient_reduction=config.parallel.reduce_dtype,
        tokens_per_joule=_tokens_per_joule(config, steps, joules),
        start_up_seconds={phase: round(each, 3) for phase, each in start_up.items()},
        devices=f"{info.world_size} x {device_name(parts.device)}",
        recipe=config.model_dump(mode="json"),
        versions=versions(),
    )


def _tokens_per_joule(config: RunConfig, steps: int, joules: float) -> float | None:
    tokens = steps * config.train.global_batch_size * config.train.seq_len
    return tokens / joules if joules > 0 else None  # also nan


def as_line(record: BenchRecord) -> dict[str, Any]:
    """The record as plain data."""
    return asdict(record)
