"""A rank's record on disk: how is it written off the critical path, kept small, and read back after a crash?

``record/rank-00003.0000.csv`` in the run folder: a comment line with JSON facts, the names of the columns, then a
line of whole numbers for one step or a few. A file holds at most an eighth of the limit; then the next one begins,
and so it does at each start of the run. Beyond the limit, which counts bytes and not files, the oldest go, but for the
first (the run when it was young). Where a file filled up in less than an hour, the next one's lines cover twice as
many steps, so a rank never writes more than two files an hour for long.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.observe.telemetry.columns import COLUMNS, INDEX, SUMMED, UNKNOWN, VERSION

log = logging.getLogger(__name__)

FOLDER = "record"
FILES = 8
"""Full files that a rank's limit is divided into."""
MEBIBYTE = 2**20
_NAME = re.compile(r"rank-(\d+)\.(\d+)\.csv")
_MOST_WAITING = 20_000
"""Lines that may wait for a disk before new ones are dropped."""
_FLUSH_SECONDS = 0.5
_LINE_BYTES = 1024
"""No line is longer in practice; a file that has less room than this is full."""
_SUMMED = [name in SUMMED for name in COLUMNS]

Line = Sequence[int]


class RecordWriter:
    """Takes lines without waiting; one thread formats and writes them. A full disk ends the record, never the run.

    Nothing is on disk before the first line.

    Args:
        folder: the run folder.
        limit_mb: MiB of this rank on disk.
        facts: what the reader should know of this rank, as plain data.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        limit_mb: int,
        facts: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder / FOLDER
        self.rank = rank
        self._file_bytes = max(limit_mb * MEBIBYTE // FILES, 4096)
        self._facts = {"version": VERSION, "rank": rank, **facts}
        self._clock = clock
        self._queue: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-record", daemon=True)
        self._every = 1
        """Steps a line."""
        self._held: list[int] | None = None
        self._taken: deque[Line] = deque()
        """Lines that the file before had no room for."""
        self._ended = False
        self._thread.start()

    def put(self, line: Line) -> None:
        """A step's line, by `COLUMNS`."""
        if not self._ended and self.waiting < _MOST_WAITING:
            self._queue.put(line)

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return self._queue.qsize()

    def close(self) -> None:
        """Writes what is waiting; gives up after some seconds, where the disk does not answer."""
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end silently, nor end the run
            self._ended = True
            log.warning("the record of rank %d ends here: %s (the run goes on)", self.rank, error)

    def _write_all(self) -> None:
        open_ = True
        while open_ or self._taken:
            if not self._taken:
                open_ = self._take()
                if not self._taken and self._held is None:
                    return
            self.folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max((own for own, _ in files_of(self.folder, self.rank)), default=-1)
            self._make_room()
            path = self.folder / f"rank-{self.rank:05d}.{number:04d}.csv"
            began = self._clock()
            with path.open("ab", buffering=0) as file:
                open_ = self._fill(file.write, open_)
            if self._clock() - began < 3600:
                self._every *= 2

    def _fill(self, write: Callable[[bytes], int | None], open_: bool) -> bool:
        """Writes one file, first of lines that are taken already; whether more may come from the queue."""
        head = f"# {json.dumps(self._facts | {'steps_per_line': self._every})}\n{','.join(COLUMNS)}\n".encode()
        _whole(write, head)
        size = len(head)
        while True:
            data = self._next_lines(self._file_bytes - size, open_)
            if data:
                _whole(write, data)
                size += len(data)
            if self._taken or not open_ or self._file_bytes - size < _LINE_BYTES:
                return open_
            open_ = self._take()

    def _next_lines(self, room: int, open_: bool) -> bytes:
        """Of the lines that are taken, at least one and what there is room for; the held one too, if none follow."""
        data = b""
        while self._taken and (not data or room - len(data) >= _LINE_BYTES):
            data += self._format(self._taken.popleft())
        if not open_ and not self._taken and self._held is not None:
            data += _text(self._held)
            self._held = None
        return data

    def _take(self) -> bool:
        """The lines of about half a second, at least one; False where they are the last."""
        line = self._queue.get()
        deadline = time.monotonic() + _FLUSH_SECONDS
        while line is not None:
            self._taken.append(line)
            left = deadline - time.monotonic()
            if left <= 0 or len(self._taken) >= 500:
                return True
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                return True
        return False

    def _format(self, line: Line) -> bytes:
        """The line, or nothing where more steps are to be added to it. All ranks end lines at the same steps."""
        held = self._held
        merged = list(line) if held is None else _merge(held, line)
        if merged[0] % self._every:
            self._held = merged
            return b""
        self._held = None
        return _text(merged)

    def _make_room(self) -> None:
        """For one more file within the limit. The first file goes last, where it is larger than that by itself."""
        own = [path for _, path in files_of(self.folder, self.rank)]
        sizes = {path: path.stat().st_size for path in own}
        excess = sum(sizes.values()) - (FILES - 1) * self._file_bytes
        for path in (*own[1:], *own[:1]):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= sizes[path]


def _whole(write: Callable[[bytes], int | None], data: bytes) -> None:
    if write(data) != len(data):
        raise OSError("the disk is full")


def _merge(before: Sequence[int], line: Line) -> list[int]:
    return [
        (old + new if old >= 0 and new >= 0 else max(old, new)) if summed else new
        for old, new, summed in zip(before, line, _SUMMED, strict=True)
    ]


def _text(line: Sequence[int]) -> bytes:
    return (",".join(map(str, line)) + "\n").encode()


def files_of(folder: Path, rank: int) -> list[tuple[int, Path]]:
    """(number, path) of a rank's files, in order."""
    found = []
    for path in folder.glob(f"rank-{rank:05d}.*.csv"):
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((int(match[2]), path))
    return sorted(found)


def ranks_of(folder: Path) -> list[int]:
    """Ranks that have a record in this run folder."""
    names = (_NAME.fullmatch(path.name) for path in (folder / FOLDER).glob("rank-*.csv"))
    return sorted({int(match[1]) for match in names if match})


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank wrote.

    ``values``: int64 [lines, columns], by step; a step that was run again after a resume stands once, as last run.
    """

    rank: int
    facts: Mapping[str, Any]
    values: NDArray[np.int64]

    def column(self, name: str) -> NDArray[np.float64]:
        """[lines]; nan where unknown."""
        column = self.values[:, INDEX[name]].astype(np.float64)
        column[self.values[:, INDEX[name]] == UNKNOWN] = np.nan
        return column


def read_rank(folder: Path, rank: int, *, most_bytes: int = 1 << 62) -> RankRecord:
    """A rank's record; a last line that was being written is left out, and so is a damaged file.

    Args:
        folder: the run folder.
        most_bytes: of each file, its end is read.
    """
    facts: dict[str, Any] = {}
    parts = []
    for _, path in files_of(folder / FOLDER, rank):
        found, values = _read_file(path, most_bytes)
        facts = found or facts
        parts.append(values)
    joined = np.concatenate(parts) if parts else np.zeros((0, len(COLUMNS)), dtype=np.int64)
    if len(joined):
        # of lines with one step the last stands; np.unique gives the first, so it looks from behind
        _, last = np.unique(joined[::-1, 0], return_index=True)
        joined = joined[len(joined) - 1 - last]
    return RankRecord(rank=rank, facts=facts, values=joined)


def _read_file(path: Path, most_bytes: int) -> tuple[dict[str, Any], NDArray[np.int64]]:
    nothing = np.zeros((0, len(COLUMNS)), dtype=np.int64)
    with path.open("rb") as file:
        first, names = file.readline(1 << 20), file.readline(1 << 16)
        size, start = path.stat().st_size, file.tell()
        if size - start > most_bytes:
            file.seek(size - most_bytes)
            file.readline()
        body = file.read()
    facts: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        facts = json.loads(first.lstrip(b"# "))
    known = names.decode(errors="replace").strip().split(",")
    body = body[: body.rfind(b"\n") + 1]
    if not body or not isinstance(facts, dict) or "step" not in known:
        return facts if isinstance(facts, dict) else {}, nothing
    return facts, _by_name(_numbers(body, len(known)), known)


def _numbers(body: bytes, width: int) -> NDArray[np.int64]:
    try:
        flat = np.fromstring(body.replace(b"\n", b","), dtype=np.int64, sep=",")
        if flat.size % width == 0 and flat.size // width == body.count(b"\n"):
            return flat.reshape(-1, width)
    except ValueError:
        pass
    return np.array(list(_good_lines(body, width)), dtype=np.int64).reshape(-1, width)


def _good_lines(body: bytes, width: int) -> Iterator[list[int]]:
    """A disk error in the middle costs its line, not the file."""
    for line in body.split(b"\n"):
        cells = line.split(b",")
        if len(cells) == width:
            with contextlib.suppress(ValueError):
                yield [int(cell) for cell in cells]


def _by_name(values: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.int64]:
    """In the order of today's `COLUMNS`, whatever version wrote them."""
    if tuple(names) == COLUMNS:
        return values
    ordered = np.full((len(values), len(COLUMNS)), UNKNOWN, dtype=np.int64)
    for index, name in enumerate(names):
        if name in INDEX:
            ordered[:, INDEX[name]] = values[:, index]
    return ordered
