"""How much memory does this host have for us? Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes."""

    total: int
    """Of the machine, or of the container where it may use less."""
    available: int
    """That could be taken now without swapping."""


def host_memory(cgroup: Path = _CGROUP) -> HostMemory:
    """What the kernel says (`/proc/meminfo`), within the limit of this container (cgroup v2 or v1), if it has one."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = _number(cgroup / limit_file)
        if limit is not None and limit < total:
            used = _number(cgroup / used_file) or 0
            total, available = limit, min(available, max(0, limit - used + _cached(cgroup / limit_file)))
    return HostMemory(total=total, available=available)


def _cached(beside: Path) -> int:
    """Bytes of files that the kernel counts as used and would give back."""
    fields = [line.split() for line in _text(beside.with_name("memory.stat")).splitlines()]
    found = {each[0]: int(each[1]) for each in fields if len(each) == 2 and each[1].isascii() and each[1].isdecimal()}
    # v1 counts what child groups hold in a line of its own
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit (``max``)."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
