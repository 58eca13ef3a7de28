"""Files read through their compression, with damage reported by name."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import zstandard

from paceline.data.zstd_frames import WholeFrames
from paceline.errors import DataError


def open_decompressed(path: str | Path, compression: str) -> DecompressedFile:
    """``compression`` is ``.gz``, ``.zst`` or empty."""
    return DecompressedFile(path, compression)


class DecompressedFile:
    """The few methods that readers need of a file, each turning damage into a DataError."""

    def __init__(self, path: str | Path, compression: str) -> None:
        self._path = path
        self._compression = compression
        try:
            self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise self._damaged(error) from error
        self._stream: BinaryIO = self._file
        if compression == ".gz":
            self._stream = cast("BinaryIO", gzip.GzipFile(fileobj=self._file))
        elif compression == ".zst":
            # files written in parallel consist of several frames
            source = cast("BinaryIO", WholeFrames(self._file))  # the decoder only calls read
            reader = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
            self._stream = io.BufferedReader(reader, 1 << 20)

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size)
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def readline(self, size: int = -1) -> bytes:
        try:
            return self._stream.readline(size)
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def seek(self, offset: int) -> None:
        self._stream.seek(offset)

    def compressed_position(self) -> int:
        """Bytes of the file on disk read so far."""
        return self._file.tell()

    def __enter__(self) -> DecompressedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._file.close()

    def _damaged(self, error: Exception) -> DataError:
        what = "the compressed file is damaged or cut short" if self._compression else "cannot be read"
        return DataError(
            f"{self._path}: {what}",
            evidence=f"{type(error).__name__}: {error}",
            next_step="Download or copy it again; a part of its documents would be lost otherwise.",
        )


_DAMAGE = (OSError, EOFError, zstandard.ZstdError, zlib.error)
