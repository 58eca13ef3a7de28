"""Is another run at work in this folder?

The lock is a small file that names its owner. On the owner's host it counts as long as that very process lives (a
process id alone may have been given to another, so the start time is compared too). From other hosts the owner cannot
be seen: there the file's age decides, which the owner renews from a thread.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import RunFolderError

RENEW_SECONDS = 20.0
STALE_SECONDS = 90.0


class FolderLock:
    """One run at a time in a folder. Taken with ``acquire``, given back with ``release``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Takes the lock, also over from an owner that is dead.

        Raises:
            RunFolderError: another run holds it.
            OSError: the file cannot be written.
        """
        with self._exclusive() as file:
            owner = _parse(file.read())
            if owner and _is_alive(owner, self.path):
                raise RunFolderError(
                    f"Another run is writing to {self.path.parent}.",
                    evidence=f"Process {owner['pid']} on {owner['host']}, since {owner['since']}.",
                    next_step="Wait for it or stop it, or set another folder: --set run.dir=PATH. "
                    f"If that process was killed or its host is down, start again {STALE_SECONDS:.0f} seconds later: "
                    "the folder is free then.",
                )
            file.seek(0)
            file.truncate()
            file.write(json.dumps(_myself()))
            file.flush()
        self._stop.clear()
        self._thread = threading.Thread(target=self._renew, name="run-folder-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self.path.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            try:
                os.utime(self.path)
            except OSError:
                # the folder was removed or its file system is away for a moment: the writers will say so, with context
                continue

    @contextmanager
    def _exclusive(self) -> Iterator[Any]:
        """The open lock file, for reading and writing, while no other process does the same."""
        with self.path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                # some network file systems know no record locks; then two starts in the same millisecond can both win
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            file.seek(0)
            yield file


def _myself() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_started": psutil.Process().create_time(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _parse(text: str) -> dict[str, Any] | None:
    try:
        owner = json.loads(text)
    except json.JSONDecodeError:
        # empty (just created) or cut off by a crash: nobody's
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "process_started", "since"} <= owner.keys() else None


def _is_alive(owner: dict[str, Any], path: Path) -> bool:
    if owner["host"] != socket.gethostname():
        return time.time() - path.stat().st_mtime < STALE_SECONDS
    try:
        process = psutil.Process(owner["pid"])
        # a zombie has ended; its parent has not asked yet
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - owner["process_started"]) < 1.0
    except psutil.NoSuchProcess:
        return False
