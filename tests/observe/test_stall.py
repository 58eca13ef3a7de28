"""The watch speaks when a step lasts, once and then ever more rarely, and not of what may be long."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from paceline.observe.phases import Current
from paceline.observe.stall import TIMES, StallWatch, forget_stall, read_stalls


class Clock:
    def __init__(self) -> None:
        self.step, self.began, self.phase = 3, time.monotonic(), "backward"

    def current(self) -> Current:
        return Current(
            step=self.step, since=self.began, phase=self.phase, collective="dp/x", collective_bytes=8,
            collective_since=self.began, in_collective=True, calls=5,
        )  # fmt: skip


def watch(folder: Path, clock: Clock, *, seconds: float = 0.05, usual: float = 0.001) -> StallWatch:
    made = StallWatch(
        folder, 1, seconds=seconds, current=clock.current, facts={"host": "a"}, thread_id=threading.get_ident()
    )
    for _ in range(4):
        made.step_took(usual)
    return made


def test_a_step_that_lasts_is_written_down_with_its_stack(tmp_path: Path) -> None:
    clock = Clock()
    watching = watch(tmp_path, clock)
    until = time.monotonic() + 5
    while not read_stalls(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    watching.close()
    (seen,) = read_stalls(tmp_path)
    assert (seen["rank"], seen["step"], seen["collective"], seen["calls"]) == (1, 3, "dp/x", 5)
    assert any("test_a_step_that_lasts" in line for line in seen["stack"]) and seen["host"] == "a"


def test_steps_that_end_are_no_stall(tmp_path: Path) -> None:
    clock = Clock()
    watching = watch(tmp_path, clock, seconds=0.4)
    for step in range(4, 12):
        clock.step, clock.began = step, time.monotonic()
        time.sleep(0.05)
    watching.close()
    assert read_stalls(tmp_path) == []


def test_long_steps_first_steps_and_evaluations_have_more_time(tmp_path: Path) -> None:
    watching = watch(tmp_path, Clock(), seconds=100, usual=60)
    assert watching.limit("forward") == TIMES * 60 and watching.limit("evaluation") == 5 * TIMES * 60
    watching.close()
    fresh = StallWatch(tmp_path, 0, seconds=100, current=Clock().current, facts={}, thread_id=0)
    assert fresh.limit("forward") == 500
    fresh.close()


def test_a_stall_of_an_earlier_start_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "stall-rank-00001.json").write_text('{"rank": 1, "step": 9, "stack": []}')
    assert len(read_stalls(tmp_path)) == 1
    forget_stall(tmp_path, 1)
    assert read_stalls(tmp_path) == []


def test_a_stall_before_a_time_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    for rank, told in ((0, 100.0), (1, 300.0)):
        text = json.dumps({"rank": rank, "step": 9, "stack": [], "time": told})
        (tmp_path / "record" / f"stall-rank-{rank:05d}.json").write_text(text)
    for rank, damaged in ((2, '{"rank": 2, "step": 9, "stack": [], "time": []}'), (3, "[]"), (4, "{")):
        (tmp_path / "record" / f"stall-rank-{rank:05d}.json").write_text(damaged)
    assert [one["rank"] for one in read_stalls(tmp_path, since=200.0)] == [1] and len(read_stalls(tmp_path)) == 2


def test_a_tiny_limit_does_not_keep_a_core_busy(tmp_path: Path) -> None:
    clock = Clock()
    asked = []

    def current() -> Current:
        asked.append(1)
        return clock.current()

    watching = StallWatch(tmp_path, 0, seconds=1e-6, current=current, facts={}, thread_id=threading.get_ident())
    time.sleep(0.55)
    watching.close()
    assert 1 <= len(asked) <= 5
