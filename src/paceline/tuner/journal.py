"""What survives a call of `tune` that is cut off? One line a trial, appended the moment it ends.

DIR/tune.json      what was asked: the base recipe, ranks, steps of a trial, the device
DIR/trials.jsonl   the trials
DIR/running.json   the trial at work: a call that was killed leaves it, and the next one ends its processes
DIR/trials/003/    a trial's recipe, log and run folder
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.config.load import differences, validate
from paceline.config.run import RunConfig
from paceline.errors import PacelineError, RunFolderError
from paceline.observe.events import write_atomically
from paceline.observe.folder_lock import FolderLock
from paceline.tuner.trial import Trial, trial_of

_FORM = 1
"""Of the files."""
_NO_MATTER = ("run.name", "run.dir", "train.steps", "checkpoint.", "observe.", "data.", "cluster.timeout_seconds")
"""What no trial depends on: a folder's trials count for a recipe that differs in it."""


class Journal:
    """The folder of one tuning.

    Args:
        folder: made by `claim`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials: list[Trial] = []
        self.lost = 0
        """Lines that cannot be read: the disk was full, or the machine went down."""
        self.asked: dict[str, Any] = {}
        self._lines = folder / "trials.jsonl"
        self._head = folder / "tune.json"
        self._running = folder / "running.json"

    @contextmanager
    def claim(self, base: RunConfig, *, device: str, ranks: int, warm_up: int, steps: int) -> Iterator[Journal]:
        """Makes the folder, or takes it up again, for as long as the block lasts.

        A folder that is taken up keeps its own ``warm_up`` and ``steps``: trials of one folder are compared.

        Raises:
            RunFolderError: it cannot be written, is in use, or its trials are of another recipe or machine.
        """
        try:
            (self.folder / "trials").mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.folder / "lock.json")
            lock.acquire()
        except OSError as error:
            raise RunFolderError(
                f"the folder {self.folder} cannot be written",
                evidence=f"{error.strerror or error}.",
                next_step="Choose another one: --out DIR.",
            ) from error
        except RunFolderError as error:
            raise RunFolderError(
                f"another `paceline tune` is at work in {self.folder}",
                evidence=error.evidence,
                next_step="Wait for it or stop it, or choose another folder: --out DIR.",
            ) from error
        try:
            self._open(base, device=device, ranks=ranks, warm_up=warm_up, steps=steps)
            yield self
        finally:
            lock.release()

    @property
    def seconds(self) -> float:
        """Of all trials, in all calls."""
        return sum(trial.ended.seconds for trial in self.trials)

    def append(self, trial: Trial) -> None:
        """Writes a trial down for good.

        Raises:
            RunFolderError: it cannot be written.
        """
        line = json.dumps(trial.as_dict(), default=str) + "\n"
        try:
            with self._lines.open("ab+") as file:
                if file.tell() and not _ends_whole(self._lines):
                    line = "\n" + line  # what a crash cut off stays a line of its own
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunFolderError(
                f"{self._lines} cannot be written",
                evidence=f"{error.strerror or error}.",
                next_step="Make room on the disk, and give the same command again: it goes on after the last trial.",
            ) from error
        self.trials.append(trial)

    def trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:03d}"

    # ---- the trial at work

    def begin(self, process: Mapping[str, Any]) -> None:
        """``process``: what `processes.end_left_over` needs to find it again."""
        write_atomically(self._running, json.dumps(process))

    def end(self) -> None:
        self._running.unlink(missing_ok=True)

    @property
    def left_over(self) -> Mapping[str, Any] | None:
        """What a call that was killed had at work."""
        try:
            found: Mapping[str, Any] = json.loads(self._running.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    # ----

    def _open(self, base: RunConfig, *, device: str, ranks: int, warm_up: int, steps: int) -> None:
        asked = {
            "form": _FORM,
            "device": device,
            "ranks": ranks,
            "warm_up": warm_up,
            "steps": steps,
            "base": base.model_dump(mode="json"),
        }
        if not self._head.exists():
            if self._lines.exists():
                raise RunFolderError(
                    f"{self.folder} holds trials and no tune.json: what they are of is unknown",
                    next_step="Choose another folder: --out DIR, or remove this one.",
                )
            write_atomically(self._head, json.dumps(asked, indent=1) + "\n")
            self.asked = asked
            return
        self.asked = self._read_head()
        self._refuse_others(base, device=device, ranks=ranks)
        self._read_lines()

    def _read_head(self) -> dict[str, Any]:
        try:
            found = json.loads(self._head.read_text(encoding="utf-8"))
            validate(found["base"])
            if found["form"] != _FORM:
                raise ValueError(f"form {found['form']}")
            return dict(found)
        except (OSError, LookupError, TypeError, ValueError, PacelineError) as error:
            raise RunFolderError(
                f"{self._head} cannot be read",
                evidence=str(error).split("\n", 1)[0],
                next_step="Choose another folder: --out DIR, or remove this one.",
            ) from error

    def _refuse_others(self, base: RunConfig, *, device: str, ranks: int) -> None:
        before = validate(self.asked["base"])
        changed = {key: values for key, values in differences(before, base).items() if not key.startswith(_NO_MATTER)}
        if changed:
            shown = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, (old, new) in list(changed.items())[:6])
            raise RunFolderError(
                f"{self.folder} holds trials of another recipe",
                evidence=f"{shown}.",
                next_step="Choose another folder: --out DIR, or put these values back.",
            )
        for name, now in (("device", device), ("ranks", ranks)):
            if self.asked[name] != now:
                raise RunFolderError(
                    f"{self.folder} holds trials on other machines: {name} was {self.asked[name]}, and is {now}",
                    evidence="Their times do not compare.",
                    next_step="Choose another folder: --out DIR.",
                )

    def _read_lines(self) -> None:
        try:
            text = self._lines.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunFolderError(
                f"{self._lines} cannot be read",
                evidence=f"{error.strerror or error}.",
                next_step="Mend its permissions, or choose another folder: --out DIR.",
            ) from error
        for line in text.splitlines():
            if not line.strip():
                continue
            try:
                self.trials.append(trial_of(json.loads(line)))
            except (AttributeError, LookupError, TypeError, ValueError):
                self.lost += 1


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
