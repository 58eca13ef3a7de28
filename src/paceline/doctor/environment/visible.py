"""Which GPUs do programs see, in which order? CUDA_VISIBLE_DEVICES against the GPUs of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def visible_gpus(variables: Mapping[str, str], count: int, uuids: Sequence[str] = ()) -> list[int]:
    """Numbers of the driver, in the order in which programs count them.

    As CUDA reads it: numbers or the beginnings of UUIDs; reading stops at the first that is neither, and a GPU that is
    named twice hides all. MIG slices are not told apart: then all GPUs are given.

    Args:
        count: GPUs of the machine.
        uuids: theirs, where they are known.
    """
    everything = list(range(count))
    if "CUDA_VISIBLE_DEVICES" not in variables:
        return everything
    parts = [part.strip() for part in variables["CUDA_VISIBLE_DEVICES"].split(",")]
    if any(part.startswith("MIG") for part in parts):
        return everything
    found: list[int] = []
    for part in parts:
        number = _number(part, count, uuids)
        if number is None:
            break
        found.append(number)
    return found if len(set(found)) == len(found) else []


def _number(part: str, count: int, uuids: Sequence[str]) -> int | None:
    if part.isdecimal() and len(part) < 6:
        return int(part) if int(part) < count else None
    if part.startswith("GPU-"):
        named = [index for index, uuid in enumerate(uuids) if uuid.startswith(part)]
        return named[0] if len(named) == 1 else None
    return None
