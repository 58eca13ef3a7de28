"""How long does each operator of the CPU take by itself, and when does any run, over a trace of any size?

An operator's own time is its duration without the operators it calls. Events of a thread need not come in order, so
they are kept until the end, as 20 bytes each; the file is never whole in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.explain.attribution import BACKWARD
from paceline.explain.timeline import Floats, union
from paceline.explain.trace_events import events_of

Spans = tuple[Floats, Floats]
"""Starts and ends."""

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
        np.add.at(microseconds, self._names, np.maximum(end - start - inside, 0.0))

    def numbers(self, names: int) -> np.ndarray:
        """Operators by name."""
        return np.bincount(self._names, minlength=names)

    def spans(self, names: Collection[int] | None = None) -> Spans:
        """What operators (of these names alone) cover, in seconds."""
        start, end = np.frombuffer(self._start), np.frombuffer(self._end)
        if names is not None:
            chosen = np.isin(self._names, list(names))
            start, end = start[chosen], end[chosen]
        order = np.argsort(start, kind="stable")
        return union(start[order] * 1e-6, end[order] * 1e-6)

    @property
    def _names(self) -> np.ndarray:
        return np.frombuffer(self._name, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class HostOperators:
    """Operators of the CPU, of all threads. Spans are in seconds on the trace's own clock, in order, and apart."""

    own: Mapping[str, float]
    """Seconds by name, the longest first. Operators of backward have the names of what they undo."""
    calls: Mapping[str, int]
    every: Spans
    """While any operator runs."""
    backward: Spans
    """While autograd evaluates one."""

    def __bool__(self) -> bool:
        return bool(self.own)


def host_operators(path: Path) -> HostOperators:
    """All that a trace says of operators of the CPU.

    Raises:
        ConfigError: the trace cannot be read.
    """
    threads: dict[Any, _Thread] = {}
    names: dict[str, int] = {}
    undone: set[int] = set()
    for event in events_of(path):
        if event.get("ph") != "X" or event.get("cat") != "cpu_op":
            continue
        text = str(event.get("name", ""))
        name = names.setdefault(text, len(names))
        if text.startswith(BACKWARD):
            undone.add(name)
        thread = event.get("pid"), event.get("tid")
        threads.setdefault(thread, _Thread()).take(event["ts"], event["ts"] + event["dur"], name)
    microseconds = np.zeros(len(names))
    for thread_of in threads.values():
        thread_of.add_own(microseconds)
    own: dict[str, float] = {}
    calls: dict[str, int] = {}
    numbers = np.sum([one.numbers(len(names)) for one in threads.values()], axis=0) if threads else np.zeros(0)
    for text, seconds, number in zip(names, (microseconds * 1e-6).tolist(), numbers.tolist(), strict=True):
        short = text.removeprefix(BACKWARD)
        own[short] = own.get(short, 0.0) + seconds
        calls[short] = calls.get(short, 0) + int(number)
    return HostOperators(
        own=dict(sorted(own.items(), key=lambda item: -item[1])),
        calls=calls,
        every=joined([one.spans() for one in threads.values()]),
        backward=joined([one.spans(undone) for one in threads.values()]) if undone else joined([]),
    )


def joined(parts: Sequence[Spans]) -> Spans:
    """The union of several: (start, end), in order."""
    start = np.concatenate([part[0] for part in parts] or [np.zeros(0)])
    end = np.concatenate([part[1] for part in parts] or [np.zeros(0)])
    order = np.argsort(start, kind="stable")
    return union(start[order], end[order])


def own_seconds(path: Path) -> Mapping[str, float]:
    """`HostOperators.own` alone.

    Raises:
        ConfigError: the trace cannot be read.
    """
    return host_operators(path).own
