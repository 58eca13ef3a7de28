"""One rank's trace, with what was computed from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.explain.attribution import MODULE
from paceline.explain.timeline import Breakdown, break_down, exposed_by_collective
from paceline.explain.trace_file import TraceData, read_trace

STEP = re.compile(r"ProfilerStep#\d+")
"""Names of spans that are profiled steps."""
LOADER = re.compile(r"DataLoader|^data$|dataloader|next_batch|get_batch", re.IGNORECASE)
"""Names of spans in which a program waits for data."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """A trace with what was computed from it."""

    label: str
    trace: TraceData
    breakdown: Breakdown

    @cached_property
    def steps(self) -> int:
        """Profiled steps, 0 where the program did not mark them."""
        return sum(len(spans) for name, spans in self.trace.spans.items() if STEP.fullmatch(name))

    @cached_property
    def window(self) -> tuple[float, float]:
        """Begin and end of what is judged: of the kernels, and of the marked steps where these take longer."""
        kernels = float(self.trace.start.min()), float(self.trace.end.max())
        marked = marked_steps(self.trace)
        if marked is None or marked[1] - marked[0] <= self.trace.seconds:
            return kernels
        return min(kernels[0], marked[0]), max(kernels[1], marked[1])

    @cached_property
    def updates(self) -> int:
        """Optimizer steps, 0 where they are not marked."""
        return sum(len(spans) for name, spans in self.trace.spans.items() if name.startswith("Optimizer.step#"))

    @cached_property
    def collectives(self) -> dict[str, tuple[float, float, int]]:
        return exposed_by_collective(self.trace)

    def share(self, seconds: float) -> float:
        return seconds / self.breakdown.total if self.breakdown.total else 0.0

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds that sum to the total: computation by kind, then what nothing covers."""
        one = self.breakdown
        computing = {name: seconds for name, seconds in one.by_kind.items() if name not in ("communication", "memory")}
        # kernels on several streams overlap: their own times are scaled to the time that is covered
        own = sum(computing.values())
        scale = one.computation / own if own else 0.0
        found = {name: seconds * scale for name, seconds in computing.items()}
        exposed = sum(alone for _, alone, _ in self.collectives.values())
        for kind, (_, alone, _) in self.collectives.items():
            found[f"exposed {kind}"] = alone * (one.exposed / exposed if exposed else 0.0)
        found["memory copies"] = one.memory
        waiting = min(one.idle_host, one.idle)
        return found | {"idle: the host was late": waiting, "idle: other": one.idle - waiting}


def marked_steps(trace: TraceData) -> tuple[float, float] | None:
    """Begin of the first profiled step and end of the last; None where none are marked.

    None also where the trace ends in the middle: its marks stand before kernels that are missing.
    """
    spans = [span for name, each in trace.spans.items() if STEP.fullmatch(name) for span in each]
    if not spans or trace.truncated:
        return None
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def load(path: Path) -> RankTrace:
    """Reads and breaks down one trace.

    Raises:
        ConfigError: it cannot be read.
    """
    trace = read_trace(path)
    label = f"rank {trace.rank}" if trace.rank is not None else path.name
    begin, end = marked_steps(trace) or (0.0, 0.0)
    # a trace without work of a GPU has no idle GPU
    breakdown = break_down(trace, end - begin if len(trace.start) else 0.0)
    return RankTrace(label=label, trace=trace, breakdown=breakdown)


def as_dict(one: RankTrace) -> dict[str, object]:
    made = one.breakdown
    return {
        "path": str(one.trace.path),
        "rank": one.trace.rank,
        "device": one.trace.device,
        "seconds": made.total,
        "computation": made.computation,
        "non_computation": made.non_computation,
        "communication": made.communication,
        "exposed_communication": made.exposed,
        "overlap": made.overlap,
        "memory": made.memory,
        "idle": made.idle,
        "idle_host_wait": made.idle_host,
        "idle_kernel_wait": made.idle_kernel,
        "idle_other": made.idle_other,
        "steps": one.steps,
        "parts": one.parts,
        "truncated": one.trace.truncated,
    }


def is_capture(trace: TraceData) -> bool:
    """Whether modules are named in it, as ours are."""
    return any(name.startswith(MODULE) for name in trace.spans)


def short(name: str) -> str:
    return name if len(name) <= 70 else f"{name[:69]}…"
