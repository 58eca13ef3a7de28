"""At which moments of a run may others look on?

Six, each with a small record of what is known then. A hook observes; it never changes the maths. Torch-free, so a
plugin can be written and tested on any machine.
"""

from __future__ import annotations

import difflib
import logging
import traceback
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import ConfigError, PacelineError
from paceline.observe.events import StepRecord

log = logging.getLogger(__name__)


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
    samples: tuple[tuple[str, str], ...] = ()
    """On rank 0, after an evaluation with samples: (prompt, what the model says)."""


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


MOMENTS = tuple(name for name in vars(Hook) if name.startswith("on_"))


class HookError(PacelineError):
    """A plugin's hook raised an exception; it is the cause of this error."""


class Hooks(Hook):
    """Several hooks as one, called in their order.

    Raises:
        ConfigError: a hook has a method ``on_...`` that is none of the moments; it would never be called.
        HookError: from a moment, where the hook of a plugin raises. Errors that are meant for the user, and those of
            the hooks of this package, pass as they are.
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = list(hooks)
        for hook in self.hooks:
            _refuse_unknown_moments(type(hook))

    def on_start(self, start: RunStart) -> None:
        for hook in self.hooks:
            with _Explained(hook, "on_start", start.start_step):
                hook.on_start(start)

    def on_step_start(self, start: StepStart) -> None:
        for hook in self.hooks:
            with _Explained(hook, "on_step_start", start.step):
                hook.on_step_start(start)

    def on_backward_end(self, end: BackwardEnd) -> None:
        for hook in self.hooks:
            with _Explained(hook, "on_backward_end", end.step):
                hook.on_backward_end(end)

    def on_step_end(self, end: StepEnd) -> None:
        for hook in self.hooks:
            with _Explained(hook, "on_step_end", end.step):
                hook.on_step_end(end)

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        for hook in self.hooks:
            with _Explained(hook, "on_checkpoint", saved.step):
                hook.on_checkpoint(saved)

    def on_end(self, end: RunEnd) -> None:
        # every hook gets to close its files even if one before it fails; the stack calls last-in first-out
        with ExitStack() as stack:
            for hook in reversed(self.hooks):
                stack.callback(_end, hook, end)


def _end(hook: Hook, end: RunEnd) -> None:
    try:
        with _Explained(hook, "on_end", end.step):
            hook.on_end(end)
    except HookError as error:
        # where an error has ended the run, that is the one to tell: a hook whose start failed may well fail here too
        if end.error is None:
            raise
        log.warning("%s: %s", error.subject, error.evidence)
    except Exception as error:
        if end.error is None:
            raise
        name = type(hook).__name__
        log.warning("%s failed at the end of the run: %s: %s", name, type(error).__name__, error)
        log.error("%s, on_end, step %d", name, end.step, exc_info=error, extra={"file_only": True})


def _refuse_unknown_moments(kind: type[Hook]) -> None:
    for name in dir(kind):
        if not name.startswith("on_") or name in MOMENTS or not callable(getattr(kind, name)):
            continue
        near = difflib.get_close_matches(name, MOMENTS, n=1, cutoff=0.0)
        raise ConfigError(
            f"the hook {kind.__name__} has a method {name}, which is no moment of a run",
            evidence=f"It would never be called. The moments: {', '.join(MOMENTS)}.",
            next_step=f"Did you mean {near[0]}? A method of your own needs a name that does not start with on_.",
        )


class _Explained:
    """Around one call of a hook: an exception of a plugin becomes a ``HookError``, its traceback goes to the log."""

    def __init__(self, hook: Hook, moment: str, step: int) -> None:
        self.hook, self.moment, self.step = hook, moment, step

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ctrl-C is no fault of the hook; in our own hooks an unforeseen exception is a fault of ours, to be seen whole
        if not isinstance(error, Exception) or isinstance(error, PacelineError) or _is_own(type(self.hook)):
            return
        name = type(self.hook).__name__
        log.error("hook %s, %s, step %d", name, self.moment, self.step, exc_info=error, extra={"file_only": True})
        raise HookError(
            f"the hook {name} failed in {self.moment} at step {self.step}",
            evidence=f"{type(error).__name__}: {error} ({_place(error, self.hook, self.moment)})",
            next_step="Mend the plugin, or leave it out of run.plugins: the same command goes on from the newest "
            "checkpoint, if there is one. The whole traceback is in the run folder's logs/.",
        ) from error


def _is_own(kind: type[Hook]) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _place(error: Exception, hook: Hook, moment: str) -> str:
    """``file:line`` of the innermost frame in the file that defines the hook, else of the innermost frame of all."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(getattr(type(hook), moment, None), "__code__", None)
    inside = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (inside or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
