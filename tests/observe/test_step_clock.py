"""Phases add up to the step, GPU times come late and without waiting, collectives are counted and timed by axis."""

from __future__ import annotations

import torch

from paceline.observe.phases import PHASES
from paceline.observe.step_clock import StepClock
from paceline.observe.telemetry.columns import AXES

CPU = torch.device("cpu")


class Time:
    """Nanoseconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def pass_(self, milliseconds: float) -> None:
        self.now += round(milliseconds * 1e6)


class Gpu:
    """A stream that works through what it is given later than the host says it."""

    def __init__(self) -> None:
        self.queued = 0.0
        self.reached = -1.0
        self.synchronizations = 0
        self.events = 0

    def event(self) -> Event:
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = self.gpu.queued

    def query(self) -> bool:
        return self.at <= self.gpu.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "asked for the time of an event that has not happened"
        return end.at - self.at

    def synchronize(self) -> None:
        self.gpu.synchronizations += 1


def test_the_phases_of_a_step_add_up_to_its_wall_time() -> None:
    time = Time()
    clock = StepClock(CPU, clock=time)
    clock.begin_step(1)
    for phase, milliseconds in (("data", 3), ("forward", 5), ("backward", 7), ("forward", 5), ("other", 1)):
        clock.mark(phase)
        time.pass_(milliseconds)
    done = clock.begin_step(2)
    assert done is not None and done.step == 1 and done.wall_ns == 21e6 == sum(done.host_ns)
    assert done.host_ns[PHASES.index("forward")] == 10e6
    assert clock.finished() == [done] and done.device_us is None
    assert clock.finished() == []


def test_gpu_times_are_read_when_they_have_happened_and_nothing_waits_for_them() -> None:
    time, gpu = Time(), Gpu()
    clock = StepClock(CPU, clock=time, make_event=gpu.event)
    for step in (1, 2, 3):
        clock.begin_step(step)
        clock.mark("forward")
        gpu.queued += 30
        clock.mark("backward")
        gpu.queued += 60
        clock.mark("other")
        time.pass_(1)
        assert clock.finished() == []  # the host is ahead of the GPU
    gpu.reached = 90
    (first,) = clock.finished()
    assert first.step == 1 and first.device_us is not None and sum(first.device_us) == 90e3
    assert first.device_us[PHASES.index("backward")] == 60e3
    gpu.reached = 1e9
    assert [times.step for times in clock.finished()] == [2]
    clock.end()
    assert clock.take_last() is not None and clock.take_last() is None
    (last,) = clock.finished(everything=True)
    assert last.step == 3 and last.device_us is not None and sum(last.device_us) == 90e3
    assert gpu.synchronizations == 0


def test_events_are_used_again() -> None:
    gpu = Gpu()
    clock = StepClock(CPU, make_event=gpu.event)
    for step in range(1, 101):
        clock.begin_step(step)
        clock.mark("forward")
        gpu.queued += 1
        gpu.reached = gpu.queued
        clock.finished()
    assert gpu.events < 10


def test_a_gpu_that_never_answers_leaves_its_times_unknown() -> None:
    clock = StepClock(CPU, make_event=Gpu().event)
    for step in range(1, 100):
        clock.begin_step(step)
    done = clock.finished()
    assert 0 < len(done) < 99 and all(times.device_us is None and not times.timed for times in done)


def test_collectives_are_counted_and_timed_by_axis() -> None:
    time = Time()
    clock = StepClock(CPU, clock=time)
    clock.begin_step(1)
    for name in ("tp/attention/all_reduce", "dp_cp/x", "world/sum", "stage/moe/load"):
        token = clock.begin(name, 1024)
        assert clock.current().in_collective and clock.current().collective == name
        time.pass_(2)
        clock.end_collective(token)
    token = clock.resume("tp/attention/all_reduce")
    time.pass_(3)
    clock.end_collective(token)
    done = clock.begin_step(2)
    assert done is not None and done.timed
    assert dict(zip(AXES, done.wait_us, strict=True)) == {
        "dp": 2e3, "tp": 5e3, "cp": 0, "ep": 0, "pp": 0, "rest": 4e3
    }  # fmt: skip
    assert dict(zip(AXES, done.sent_bytes, strict=True))["rest"] == 2048
    assert sum(done.blocked_us) == sum(done.wait_us) == done.blocked_us[PHASES.index("other")]
    assert not clock.current().in_collective and clock.current().calls == 4


def test_on_a_gpu_collectives_are_timed_in_some_steps_only() -> None:
    gpu = Gpu()
    clock = StepClock(CPU, make_event=gpu.event, timed_every=2)
    for step in (1, 2, 3):
        clock.begin_step(step)
        token = clock.begin("dp/x", 1)
        gpu.queued += 4
        clock.end_collective(token)
    gpu.reached = 1e9
    first, second = clock.finished()
    assert (first.timed, sum(first.wait_us)) == (False, 0) and (second.timed, sum(second.wait_us)) == (True, 4e3)
