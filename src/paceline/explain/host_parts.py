"""Where did the time of a program on a CPU go, by its trace? Parts that sum to the time of its steps.

torch.profiler marks steps (``ProfilerStep#``), the data loader and the optimizer by itself; autograd's operators are
backward, all others are forward and what stands around it. A moment belongs to the first part that covers it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.explain.host_operators import HostOperators, Spans, host_operators, joined
from paceline.explain.rank_trace import LOADER, STEP, RankTrace
from paceline.explain.timeline import length

_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#")
DATA, UPDATE, BACKWARD, FORWARD, PYTHON = "data", "optimizer", "backward", "forward and others", "no operator"


@dataclass(frozen=True, kw_only=True)
class HostTrace:
    """A trace without work of a GPU."""

    one: RankTrace
    operators: HostOperators

    @cached_property
    def steps(self) -> int:
        """Marked ones; 0 where the program did not mark them."""
        return len(self._steps[0])

    @cached_property
    def window(self) -> Spans:
        """The marked steps; without marks, from the first operator to the last."""
        if self.steps:
            return joined([self._steps])
        every = self.operators.every
        return every[0][:1], every[1][-1:]

    @cached_property
    def _steps(self) -> Spans:
        """Of a trace that ends in the middle, those whose operators are all there."""
        starts, ends = self._spans(STEP)
        if self.one.trace.truncated and len(self.operators.every[1]):
            whole = ends <= self.operators.every[1][-1]
            return starts[whole], ends[whole]
        return starts, ends

    @cached_property
    def seconds(self) -> float:
        return length(self.window)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by part; they sum to `seconds`."""
        layers = {
            DATA: joined([self._spans(LOADER)]),
            UPDATE: joined([self._spans(_OPTIMIZER)]),
            BACKWARD: self.operators.backward,
            FORWARD: self.operators.every,
        }
        found: dict[str, float] = {}
        before, seen = joined([]), 0.0
        for name, spans in layers.items():
            before = joined([before, spans])
            # of two unions: what both cover is the sum of their lengths without that of their union
            inside = length(before) + self.seconds - length(joined([before, self.window]))
            found[name] = max(inside - seen, 0.0)
            seen = max(inside, seen)
        return found | {PYTHON: max(self.seconds - seen, 0.0)}

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    def own(self, pattern: str) -> float:
        """Seconds of operators whose names contain this, whatever their case."""
        return sum(seconds for name, seconds in self.operators.own.items() if re.search(pattern, name, re.IGNORECASE))

    def _spans(self, pattern: re.Pattern[str]) -> Spans:
        """Annotations whose names contain the pattern, on the trace's own clock."""
        began = self.one.trace.began
        found = [span for name, each in self.one.trace.spans.items() if pattern.search(name) for span in each]
        return np.array([a for a, _ in found]) + began, np.array([b for _, b in found]) + began


def host_trace(one: RankTrace) -> HostTrace:
    """Reads the operators of a trace that has been loaded.

    Raises:
        ConfigError: it cannot be read any more.
    """
    return HostTrace(one=one, operators=host_operators(one.trace.path))
