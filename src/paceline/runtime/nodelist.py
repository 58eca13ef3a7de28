"""Which hosts does a Slurm node list name?"""

from __future__ import annotations

import re

from paceline.errors import LaunchError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand_nodelist(text: str) -> list[str]:
    """Host names of a Slurm host list, in its order.

    ``"gpu[01-03,07],login1"`` gives ``gpu01 gpu02 gpu03 gpu07 login1``; several brackets in one name multiply, and
    leading zeros are kept, as ``scontrol show hostnames`` does.

    Raises:
        LaunchError: brackets do not close, or a range is not one of numbers.
    """
    hosts: list[str] = []
    for pattern in _split_outside_brackets(text):
        hosts += _expand(pattern, text)
    if not hosts:
        raise _error(text, "it names no host")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _error(text, "its brackets do not match")
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth:
        raise _error(text, "its brackets do not match")
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def _expand(pattern: str, text: str) -> list[str]:
    match = _BRACKETS.search(pattern)
    if match is None:
        return [pattern]
    before, after = pattern[: match.start()], _expand(pattern[match.end() :], text)
    names: list[str] = []
    for item in match.group(1).split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise _error(text, f"{item.strip()!r} is not a number or a range of numbers")
        width = len(first)
        names += [f"{number:0{width}d}" for number in range(int(first), int(last or first) + 1)]
    return [before + name + rest for name in names for rest in after]


def _error(text: str, reason: str) -> LaunchError:
    return LaunchError(
        f"The Slurm node list {text!r} cannot be read: {reason}.",
        next_step="Export MASTER_ADDR (a host name of rank 0) in the batch script.",
    )
