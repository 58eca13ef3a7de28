"""A step that does not end: which rank is where, told before a collective times out.

A thread of each rank looks at the clock. Where the step has lasted far longer than usual it writes down what the
training thread is doing: phase, collective and its size, how many collectives it has begun, and its stack. `explain`
joins these of all ranks. A rank that does not even write is told by its silence.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import RunFolderError
from paceline.observe.events import write_atomically
from paceline.observe.phases import Current
from paceline.observe.telemetry.record import FOLDER

log = logging.getLogger(__name__)

TIMES = 10
"""How many usual steps a step must have lasted."""
_FIRST = 5
"""Times the limit for a start's first steps, which compile, and for evaluations and checkpoints, which may be long."""
_LEAST_POLL_SECONDS = 0.1
_LONG_PHASES = ("evaluation", "checkpoint")


class StallWatch:
    """Watches the steps of one rank from a thread of its own.

    Args:
        seconds: no step is a stall before.
        current: what the training thread is doing.
        facts: of this rank.
        thread_id: of the training thread.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        seconds: float,
        current: Callable[[], Current],
        facts: Mapping[str, Any],
        thread_id: int,
        poll_seconds: float = 1.0,
    ) -> None:
        self.path = _path(folder, rank)
        self._rank, self._seconds, self._current, self._facts = rank, seconds, current, dict(facts)
        self._thread_id = thread_id
        self._poll = max(_LEAST_POLL_SECONDS, min(poll_seconds, seconds / 4))
        self._recent: deque[float] = deque(maxlen=64)
        self._stop = threading.Event()
        self._told: tuple[int, float] = (0, 0.0)
        self._thread = threading.Thread(target=self._run, name="paceline-stall", daemon=True)
        self._thread.start()

    def step_took(self, seconds: float) -> None:
        self._recent.append(seconds)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def limit(self, phase: str) -> float:
        """Seconds from which on a step is a stall."""
        recent = list(self._recent)
        usual = median(recent) if recent else 0.0
        limit = max(self._seconds, TIMES * usual)
        return limit * _FIRST if len(recent) < 2 or phase in _LONG_PHASES else limit

    def _run(self) -> None:
        while not self._stop.wait(self._poll):
            now = self._current()
            lasted = time.monotonic() - now.since
            if not now.step or lasted < self.limit(now.phase):
                continue
            step, told = self._told
            # again when it has lasted twice as long: a rank may have come to another place meanwhile
            if step == now.step and lasted < 2 * told:
                continue
            self._told = now.step, lasted
            self._tell(now, lasted)

    def _tell(self, now: Current, lasted: float) -> None:
        where = f"in {now.collective}" if now.in_collective else f"in phase {now.phase}"
        log.warning(
            "step %d has lasted %.0f s on rank %d, %s (its stack is in %s; `paceline explain` joins all ranks')",
            now.step, lasted, self._rank, where, self.path.name,
        )  # fmt: skip
        seen = {
            "rank": self._rank,
            "step": now.step,
            "seconds": round(lasted, 1),
            "time": round(time.time(), 1),
            "phase": now.phase,
            "in_collective": now.in_collective,
            "collective": now.collective,
            "collective_bytes": now.collective_bytes,
            "collective_seconds": round(time.monotonic() - now.collective_since, 1) if now.collective else None,
            "calls": now.calls,
            "stack": list(_stack_of(self._thread_id)),
            **self._facts,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(seen))
        except (RunFolderError, OSError) as error:
            log.warning("the stack of rank %d cannot be written: %s", self._rank, error)


def _stack_of(thread_id: int) -> Iterator[str]:
    """``file:line function``, the innermost first."""
    frame = sys._current_frames().get(thread_id)
    for entry in reversed(traceback.extract_stack(frame)) if frame is not None else ():
        yield f"{entry.filename}:{entry.lineno} {entry.name}"


def _path(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"stall-rank-{rank:05d}.json"


def forget_stall(folder: Path, rank: int) -> None:
    """What the rank wrote in an earlier start: that one is over."""
    with contextlib.suppress(OSError):
        _path(folder, rank).unlink(missing_ok=True)


def read_stalls(folder: Path, *, since: float = 0.0) -> list[dict[str, Any]]:
    """What ranks wrote, by rank; damaged files are left out.

    Args:
        folder: the run folder.
        since: Unix time; what is older is left out, such as that of ranks which the newest start does not have.
    """
    found = []
    for path in sorted((folder / FOLDER).glob("stall-rank-*.json")):
        try:
            seen = json.loads(path.read_text(encoding="utf-8"))
            is_new = float(seen.get("time", since)) >= since
        except (OSError, ValueError, TypeError, AttributeError):
            continue
        if is_new and {"rank", "step", "stack"} <= seen.keys():
            found.append(seen)
    return found
