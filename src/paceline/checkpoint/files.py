"""How do bytes reach the disk so that a crash at any moment leaves something whole?

Every file is flushed to the device before it counts, its checksum is computed while it is written, and whatever becomes
visible does so by one atomic rename.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

_BUFFER_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a file must be: its size in bytes and the CRC-32 of its content (8 hexadecimal digits)."""

    size: int
    crc32: str


class ChecksumWriter(FileSystemWriter):
    """DCP's file writer, which also knows size and checksum of what it wrote: ``entries`` by file name."""

    def __init__(self, path: Path) -> None:
        # no copy-ahead: it would use the current GPU of the background thread, which is GPU 0 on every rank
        super().__init__(path, sync_files=True, per_thread_copy_ahead=0)
        self._checksums = _ChecksumFileSystem()
        self.fs = self._checksums

    @property
    def entries(self) -> dict[str, FileEntry]:
        return self._checksums.entries

    @property
    def failure(self) -> OSError | None:
        """The first error of the disk. torch.save stumbles over it later, with an error that says nothing of a disk."""
        return self._checksums.failure


class _ChecksumFileSystem(FileSystem):
    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if "w" not in mode:
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        stream = None
        try:
            with Path(path).open(mode, buffering=_BUFFER_BYTES) as raw:
                stream = _ChecksumStream(raw)
                yield stream
        finally:
            if stream is not None and self.failure is None:
                self.failure = stream.failure
        self.entries[Path(path).name] = FileEntry(size=stream.size, crc32=f"{stream.crc:08x}")

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _ChecksumStream(io.RawIOBase):
    """Counts and sums what passes through; the file below is closed by whoever opened it."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.size = 0
        self.crc = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            written = cast(int, self._raw.write(data))
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.crc = zlib.crc32(data, self.crc)
        self.size += written
        return written

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._raw.flush()
        return cast(int, self._raw.fileno())

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()


def write_file(path: Path, data: bytes) -> FileEntry:
    """Writes and flushes a small file. Not atomic by itself: for files inside a folder that is renamed at the end."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(size=len(data), crc32=f"{zlib.crc32(data):08x}")


def replace_file(path: Path, data: bytes) -> None:
    """Writes a small file that readers see either as it was or as it is now. For one writer at a time: a crash leaves
    the same temporary name for the next one."""
    temporary = temporary_name(path)
    write_file(temporary, data)
    temporary.replace(path)
    sync_folder(path.parent)


def temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def sync_folder(folder: Path) -> None:
    """Makes renames and new names inside ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_entry(path: Path) -> FileEntry:
    """Size and checksum of a file as it is on the disk now, read in parts."""
    crc = size = 0
    with path.open("rb") as stream:
        while part := stream.read(4 * _BUFFER_BYTES):
            crc = zlib.crc32(part, crc)
            size += len(part)
    return FileEntry(size=size, crc32=f"{crc:08x}")
