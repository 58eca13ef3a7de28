"""What is known of one environment variable."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "override", "debug", "launcher", "renamed"]
"""system    describes the machine or a wish; may stay set
override  takes a choice from the library, made for experiments and workarounds
debug     prints, checks or waits; made for finding a fault
launcher  set by whoever starts the processes
renamed   has another name now, or none
"""

_ACCEPTED = {"": r".*", "01": r"[01]", "int": r"-?\d+", "count": r"[1-9]\d*", "true": r"(?i:0|1|true|false|on|off|y|n)"}


@dataclass(frozen=True, kw_only=True)
class Variable:
    name: str
    role: Role
    default: str
    """The value that changes nothing; empty where there is none."""
    accepted: str
    """A regular expression for the whole value."""
    meaning: str
    """One clause; of a renamed one the new name, or nothing."""
    source: str

    def accepts(self, value: str) -> bool:
        return re.fullmatch(self.accepted, value.strip()) is not None

    def is_default(self, value: str) -> bool:
        return self.default != "" and value.strip().lower() == self.default.lower()


def rows(role: Role, source: str, text: str) -> tuple[Variable, ...]:
    """Variables of a text with a line for each: ``NAME | default | accepted | meaning``."""
    found = []
    for line in text.strip().splitlines():
        name, default, accepted, meaning = (part.strip() for part in line.split(" | "))
        found.append(
            Variable(
                name=name,
                role=role,
                default="" if default == "-" else default,
                accepted=_ACCEPTED.get("" if accepted == "-" else accepted, accepted),
                meaning=meaning,
                source=source,
            )
        )
    return tuple(found)
