"""The record of every step: phases, collectives, machine and process, joined on the step and handed to a writer.

A hook that looks and never waits: host clocks, CUDA events that are read when they have happened, counters of the
kernel and of the allocator, and a sampler thread for what is slow to ask. See `telemetry/columns.py` for what a line
holds.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.observe.events import StepRecord
from paceline.observe.hooks import Hook, RunEnd, RunStart, StepEnd, StepStart
from paceline.observe.phases import PHASES
from paceline.observe.stall import StallWatch, forget_stall
from paceline.observe.step_clock import StepClock, StepTimes
from paceline.observe.telemetry.columns import COLUMNS, MEMORY, UNKNOWN
from paceline.observe.telemetry.host import HostProbe, ThreadProbe
from paceline.observe.telemetry.prometheus import PrometheusServer
from paceline.observe.telemetry.record import RecordWriter
from paceline.observe.telemetry.sampler import Probe, Sampler

_MEMORY_SECONDS = 1.0
"""The allocator's counters are asked at most so often: it takes some tens of microseconds."""


class Recorder(Hook):
    """Writes the record of one rank. Comes first among the hooks.

    Args:
        limit_mb: MiB on disk.
        facts: of this rank, for the head of its files.
        memory: gives `columns.MEMORY` by name; asked about once a second.
        probes: beside the host's, such as a GPU's.
        stall_seconds: see `StallWatch`; 0 = nobody watches.
        prometheus_port: 0 = no page.
        labels: of the page.
    """

    def __init__(
        self,
        clock: StepClock,
        *,
        limit_mb: int,
        facts: Mapping[str, Any],
        memory: Callable[[], Mapping[str, int]],
        probes: Sequence[Probe] = (),
        stall_seconds: float = 0.0,
        prometheus_port: int = 0,
        labels: Mapping[str, str] | None = None,
        sample_seconds: float = 1.0,
    ) -> None:
        self.clock = clock
        self.ready: Callable[[], int] = lambda: UNKNOWN
        """Micro-batches that wait for the step; set once there is a loader."""
        self._limit_mb, self._facts, self._memory = limit_mb, facts, memory
        self._probes, self._sample_seconds = tuple(probes), sample_seconds
        self._port, self._labels = prometheus_port, labels or {}
        self._writer: RecordWriter | None = None
        self._sampler: Sampler | None = None
        self._thread: ThreadProbe | None = None
        self._page: PrometheusServer | None = None
        self._watch: StallWatch | None = None
        self._stall_seconds = stall_seconds
        self._collections = _Collections()
        self._memory_values: Mapping[str, int] = dict.fromkeys(MEMORY, UNKNOWN)
        self._memory_at = float("-inf")
        self._ready = UNKNOWN
        self._newest: dict[str, float] = {}
        self._logged: dict[str, float] = {}

    def on_start(self, start: RunStart) -> None:
        self._open(start.run_dir, start.rank)

    def _open(self, folder: Path, rank: int) -> None:
        self._writer = RecordWriter(folder, rank, limit_mb=self._limit_mb, facts=self._facts)
        self._sampler = Sampler([HostProbe().read, *self._probes], seconds=self._sample_seconds)
        self._sampler.start()
        self._thread = ThreadProbe()
        self._collections.start()
        self.clock.at_end = self._measure
        forget_stall(folder, rank)
        if self._stall_seconds:
            self._watch = StallWatch(
                folder,
                rank,
                seconds=self._stall_seconds,
                current=self.clock.current,
                facts={name: self._facts.get(name) for name in ("host", "place")},
                thread_id=threading.get_ident(),
            )
        if self._port:
            self._page = PrometheusServer(self._port, self._labels, lambda: {**self._newest, **self._logged})

    def on_step_start(self, start: StepStart) -> None:
        self._advance(self.clock.begin_step(start.step))

    def on_step_end(self, end: StepEnd) -> None:
        if end.record is not None and self._page is not None:
            self._logged = _logged(end.record)

    def on_end(self, end: RunEnd) -> None:
        if self._writer is None:
            return
        try:
            if end.error is not None:
                self.clock.abandon()
            self._advance(self.clock.take_last())
            self._write(self.clock.finished(everything=True))
        finally:
            self._close()

    def _close(self) -> None:
        """Each part, whatever the others do; the writer last."""
        with ExitStack() as stack:
            for part in (self._writer, self._page, self._thread, self._sampler, self._watch):
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self._collections.stop)
            self._writer = self._page = self._thread = self._sampler = self._watch = None

    def _advance(self, ended: StepTimes | None) -> None:
        if self._thread is None or self._sampler is None:
            return
        if ended is None:
            self._thread.read()
            self._collections.take()
        elif not ended.extra:  # the last step was measured as it ended
            self._measure(ended)
        self._ready = self.ready()
        self._write(self.clock.finished())

    def _measure(self, ended: StepTimes) -> None:
        """What is counted beside a step, since the one before."""
        if self._thread is None or self._sampler is None:
            return
        if self._watch is not None:
            self._watch.step_took(ended.wall_ns / 1e9)
        cpu, queue, preempted = self._thread.read()
        pauses, runs = self._collections.take()
        ended.extra = {
            "thread_cpu_us": cpu,
            "thread_queue_us": queue,
            "preempted": preempted,
            "gc_us": pauses,
            "gc_runs": runs,
            "loader_ready": self._ready,
            **self._current_memory(),
            **self._sampler.take(),
        }

    def _current_memory(self) -> Mapping[str, int]:
        now = time.monotonic()
        if now - self._memory_at >= _MEMORY_SECONDS:
            self._memory_values, self._memory_at = self._memory(), now
        return self._memory_values

    def _write(self, finished: Sequence[StepTimes]) -> None:
        assert self._writer is not None
        for times in finished:
            self._writer.put(line_of(times))
        if finished and self._page is not None:
            self._newest = _newest(finished[-1])


def line_of(times: StepTimes) -> list[int]:
    """By `columns.COLUMNS`."""
    device = times.device_us
    return [
        times.step,
        1,
        round(times.end_time * 1e3),
        times.wall_ns // 1000,
        *(value // 1000 for value in times.host_ns),
        *([UNKNOWN] * len(PHASES) if device is None else map(round, device)),
        *(map(round, times.wait_us) if times.timed else [UNKNOWN] * len(times.wait_us)),
        *(map(round, times.blocked_us) if times.timed else [UNKNOWN] * len(times.blocked_us)),
        int(times.timed),
        *(value >> 10 for value in times.sent_bytes),
        *(times.extra.get(name, UNKNOWN) for name in _EXTRA),
    ]


_EXTRA = COLUMNS[COLUMNS.index("thread_cpu_us") :]


def _newest(times: StepTimes) -> dict[str, float]:
    """What the page shows of the newest step: seconds by phase, and levels."""
    phases = [value / 1e9 for value in times.host_ns]
    if times.device_us is not None:
        phases = [value / 1e6 for value in times.device_us]
    values = {"step": float(times.step), "step_seconds": times.wall_ns / 1e9}
    values |= {f"phase_{phase}_seconds": value for phase, value in zip(PHASES, phases, strict=True)}
    return values | {name: float(value) for name, value in times.extra.items() if value != UNKNOWN}


def _logged(record: StepRecord) -> dict[str, float]:
    known = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "lr": record.lr,
        "tokens_total": float(record.tokens),
        "tokens_per_second_per_gpu": record.tokens_per_second_per_gpu,
        "mfu": record.mfu,
        "skipped_steps_total": float(record.skipped_steps),
    }
    return {name: float(value) for name, value in known.items() if value is not None}


class _Collections:
    """How long Python's collector held the training thread up, whoever called it."""

    def __init__(self) -> None:
        self._nanoseconds = self._runs = self._began = 0

    def start(self) -> None:
        gc.callbacks.append(self._seen)

    def stop(self) -> None:
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)

    def take(self) -> tuple[int, int]:
        """(microseconds, collections) since the last call."""
        taken = self._nanoseconds // 1000, self._runs
        self._nanoseconds = self._runs = 0
        return taken

    def _seen(self, moment: str, _: dict[str, int]) -> None:
        if moment == "start":
            self._began = time.perf_counter_ns()
        else:
            self._nanoseconds += time.perf_counter_ns() - self._began
            self._runs += 1
