"""At which moments of a run may others look on?

Six, each with a small record of what is known then. A hook observes; it never changes the maths. Torch-free, so a
plugin can be written and tested on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.events import StepRecord


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """Models, data and optimizer are ready; no step has run. ``start_step`` is the number of steps already done."""

    run_name: str
    run_dir: Path
    start_step: int
    total_steps: int
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe as nested plain data."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a person wants to see at the start: parameters, layout, FLOPs a token, peak rate, versions."""


@dataclass(frozen=True, kw_only=True)
class StepStart:
    """Step ``step`` (counted from 1) begins: nothing of it has been read yet."""

    step: int


@dataclass(frozen=True, kw_only=True)
class BackwardEnd:
    """The last micro-batch of ``step`` has gone backward and gradients are reduced; the update has not happened."""

    step: int


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """Step ``step`` is done. ``record`` is there only on logged steps, ``evaluation`` only after an evaluation."""

    step: int
    record: StepRecord | None = None
    evaluation: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint of ``step`` is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The run is over: at its last step, after a stop request (``reason``), or with ``error``."""

    step: int
    reason: str = ""
    error: BaseException | None = None


class Hook:
    """Base of all hooks: override the moments that matter. An exception raised here ends the run."""

    def on_start(self, start: RunStart) -> None: ...

    def on_step_start(self, start: StepStart) -> None: ...

    def on_backward_end(self, end: BackwardEnd) -> None: ...

    def on_step_end(self, end: StepEnd) -> None: ...

    def on_checkpoint(self, saved: CheckpointSaved) -> None: ...

    def on_end(self, end: RunEnd) -> None: ...


class Hooks(Hook):
    """Several hooks as one, called in their order."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = list(hooks)

    def on_start(self, start: RunStart) -> None:
        for hook in self.hooks:
            hook.on_start(start)

    def on_step_start(self, start: StepStart) -> None:
        for hook in self.hooks:
            hook.on_step_start(start)

    def on_backward_end(self, end: BackwardEnd) -> None:
        for hook in self.hooks:
            hook.on_backward_end(end)

    def on_step_end(self, end: StepEnd) -> None:
        for hook in self.hooks:
            hook.on_step_end(end)

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        for hook in self.hooks:
            hook.on_checkpoint(saved)

    def on_end(self, end: RunEnd) -> None:
        # every hook gets to close its files even if one before it fails; the stack calls last-in first-out
        with ExitStack() as stack:
            for hook in reversed(self.hooks):
                stack.callback(hook.on_end, end)
