"""When did the GPU compute, when did it talk, when both, and when neither?

Definitions of HolisticTraceAnalysis: over the time from the first kernel's start to the last one's end, or of the
profiled steps where they are marked and take longer,

    computation      union of the kernels that are neither communication nor memory
    idle             what no kernel, copy or fill covers
    non-computation  the rest: communication or memory alone
    overlap          computation within communication, over communication

and between two neighbours on one stream the gap is

    host wait        if the later one was launched only after the earlier had ended
    kernel wait      else, if it is shorter than 30 ns
    other            else: it waited for another stream
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.explain.kinds import COMMUNICATION, MEMORY_INDEX, NAMES
from paceline.explain.trace_file import TraceData

KERNEL_WAIT = 30e-9
"""Seconds; HolisticTraceAnalysis' default."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of one rank."""

    total: float
    computation: float
    non_computation: float
    idle: float
    communication: float
    """Union of communication, hidden or not."""
    exposed: float
    """Communication while nothing computes."""
    memory: float
    """Copies and fills while neither computes nor talks."""
    idle_host: float
    idle_kernel: float
    idle_other: float
    """Of all streams, gap by gap: they may sum to more than ``idle``."""
    by_kind: Mapping[str, float]
    """Sum of the kernels' own times."""

    @property
    def overlap(self) -> float:
        """Share of communication beside which something computes; 1 without communication."""
        return 1 - self.exposed / self.communication if self.communication else 1.0


def break_down(trace: TraceData, steps_seconds: float = 0.0) -> Breakdown:
    """Where the time of a trace went.

    Args:
        steps_seconds: of the profiled steps, 0 where none are marked. What they take beyond the time from the first
            kernel to the last is idle: the host had nothing launched. Where the GPU works on after the last mark, the
            kernels' own time is longer, and counts.
    """
    talks, moves = trace.kind == COMMUNICATION, trace.kind == MEMORY_INDEX
    computes = ~(talks | moves)

    def spans(which: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        return union(trace.start[which], trace.end[which])

    total = max(trace.seconds, steps_seconds)
    edges = total - trace.seconds
    everything = length(spans(np.ones_like(talks)))
    computation, communication = length(spans(computes)), length(spans(talks))
    both = length(spans(computes | talks))
    host, kernel, other = _gaps(trace)
    if np.isnan(trace.launched).all():
        other += edges
    else:
        host += edges
    return Breakdown(
        total=total,
        computation=computation,
        non_computation=max(everything - computation, 0.0),
        idle=max(total - everything, 0.0),
        communication=communication,
        # sums of floats: what is 0 may come out a little below
        exposed=min(max(both - computation, 0.0), communication),
        memory=max(everything - both, 0.0),
        idle_host=host,
        idle_kernel=kernel,
        idle_other=other,
        by_kind={
            name: float((trace.end - trace.start)[trace.kind == index].sum())
            for index, name in enumerate(NAMES)
            if (trace.kind == index).any()
        },
    )


def union(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """The parts of the line that intervals cover, in order. ``start`` must be sorted."""
    if not len(start):
        return start, end
    reached = np.maximum.accumulate(end)
    first = np.ones(len(start), dtype=bool)
    first[1:] = start[1:] > reached[:-1]
    last = np.append(first[1:], True)
    return start[first], reached[last]


def length(spans: tuple[Floats, Floats]) -> float:
    return float((spans[1] - spans[0]).sum())


def covered(spans: tuple[Floats, Floats], begin: float, end: float) -> float:
    """Length of a union within a window."""
    return float(np.maximum(np.minimum(spans[1], end) - np.maximum(spans[0], begin), 0.0).sum())


def _gaps(trace: TraceData) -> tuple[float, float, float]:
    host = kernel = other = 0.0
    for stream in np.unique(trace.stream):
        on = trace.stream == stream
        start, end, launched = trace.start[on], trace.end[on], trace.launched[on]
        if len(start) < 2:
            continue
        gap = start[1:] - end[:-1]
        late = launched[1:] > end[:-1]
        short = ~late & (gap < KERNEL_WAIT)
        host += float(gap[late].sum())
        kernel += float(np.maximum(gap[short], 0).sum())
        other += float(gap[~late & ~short].sum())
    return host, kernel, other


def exposed_by_collective(trace: TraceData) -> dict[str, tuple[float, float, int]]:
    """By kind of collective: (seconds, exposed seconds, number).

    Exposed time during which several run is the first one's.
    """
    from paceline.explain.kinds import collective_of

    talks = trace.kind == COMMUNICATION
    computes = union(*_pick(trace, ~(talks | (trace.kind == MEMORY_INDEX))))
    kinds = [collective_of(name) for name in trace.names]
    found: dict[str, tuple[float, float, int]] = {}
    reached = float("-inf")
    for start, end, name in zip(trace.start[talks], trace.end[talks], trace.name[talks], strict=True):
        begin = max(start, reached)
        alone = max(0.0, end - begin - _inside(computes, begin, end)) if end > begin else 0.0
        reached = max(reached, end)
        seconds, exposed, number = found.get(kinds[name], (0.0, 0.0, 0))
        found[kinds[name]] = (seconds + end - start, exposed + alone, number + 1)
    return found


def _pick(trace: TraceData, which: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    return trace.start[which], trace.end[which]


def _inside(spans: tuple[Floats, Floats], begin: float, end: float) -> float:
    """`covered` in logarithmic time, for spans in order."""
    first = int(np.searchsorted(spans[1], begin, side="right"))
    last = int(np.searchsorted(spans[0], end, side="left"))
    if first >= last:
        return 0.0
    return covered((spans[0][first:last], spans[1][first:last]), begin, end)
