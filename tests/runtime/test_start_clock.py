from __future__ import annotations

import os

import pytest

from paceline.runtime.launcher import LAUNCHER_PID
from paceline.runtime.start_clock import StartClock


def test_phases_add_up_to_the_whole() -> None:
    times = iter([103.0, 103.5, 110.0, 111.0])
    clock = StartClock(100.0, clock=lambda: next(times))
    assert clock.done("imports") == 3.0
    assert clock.done("data") == 0.5
    clock.done("first step")
    clock.done("data")
    assert clock.phases == {"imports": 3.0, "data": 1.5, "first step": 6.5}
    assert clock.total == pytest.approx(11.0)


def test_of_this_process() -> None:
    alone = StartClock.of_process({})
    assert list(alone.phases) == ["imports"] and alone.phases["imports"] >= -1.0
    launched = StartClock.of_process({LAUNCHER_PID: str(os.getppid())})
    assert list(launched.phases) == ["launcher", "imports"] and launched.phases["launcher"] >= 0
    gone = StartClock.of_process({LAUNCHER_PID: str(2**22 + 1)})
    assert gone.phases["launcher"] == 0.0
