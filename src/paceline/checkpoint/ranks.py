"""How do the ranks of a save or load agree?

Writing happens in a background thread while the training step sends its own collectives, so checkpoints talk over a
process group of their own, on the CPU. One exchange is all they need; it also carries failures, since a rank that gives
up alone would leave the others waiting.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from paceline.errors import CheckpointError, PacelineError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that share a checkpoint. ``group`` is None for a single process without torch.distributed."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, timeout: timedelta = timedelta(hours=1)) -> Ranks:
        """All ranks of the default process group, or this process alone where there is none. Collective.

        ``timeout`` bounds how long the fastest rank waits for the slowest to have written its files.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), group=group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def exchange(self, doing: str, local: Callable[[], T], central: Callable[[list[T]], Sequence[R]]) -> R:
        """Runs ``local`` on every rank, ``central`` over all results on rank 0, and returns this rank's share of it.

        Args:
            doing: what is being done, for the error: ``"writing step_00000100"``.
            central: gets the results by rank and returns one value for each rank.

        Raises:
            CheckpointError: on every rank, if ``local`` failed anywhere or ``central`` failed; it names the ranks. A
                CheckpointError that ``local`` or ``central`` raised itself is passed on as it is.
        """
        mine: Any
        try:
            mine = local()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it and stop too
            mine = _Failure(error)
        gathered = self._gather(mine)
        answers: Sequence[Any] | None = None
        if gathered is not None:
            failures = {rank: found.error for rank, found in enumerate(gathered) if isinstance(found, _Failure)}
            if not failures:
                try:
                    answers = central(gathered)
                except Exception as error:  # noqa: BLE001 - as above
                    failures = {0: _Failure(error).error}
            if failures:
                answers = [_Failure(_as_checkpoint_error(doing, failures))] * self.world_size
        answer = self._scatter(answers)
        if isinstance(answer, _Failure):
            raise answer.error
        return cast(R, answer)

    def gather(self, doing: str, local: Callable[[], T]) -> list[T]:
        """Runs ``local`` on every rank and returns all results on every rank. Errors as in ``exchange``."""
        return self.exchange(doing, local, lambda found: [found] * self.world_size)

    def from_first(self, doing: str, function: Callable[[], T]) -> T:
        """Runs ``function`` on rank 0 and returns its result on every rank. Errors as in ``exchange``."""
        return self.exchange(doing, lambda: None, lambda _: [function()] * self.world_size)

    def _gather(self, mine: Any) -> list[Any] | None:
        if self.group is None:
            return [mine]
        gathered: list[Any] | None = [None] * self.world_size if self.is_first else None
        dist.gather_object(mine, gathered, dst=0, group=self.group)
        return gathered

    def _scatter(self, answers: Sequence[Any] | None) -> Any:
        if self.group is None:
            assert answers is not None
            return answers[0]
        answer: list[Any] = [None]
        dist.scatter_object_list(answer, None if answers is None else list(answers), src=0, group=self.group)
        return answer[0]


class _Failure:
    """What is sent in place of a result. Errors meant for the user are picklable; others may not be and go as text."""

    def __init__(self, error: Exception) -> None:
        self.error = error if isinstance(error, PacelineError) else _as_text(error)


def _as_text(error: Exception) -> CheckpointError:
    number = error.errno if isinstance(error, OSError) else None
    return CheckpointError(f"{type(error).__name__}: {error}", evidence=_HINTS.get(number, "") if number else "")


_FULL = "Free space on the disk or raise its quota, then run again; earlier checkpoints are untouched."
_FORBIDDEN = "Look at the permissions of the folder, then run again; earlier checkpoints are untouched."
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
}


def _as_checkpoint_error(doing: str, failures: dict[int, PacelineError]) -> PacelineError:
    first = next(iter(failures.values()))
    if first.next_step:
        return first
    shown = [f"rank {rank}: {error.subject}" for rank, error in failures.items()]
    more = f"; and {len(shown) - 4} more ranks" if len(shown) > 4 else ""
    return CheckpointError(
        f"{doing[:1].upper()}{doing[1:]} failed.",
        evidence="; ".join(shown[:4]) + more + ".",
        next_step=first.evidence
        or "No checkpoint that was there has changed: the same command goes on from the newest whole one, "
        "if there is one.",
    )
