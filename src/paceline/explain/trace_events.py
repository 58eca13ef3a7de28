"""How are the events of a trace file got, one by one, and which of them are whole?

A file that is cut or damaged gives what stands before. Of a damaged gzip the last few KiB before the damage are lost.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from paceline.errors import ConfigError

_CHUNK = 1 << 22
_HEAD = 1 << 20
_PACKED = 1 << 14
"""Bytes of a gzip that are unpacked at a time: what a damaged byte takes with it."""


def events_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """The whole events of a trace one by one, for who wants more of them than `trace_file.read_trace` keeps.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with open_trace(path) as file:
            for event in Events(file, lambda done: None):
                if isinstance(event, dict) and (taken := whole_event(event)) is not None:
                    yield taken
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", evidence=str(error), next_step="Give a trace file.") from error


def whole_event(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The event with numbers for its times, which some writers quote; None where it is malformed.

    Events other than ``"X"`` are not looked at. A duration may be left out, and is 0 then.
    """
    if event.get("ph") != "X":
        return event
    start, length = finite(event.get("ts")), finite(event.get("dur", 0))
    if start is None or length is None or length < 0:
        return None
    if not isinstance(event.get("cat"), str | None) or not isinstance(event.get("args"), dict | None):
        return None
    if not all(isinstance(event.get(name), str | int | float | None) for name in ("pid", "tid")):
        return None
    if isinstance(event["ts"], int | float) and isinstance(event.get("dur"), int | float):
        return event
    return {**event, "ts": start, "dur": length}


def finite(value: Any) -> float | None:
    """A number or a quoted one; None of all else."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def number_of(value: Any, bits: int = 64) -> int:
    """A correlation or a stream as a signed integer of so many bits; -1 of all else."""
    number = finite(value) if isinstance(value, int | float) else None
    return int(value) if number is not None and abs(number) < 2.0 ** (bits - 1) else -1


def why_no_events(file: BinaryIO | _Gunzip, reader: Events) -> str:
    """Of a file that was read to its end and gave no event."""
    if isinstance(file, _Gunzip) and file.damaged:
        return "it is a damaged gzip file, and no event stands before the damage"
    if isinstance(file, _Gunzip) and file.cut:
        return "it is a gzip file that was cut short, and no event stands before the cut"
    if not reader.head.strip():
        return "it is empty"
    if reader.listed:
        return "it was cut short before the first event" if reader.truncated else "its list of events is empty"
    return "it has no traceEvents"


def open_trace(path: Path) -> BinaryIO | _Gunzip:
    """For reading, unzipped where it is zipped."""
    raw = path.open("rb")
    magic = raw.read(2)
    raw.seek(0)
    return _Gunzip(raw) if magic == b"\x1f\x8b" else raw


class _Gunzip:
    """Unzips as far as the file goes: what was read before a cut is given, where `gzip` would raise and keep it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._unzip = raw, zlib.decompressobj(31)
        self.damaged = False

    @property
    def cut(self) -> bool:
        """Whether the file ended, or was damaged, before its last member did."""
        return not self._unzip.eof

    def __enter__(self) -> _Gunzip:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raw.close()

    def read(self, size: int) -> bytes:
        """About so many bytes, none at the end."""
        found = bytearray()
        while len(found) < size:
            packed = self._unzip.unconsumed_tail or self._raw.read(_PACKED)
            if self._unzip.eof:
                # another member may follow
                packed = self._unzip.unused_data + packed
                self._unzip = zlib.decompressobj(31)
            if not packed:
                break
            if self.damaged:
                break
            try:
                found += self._unzip.decompress(packed, size - len(found))
            except zlib.error:
                self.damaged = True
                break
        return bytes(found)


class Events:
    """The objects of ``traceEvents``, or of a bare list, in order."""

    def __init__(self, file: BinaryIO | _Gunzip, report: Callable[[int], object]) -> None:
        self._file, self._report = file, report
        self.head = b""
        self.truncated = False
        self.listed = False
        """Whether a list of events was found, empty or not."""

    def __iter__(self) -> Iterator[Any]:
        decode = json.JSONDecoder(strict=False).raw_decode
        text, position = self._begin()
        if text is None:
            return
        self.listed = True
        done = 0
        while True:
            position = _skip(text, position)
            if position >= len(text):
                more = self._more()
                if not more:
                    self.truncated = True
                    return
                text, position = more, 0
                continue
            if text[position] == "]":
                return
            try:
                event, position = decode(text, position)
                # a number at the end of the buffer may go on; events are objects, which cannot
            except ValueError:
                more = self._more()
                if not more:
                    self.truncated = True
                    return
                text, position = text[position:] + more, 0
                if len(text) > 64 * _CHUNK:
                    # one event of more than 256 MB is no event
                    self.truncated = True
                    return
                continue
            yield event
            done += 1
            if position > _CHUNK:
                text, position = text[position:], 0

    def _begin(self) -> tuple[str | None, int]:
        text = ""
        while True:
            more = self._more()
            text += more
            self.head = self.head or text[:_HEAD].encode(errors="replace")
            stripped = text.lstrip("\ufeff \t\r\n")
            if stripped.startswith("["):
                return text, text.index("[") + 1
            key = text.find('"traceEvents"')
            if key >= 0 and (start := text.find("[", key)) >= 0:
                self.head = text[: max(key, 1)].encode(errors="replace")
                return text, start + 1
            if not more or (stripped and stripped[0] != "{") or len(text) > 64 * _CHUNK:
                return None, 0

    def _more(self) -> str:
        chunk = self._file.read(_CHUNK)
        self._report(len(chunk))
        # a character cut at the end of a chunk is in a name at most; events are cut by structure
        return chunk.decode("utf-8", errors="replace")


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    return position
