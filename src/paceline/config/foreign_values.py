"""What is a value of another system's file or command line, of the kind that its key takes?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from paceline.errors import ConfigError

Kind = Literal["text", "whole", "number", "truth", "names"]

NOTHING: tuple[Any, ...] = (None, False, "", "none", "None", "null", [], {})
"""Values by which a key asks for nothing."""


def is_nothing(value: Any) -> bool:
    """Whether a value asks for nothing. 0 does not count: a rate or a ratio of 0 says something."""
    return any(value is one or (type(value) is type(one) and value == one) for one in NOTHING)


def converted(name: str, value: Any, kind: Kind) -> Any:
    """A value as its kind; YAML reads 1e-4 as text, and on a command line everything is.

    Raises:
        ConfigError: it is none.
    """
    try:
        return _CONVERSIONS[kind](value)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise ConfigError(
            f"{name}: {shown(value)} is no {_KINDS[kind]}", next_step=f"Give {name} a {_KINDS[kind]}, or leave it out."
        ) from error


def _whole(value: Any) -> int:
    number = float(value)
    if isinstance(value, bool) or number != int(number):
        raise ValueError
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else _TRUTH[str(value).strip().lower()]


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(str(one).strip() for one in value)
    return tuple(part.strip() for part in str(value).split(",") if part.strip())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(value, list | dict):
        raise TypeError
    return str(value)


_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_CONVERSIONS: Mapping[Kind, Callable[[Any], Any]] = {
    "text": _text,
    "whole": _whole,
    "number": _number,
    "truth": _truth,
    "names": _names,
}
_KINDS: Mapping[Kind, str] = {
    "text": "text",
    "whole": "whole number",
    "number": "number",
    "truth": "true or false",
    "names": "list of names",
}


def shown(value: Any) -> str:
    """A value as it was written, and not too long."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else f"{text[:57]}..."
