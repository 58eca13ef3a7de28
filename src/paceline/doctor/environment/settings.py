"""Which variables are set on a machine that we do not sit at? A file of ``NAME=VALUE`` lines.

What `env`, `printenv`, `export -p`, a Dockerfile's ENV lines or a launch script's exports print is read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from paceline.errors import ConfigError
from paceline.report.finding import Finding

_LINE = re.compile(r"^(?:export\s+|declare\s+-x\s+|setenv\s+|ENV\s+|set\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_SHOWN = 5


def parse_settings(text: str, name: str) -> tuple[dict[str, str], list[Finding]]:
    """(variables, what was odd about the text). A name that is set twice has its last value, as in a shell.

    Raises:
        ConfigError: no line sets a variable.
    """
    found: dict[str, str] = {}
    twice: dict[str, tuple[str, str]] = {}
    unread: list[str] = []
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:
            unread.append(f"line {number}: {line[:60]}")
            continue
        value = _unquoted(match[2])
        if match[1] in found and found[match[1]] != value:
            twice[match[1]] = (found[match[1]], value)
        found[match[1]] = value
    if not found:
        raise ConfigError(
            f"{name} sets no variable",
            evidence=f"None of its {len(text.splitlines())} lines has the form NAME=VALUE.",
            next_step=f"On the machine that trains: env > {name if name.endswith('.txt') else 'env.txt'}",
        )
    return found, list(_odd(unread, twice, name))


def _odd(unread: list[str], twice: dict[str, tuple[str, str]], name: str) -> Iterator[Finding]:
    if unread:
        more = f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
        yield Finding(
            id="env.unread-lines",
            severity="note",
            subject=f"{len(unread)} lines of {name} are not of the form NAME=VALUE",
            evidence=f"{'; '.join(unread[:_SHOWN])}{more}. "
            "They are left out; a value of several lines ends at its first.",
            next_step="Nothing, if they belong to shell functions or long values.",
        )
    for variable, (before, after) in twice.items():
        yield Finding(
            id="env.set-twice",
            severity="warning",
            subject=f"{variable} is set twice in {name}: {before!r}, then {after!r}",
            evidence="The last one holds.",
            next_step="Keep one of them.",
        )


def _unquoted(value: str) -> str:
    text = value.strip().rstrip(";").strip()
    if not text.startswith(("'", '"', "$'")):
        return text
    try:
        words = shlex.split(text.removeprefix("$"))
    except ValueError:
        return text
    return words[0] if len(words) == 1 else text
