"""Which parts does a step fall into, as those who run it announce them? Torch-free.

Whoever runs a part of a step says so as it begins: ``phases.mark("forward")``. What follows belongs to it until the
next mark. `NoPhases` listens to nobody; `observe/step_clock.py` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

PHASES = (
    "data",
    "sync",
    "forward",
    "backward",
    "pipeline",
    "reduce",
    "optimizer",
    "publish",
    "log",
    "evaluation",
    "checkpoint",
    "other",
)
"""In the order of a step. ``sync`` is where ranks meet without work of their own (the token count, the vote on a
stop), ``pipeline`` waiting for another stage, ``publish`` sending new weights out, ``log`` the reading of a logged
step."""


@dataclass(frozen=True, kw_only=True)
class Current:
    """What the training thread is doing: for who asks why nothing goes on."""

    step: int
    since: float
    """`time.monotonic` at the beginning of the step."""
    phase: str
    collective: str
    """The last one begun, ``""`` before the first."""
    collective_bytes: int
    collective_since: float
    in_collective: bool
    """On a CPU: whether it has not come back. On a GPU it comes back at once, and the GPU waits."""
    calls: int
    """Collectives begun so far."""


class Phases(Protocol):
    """Told what a step is doing."""

    def mark(self, phase: str) -> None:
        """From now on the step is in ``phase``, one of `PHASES`."""

    def end(self) -> None:
        """The last step is over: what follows belongs to none."""


class CollectiveTimer(Protocol):
    """Told of each named collective as it begins, and of each time the caller is held up by one."""

    def begin(self, name: str, num_bytes: int) -> Any:
        """A collective begins. Gives what ``end_collective`` wants back once the caller goes on."""

    def resume(self, name: str) -> Any:
        """One that was begun before is waited for now; as ``begin``."""

    def end_collective(self, token: Any) -> None: ...


class NoPhases:
    """Nobody listens."""

    def mark(self, phase: str) -> None: ...

    def end(self) -> None: ...


NO_PHASES = NoPhases()
