"""How long does each operator of the CPU take by itself, over a trace of any size?

An operator's own time is its duration without the operators it calls. Events of a thread need not come in order, so
they are kept until the end, as 20 bytes each; the file is never whole in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.explain.attribution import BACKWARD
from paceline.explain.trace_file import events_of

_BLOCK = 1 << 16
"""Events that are plain Python numbers at a time."""


class _Thread:
    """Operators of one thread, in the order of the file."""

    def __init__(self) -> None:
        self._start, self._end, self._name = array("d"), array("d"), array("i")

    def take(self, start: float, end: float, name: int) -> None:
        self._start.append(start)
        self._end.append(end)
        self._name.append(name)

    def add_own(self, microseconds: np.ndarray) -> None:
        """Adds every operator's own time to its name's."""
        start, end = np.frombuffer(self._start), np.frombuffer(self._end)
        order = np.lexsort((-end, start))  # an operator comes before those that begin with it
        inside = np.zeros(len(order))
        stack: list[tuple[int, float]] = []
        for first in range(0, len(order), _BLOCK):
            block = order[first : first + _BLOCK]
            for index, begin, finish in zip(block.tolist(), start[block].tolist(), end[block].tolist(), strict=True):
                while stack and stack[-1][1] <= begin:
                    stack.pop()
                if stack:
                    inside[stack[-1][0]] += finish - begin
                stack.append((index, finish))
        names = np.frombuffer(self._name, dtype=np.int32)
        np.add.at(microseconds, names, np.maximum(end - start - inside, 0.0))


def own_seconds(path: Path) -> dict[str, float]:
    """By name of the operator, the longest first. Operators of backward have the names of what they undo.

    Raises:
        ConfigError: the trace cannot be read.
    """
    threads: dict[Any, _Thread] = {}
    names: dict[str, int] = {}
    for event in events_of(path):
        if event.get("ph") != "X" or event.get("cat") != "cpu_op":
            continue
        span = _span(event)
        if span is not None:
            name = names.setdefault(str(event.get("name", "")).removeprefix(BACKWARD), len(names))
            thread = event.get("pid"), event.get("tid")
            threads.setdefault(thread, _Thread()).take(*span, name)
    microseconds = np.zeros(len(names))
    for thread_of in threads.values():
        thread_of.add_own(microseconds)
    found = zip(names, (microseconds * 1e-6).tolist(), strict=True)
    return dict(sorted(found, key=lambda item: -item[1]))


def _span(event: Mapping[str, Any]) -> tuple[float, float] | None:
    """(start, end) in microseconds; None of an event without times. Some writers quote numbers."""
    try:
        start = float(event["ts"])
        return start, start + float(event.get("dur") or 0.0)
    except (KeyError, TypeError, ValueError):
        return None
