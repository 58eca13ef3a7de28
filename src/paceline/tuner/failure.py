"""Why did a trial fail? From its exit code and the end of its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Failure = Literal["memory", "refused", "timeout", "crash"]

_MEMORY = re.compile(
    r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|MemoryError\b"
    r"|NCCL WARN Cuda failure 2|Cuda failure 'out of memory'|ended by SIGKILL"
)
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*|^\w*[Ee]rror: .*")
_TAIL = 65536
_LONGEST = 300
_REFUSED, _KILLED = 2, (-9, 137)


@dataclass(frozen=True, kw_only=True)
class Reason:
    kind: Failure
    text: str
    """What the trial itself said, in a line."""


def reason_of(code: int | None, log: Path, *, seconds: float) -> Reason:
    """``code``: None where it was stopped for lasting too long."""
    text = _end_of(log)
    if code is None:
        return Reason(kind="timeout", text=f"stopped after {seconds:.0f} s without an end; last: {_last_line(text)}")
    if found := _MEMORY.search(text):
        start = text.rfind("\n", 0, found.start()) + 1
        return Reason(kind="memory", text=_short(text[start:].split("\n", 1)[0]))
    if code in _KILLED:
        return Reason(kind="memory", text="the system ended it with SIGKILL, most often for lack of host memory")
    if code == _REFUSED:
        return Reason(kind="refused", text=_said(text))
    return Reason(kind="crash", text=f"exit code {code}: {_said(text)}")


def _said(text: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if _ERROR.match(line.strip())]
    return _short(lines[-1]) if lines else _last_line(text)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else "it said nothing"


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
