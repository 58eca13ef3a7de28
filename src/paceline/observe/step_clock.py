"""How long does each phase of a step take, on the host and on the GPU, without ever waiting for the GPU?

On a GPU each mark also records a CUDA event on the current stream. Events are asked later whether they have happened,
a step or more behind, and only then for the time between them; no stream and no host waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from paceline.observe.phases import PHASES, Current
from paceline.observe.telemetry.columns import AXES, AXIS_OF

_INDEX = {phase: index for index, phase in enumerate(PHASES)}
_OTHER = _INDEX["other"]
TIMED_EVERY = 16
"""On a GPU, collectives on the compute stream are timed in one step of so many: two events each are not free."""
_MOST_PENDING = 64
"""Steps whose GPU times may be outstanding."""


@dataclass(kw_only=True)
class StepTimes:
    """One step; nanoseconds of the host, microseconds of the device."""

    step: int
    end_time: float
    """Unix seconds."""
    wall_ns: int
    host_ns: list[int]
    """By phase."""
    device_us: list[float] | None = None
    """By phase; None on a CPU, or where it was never known."""
    wait_us: list[float] = field(default_factory=lambda: [0.0] * len(AXES))
    """By axis: held up by collectives."""
    blocked_us: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    """The same by phase."""
    timed: bool = False
    """Whether ``wait_us`` was measured in this step."""
    sent_bytes: list[int] = field(default_factory=lambda: [0] * len(AXES))
    extra: dict[str, int] = field(default_factory=dict)
    """Columns that others added at the end of the step."""


class _Held(NamedTuple):
    """A collective that held the compute stream up, between two events."""

    axis: int
    phase: int
    start: Any
    end: Any


class StepClock:
    """Told of steps, phases and collectives by the training thread. `Phases` and `CollectiveTimer` in one.

    Args:
        make_event: a timing event; another one in tests.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        make_event: Callable[[], Any] | None = None,
        timed_every: int = TIMED_EVERY,
    ) -> None:
        self._on_gpu = device.type == "cuda" or make_event is not None
        self._device = device
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._clock = clock
        self._timed_every = timed_every
        self._free: list[Any] = []
        self._pending: deque[tuple[StepTimes, list[tuple[int, Any]], list[_Held]]] = deque()
        self._marks: list[tuple[int, Any]] = []
        self._collectives: list[_Held] = []
        self._axis_of: dict[str, int] = {}
        self._step = 0
        self._phase = _OTHER
        self._began = self._last = clock()
        self._monotonic = time.monotonic()
        self._host = [0] * len(PHASES)
        self._wait, self._blocked = [0.0] * len(AXES), [0.0] * len(PHASES)
        self._sent = [0] * len(AXES)
        self._last_collective = ("", 0, 0.0)
        self._inside = 0
        self._calls = 0
        self._last_step: StepTimes | None = None
        self.listener: Callable[[str], None] | None = None
        """Told of each mark too, while somebody captures."""
        self.at_end: Callable[[StepTimes], None] | None = None
        """Told of the last step as it ends: what is counted beside a step counts up to here."""

    # ---- phases

    def mark(self, phase: str) -> None:
        self._mark(_INDEX[phase])

    def _mark(self, index: int) -> None:
        now = self._clock()
        self._host[self._phase] += now - self._last
        self._last = now
        self._phase = index
        if self._on_gpu:
            self._marks.append((index, self._event()))
        if self.listener is not None:
            self.listener(PHASES[index])

    def begin_step(self, step: int) -> StepTimes | None:
        """Ends the step before, whose host times it gives, and begins this one. Call `finished` for whole ones."""
        self._mark(_OTHER)
        done = self._end() if self._step else None
        self._step, self._began, self._monotonic = step, self._last, time.monotonic()
        self._host, self._blocked = [0] * len(PHASES), [0.0] * len(PHASES)
        self._wait, self._sent = [0.0] * len(AXES), [0] * len(AXES)
        if self._on_gpu:
            # the last mark of the step before is the first of this one
            self._marks, self._collectives = self._marks[-1:], []
        return done

    def end(self) -> None:
        if self._step:
            self._last_step = self.begin_step(0)
            if self._last_step is not None and self.at_end is not None:
                self.at_end(self._last_step)

    def abandon(self) -> None:
        """The step that runs was cut off by an error: it is no step, and the device may not answer any more."""
        self._step = 0

    def take_last(self) -> StepTimes | None:
        """Host times of the last step of the run, once: where nobody has ended it, it ends now."""
        self.end()
        taken, self._last_step = self._last_step, None
        return taken

    def _end(self) -> StepTimes:
        times = StepTimes(
            step=self._step,
            end_time=time.time(),
            wall_ns=self._last - self._began,
            host_ns=self._host,
            wait_us=self._wait,
            blocked_us=self._blocked,
            timed=not self._on_gpu or self._is_timed(),
            sent_bytes=self._sent,
        )
        self._pending.append((times, self._marks, self._collectives))
        return times

    def finished(self, *, everything: bool = False) -> list[StepTimes]:
        """Steps, in order, whose GPU times have become known; on a CPU all that have ended.

        A device that has failed leaves times unknown: who computes on it next says why.

        Args:
            everything: also those whose GPU times are not known, as they are.
        """
        done = []
        while self._pending:
            times, marks, collectives = self._pending[0]
            if self._on_gpu:
                try:
                    known = marks[-1][1].query()
                    if known:
                        self._read(times, marks, collectives)
                    elif not everything and len(self._pending) <= _MOST_PENDING:
                        break
                except RuntimeError:
                    known = False
                times.timed = times.timed and known
            done.append(times)
            self._pending.popleft()
        return done

    def _read(self, times: StepTimes, marks: list[tuple[int, Any]], collectives: list[_Held]) -> None:
        device = [0.0] * len(PHASES)
        for (phase, start), (_, end) in pairwise(marks):
            device[phase] += 1e3 * start.elapsed_time(end)
        for held in collectives:
            microseconds = 1e3 * held.start.elapsed_time(held.end)
            times.wait_us[held.axis] += microseconds
            times.blocked_us[held.phase] += microseconds
        times.device_us = device
        # the last mark is the next step's first
        self._free += [event for _, event in marks[:-1]] + [
            event for held in collectives for event in (held.start, held.end)
        ]

    def _event(self) -> Any:
        try:
            event = self._free.pop()
        except IndexError:  # asked, not looked: backward has a thread of its own
            event = self._make_event()
        event.record()
        return event

    # ---- collectives

    def begin(self, name: str, num_bytes: int) -> tuple[int, int | Any] | None:
        axis = self._axis_of.get(name)
        if axis is None:
            axis = self._axis_of[name] = AXES.index(AXIS_OF.get(name.partition("/")[0], "rest"))
        self._sent[axis] += num_bytes
        self._calls += 1
        self._last_collective = (name, num_bytes, time.monotonic())
        return self.resume(name)

    def resume(self, name: str) -> tuple[int, int | Any] | None:
        """As `begin`, where one that was begun before is waited for now."""
        axis = self._axis_of.get(name, AXES.index("rest"))
        if not self._on_gpu:
            self._inside += 1
            return axis, self._clock()
        # beside the compute stream nothing is held up
        if self._is_timed() and self._on_compute_stream():
            return axis, self._event()
        return None

    def end_collective(self, token: tuple[int, int | Any] | None) -> None:
        if token is None:
            return
        axis, began = token
        if self._on_gpu:
            self._collectives.append(_Held(axis, self._phase, began, self._event()))
            return
        microseconds = (self._clock() - began) / 1e3
        self._inside -= 1
        self._wait[axis] += microseconds
        self._blocked[self._phase] += microseconds

    def _is_timed(self) -> bool:
        return self._step % self._timed_every == 0

    def _on_compute_stream(self) -> bool:
        if self._device.type != "cuda":
            return True
        return bool(torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device))

    # ---- others

    def current(self) -> Current:
        """As another thread sees it."""
        name, num_bytes, since = self._last_collective
        return Current(
            step=self._step,
            since=self._monotonic,
            phase=PHASES[self._phase],
            collective=name,
            collective_bytes=num_bytes,
            collective_since=since,
            in_collective=self._inside > 0,
            calls=self._calls,
        )
