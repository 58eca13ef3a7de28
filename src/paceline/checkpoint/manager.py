"""When is a checkpoint written, how many are kept, and which one does a run go on from?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.locate import (
    Report,
    clean_unfinished,
    folder_name,
    newest_whole,
    problems_of,
    step_folders,
)
from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.store import Checkpoint, CheckpointWriter, Contents, load_into
from paceline.config.checkpoint import CheckpointConfig
from paceline.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Saved:
    step: int
    folder: Path


class CheckpointManager:
    """The checkpoints of one run, in ``folder`` (``<run folder>/checkpoints``).

    Every rank makes one and calls the same methods in the same order. ``report`` gets findings on rank 0.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, *, ranks: Ranks | None = None, report: Report | None = None
    ) -> None:
        self.folder = folder
        self.ranks = ranks or Ranks()
        self._config = config
        self._report = report
        self._writer = CheckpointWriter(self.ranks)
        self._pending: Saved | None = None
        self._last_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether ``step``, just done, is one of those that ``checkpoint.interval`` asks for."""
        return self._config.interval > 0 and step % self._config.interval == 0

    def prepare(self, values: Mapping[str, ShardedValue]) -> None:
        """Makes ready for the first save in the background of ``values``, if there is to be one. Collective."""
        if self._config.interval and self._config.async_save:
            self._writer.prepare(values)

    def save(self, contents: Contents, *, wait: bool = False) -> None:
        """Saves ``contents`` under its step; a second save of one step does nothing.

        Returns when the step may go on: with ``checkpoint.async_save`` when the state has been copied to the host, else
        (or with ``wait``) when the checkpoint is complete.

        Raises:
            CheckpointError: this save, or the one before it in the background, failed. Earlier checkpoints are whole.
        """
        step = contents.state.step
        if step == self._last_step:
            if wait:
                self.wait()
            return
        self.wait()
        folder = self.folder / folder_name(step)
        background = self._config.async_save and not wait
        self._writer.save(folder, contents, background=background, then=self._retain)
        self._last_step = step
        self._pending = Saved(step=step, folder=folder)

    def completed(self) -> Saved | None:
        """The save that was completed since the last call, if any. Never waits, never raises, sends nothing."""
        if self._pending is None or self._writer.is_writing:
            return None
        done, self._pending = self._pending, None
        # a save that failed is not there; its error comes with the next save, wait or close, on all ranks alike
        return done if done.folder.is_dir() else None

    def wait(self) -> None:
        """Waits for the save in the background and raises its error, if any, on every rank."""
        try:
            self._writer.wait()
        except CheckpointError:
            # it is not there, so a second attempt at the same step is no repetition
            self._last_step = None
            raise

    def close(self) -> None:
        """Waits as ``wait`` does and ends the background thread."""
        self._writer.close()

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, the same on every rank; damaged ones are reported and passed over.

        Also removes what interrupted saves left. None if there is none, or if ``checkpoint.resume`` is ``never``.

        Raises:
            CheckpointError: there are checkpoints, and none is whole: starting from scratch is not what was meant.
        """
        self.wait()
        self.ranks.from_first(f"looking into {self.folder}", lambda: clean_unfinished(self.folder, self._report))
        if self._config.resume == "never":
            return None
        found = newest_whole(self.folder, ranks=self.ranks, report=self._report)
        self._last_step = None if found is None else found.step
        return found

    def load(
        self,
        checkpoint: Checkpoint,
        into: Mapping[str, ShardedValue],
        *,
        weights_only: bool = False,
        ignore: Sequence[str] = (),
    ) -> None:
        """Fills ``into`` in place; with ``weights_only`` everything outside ``model/`` is left unread.

        Args:
            ignore: beginnings of names that may be left unread.

        Raises:
            CheckpointError: names or shapes differ (all are listed), or a file cannot be read.
        """
        unread = (*ignore, *(("optim/", "fp8/") if weights_only else ()))
        load_into(checkpoint, into, ranks=self.ranks, ignore=unread)

    def _retain(self) -> None:
        """Removes what need not be kept; runs on rank 0 after a save is complete."""
        for folder in to_remove(self.folder, keep=self._config.keep, keep_every=self._config.keep_every):
            # first it loses its name, so that a crash while deleting does not leave a damaged checkpoint behind
            doomed = folder.with_name(f"{folder.name}.tmp-0")
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def to_remove(folder: Path, *, keep: int, keep_every: int) -> list[Path]:
    """Checkpoints older than the ``keep`` newest whole ones, except steps divisible by ``keep_every``.

    Damaged ones do not count as kept: with ``keep = 1`` and a damaged newest, the whole one before it stays.
    """
    folders = step_folders(folder)
    whole = [step for step, path in folders if not problems_of(path)]
    if len(whole) < keep:
        return []
    oldest_kept = whole[-keep]
    return [path for step, path in folders if step < oldest_kept and not (keep_every and step % keep_every == 0)]
