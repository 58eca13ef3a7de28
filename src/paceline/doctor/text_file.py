"""The text of a file that a person names, or of standard input; refused where it is no text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.errors import ConfigError

STDIN = "-"
_MOST_BYTES = 64 * 2**20


def read_text(path: str, option: str, how: str) -> str:
    """The whole text.

    Args:
        option: that named the file, for errors.
        how: the command that makes such a file.

    Raises:
        ConfigError: the file is missing, a folder, too large or not text.
    """
    with _open(path, option, how) as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{option} {path} is larger than {_MOST_BYTES >> 20} MiB", next_step=f"Make it so: {how}")
    return _decoded(raw, path, option, how)


def read_lines(path: str, option: str, how: str) -> Iterator[str]:
    """Line by line, for logs of any length; the same errors, the first of them before any line."""
    file = _open(path, option, how)
    start = file.read(4096)
    _decoded(start, path, option, how)
    return _lines(file, start)


def _lines(file: IO[bytes], start: bytes) -> Iterator[str]:
    with file:
        rest = start
        while True:
            *whole, rest = rest.split(b"\n")
            for line in whole:
                yield line.decode("utf-8", errors="replace")
            more = file.read(2**20)
            if not more:
                break
            rest += more
        if rest:
            yield rest.decode("utf-8", errors="replace")


def _open(path: str, option: str, how: str) -> IO[bytes]:
    if path == STDIN:
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be read", evidence=f"{error.strerror or error}.", next_step=f"Make it so: {how}"
        ) from error


def _decoded(raw: bytes, path: str, option: str, how: str) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        # what PowerShell writes with >
        return raw.decode("utf-16", errors="replace")
    if b"\x00" in raw:
        raise ConfigError(
            f"{option} {path} is a binary file",
            evidence=f"It holds zero bytes (the first at {raw.index(0):,}), which text does not.",
            next_step=f"Make it so: {how}",
        )
    return raw.decode("utf-8", errors="replace")
