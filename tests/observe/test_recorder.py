"""The recorder ends with the run, however that ends: whole steps are written, threads are gone, no error is hidden."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from paceline.errors import TrainingError
from paceline.observe.hooks import Hooks, RunEnd, RunStart, StepStart
from paceline.observe.recorder import Recorder
from paceline.observe.stall import read_stalls
from paceline.observe.step_clock import StepClock
from paceline.observe.telemetry.columns import MEMORY
from paceline.observe.telemetry.record import FOLDER, read_rank
from paceline.observe.telemetry.sampler import Sampler

CPU = torch.device("cpu")


class BrokenEvent:
    """Of a device that has failed."""

    def record(self) -> None: ...

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class HalfBrokenEvent(BrokenEvent):
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: BrokenEvent) -> float:
        raise RuntimeError("CUDA error: unspecified launch failure")


def start(folder: Path, clock: StepClock, **more: float) -> Recorder:
    memory = dict.fromkeys(MEMORY, 0)
    recorder = Recorder(clock, limit_mb=8, facts={}, memory=lambda: memory, sample_seconds=0.05, **more)  # type: ignore[arg-type]
    recorder.on_start(RunStart(run_name="r", run_dir=folder, start_step=0, total_steps=9))
    return recorder


def run_steps(recorder: Recorder, last: int) -> None:
    for step in range(1, last + 1):
        recorder.on_step_start(StepStart(step=step))
        recorder.clock.mark("forward")


def own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-")}


@pytest.mark.parametrize("kind", [BrokenEvent, HalfBrokenEvent])
def test_a_failed_device_leaves_times_unknown_and_hides_no_error(kind: type[BrokenEvent], tmp_path: Path) -> None:
    callbacks = len(gc.callbacks)
    recorder = start(tmp_path, StepClock(CPU, make_event=kind, timed_every=1), stall_seconds=60)
    assert own_threads() == {"paceline-record", "paceline-sampler", "paceline-stall"}
    run_steps(recorder, 4)
    Hooks([recorder]).on_end(RunEnd(step=3, error=TrainingError("what ended the run")))
    assert not own_threads() and len(gc.callbacks) == callbacks
    record = read_rank(tmp_path, 0)
    assert record.column("step").tolist() == [1, 2, 3]
    for name in ("device_forward_us", "wait_dp_us", "blocked_forward_us"):
        assert (record.column(name) != record.column(name)).all(), name
    assert (record.column("timed_steps") == 0).all() and (record.column("wall_us") >= 0).all()


def test_a_step_cut_off_by_an_error_is_no_step(tmp_path: Path) -> None:
    for error, steps in ((None, [1, 2, 3]), (KeyboardInterrupt(), [1, 2])):
        folder = tmp_path / str(error is None)
        recorder = start(folder, StepClock(CPU))
        run_steps(recorder, 3)
        recorder.on_end(RunEnd(step=3, error=error))
        assert read_rank(folder, 0).column("step").tolist() == steps


def test_a_start_forgets_the_stall_of_an_earlier_one_even_where_nobody_watches(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "stall-rank-00000.json").write_text('{"rank": 0, "step": 9, "stack": []}')
    assert len(read_stalls(tmp_path)) == 1
    for seconds in (0, 60):
        recorder = start(tmp_path, StepClock(CPU), stall_seconds=seconds)
        assert read_stalls(tmp_path) == []
        recorder.on_end(RunEnd(step=0))


def test_every_part_is_closed_even_if_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = Sampler.close

    def failing(sampler: Sampler) -> None:
        close(sampler)
        raise OSError("no more")

    monkeypatch.setattr(Sampler, "close", failing)
    for error in (None, TrainingError("what ended the run")):
        recorder = start(tmp_path / str(error is None), StepClock(CPU), stall_seconds=60)
        run_steps(recorder, 2)
        if error is None:
            with pytest.raises(OSError, match="no more"):
                Hooks([recorder]).on_end(RunEnd(step=2))
        else:
            Hooks([recorder]).on_end(RunEnd(step=2, error=error))
            assert "Recorder failed at the end of the run: OSError: no more" in caplog.text
        assert not own_threads()


def test_what_comes_after_the_last_step_is_no_part_of_it(tmp_path: Path) -> None:
    """Python collects once more when the loop is left; waits for the last checkpoint and export come after it too."""
    gc.disable()
    try:
        recorder = start(tmp_path, StepClock(CPU))
        run_steps(recorder, 2)
        gc.collect()
        recorder.on_step_start(StepStart(step=3))
        recorder.clock.mark("forward")
        recorder.clock.end()
        for _ in range(4):
            gc.collect()
        recorder.on_end(RunEnd(step=3))
    finally:
        gc.enable()
    record = read_rank(tmp_path, 0)
    assert record.column("step").tolist() == [1, 2, 3]
    assert record.column("gc_runs").tolist() == [0, 1, 0] and record.column("gc_us")[2] == 0
