from __future__ import annotations

import gc

from paceline.runtime.collection import GarbageCollection


def counted(interval: int, steps: int) -> list[int]:
    """Steps at which the collector ran."""
    ran: list[int] = []
    step = 0

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            ran.append(step)

    with GarbageCollection(interval) as collection:
        gc.callbacks.append(note)
        try:
            for step in range(1, steps + 1):
                circles = [[] for _ in range(2000)]
                for circle in circles:
                    circle.append(circle)
                collection.after_step(step)
        finally:
            gc.callbacks.remove(note)
    return ran


def test_collects_at_fixed_steps_only() -> None:
    """Case 17: the same steps on every rank, and none between."""
    assert counted(interval=5, steps=21) == [5, 10, 15, 20]
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_interval_0_leaves_it_to_python() -> None:
    assert len(counted(interval=0, steps=10)) > 10
    assert gc.isenabled()
