"""Tells a whole .zst file from one that was cut short: the decoder alone just ends early.

The layout is that of RFC 8878, section 3.1: frames one after the other, each a header, blocks (3 bytes that say how
long it is and whether it is the last) and perhaps a checksum.
"""

from __future__ import annotations

from typing import BinaryIO

_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)
_RUN_LENGTH_BLOCK = 1


class WholeFrames:
    """A source for a zstd decoder that raises EOFError where the file ends within a frame."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._part = "magic"
        """what comes next: magic, skippable, descriptor, block, or unknown (no zstd: the decoder says so)"""
        self._held = b""
        self._to_skip = 0
        self._checksum_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if data:
            self._follow(data)
        elif self._part != "unknown" and (self._part != "magic" or self._held or self._to_skip):
            raise EOFError("the file ends in the middle of a zstd frame")
        return data

    def _follow(self, data: bytes) -> None:
        position = 0
        while position < len(data) and self._part != "unknown":
            if self._to_skip:
                step = min(self._to_skip, len(data) - position)
                self._to_skip -= step
            else:
                step = min(_LENGTHS[self._part] - len(self._held), len(data) - position)
                self._held += data[position : position + step]
                if len(self._held) == _LENGTHS[self._part]:
                    held, self._held = int.from_bytes(self._held, "little"), b""
                    self._part, self._to_skip = self._next(held)
            position += step

    def _next(self, value: int) -> tuple[str, int]:
        """(what comes after this part, bytes to pass over before it)."""
        if self._part == "magic":
            known = {_MAGIC: "descriptor", _SKIPPABLE: "skippable"}
            return known.get(value if value == _MAGIC else value & ~0xF, "unknown"), 0
        if self._part == "skippable":
            return "magic", value
        if self._part == "descriptor":
            single_segment = value >> 5 & 1
            self._checksum_bytes = 4 * (value >> 2 & 1)
            content_size = _CONTENT_SIZE_BYTES[value >> 6] or single_segment
            return "block", (1 - single_segment) + _DICTIONARY_ID_BYTES[value & 3] + content_size
        is_last, kind, size = value & 1, value >> 1 & 3, value >> 3
        content = 1 if kind == _RUN_LENGTH_BLOCK else size
        return ("magic", content + self._checksum_bytes) if is_last else ("block", content)


_LENGTHS = {"magic": 4, "skippable": 4, "descriptor": 1, "block": 3}
