"""How are numbers written for people? Always with their unit, in three or four significant digits."""

from __future__ import annotations

import math

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def count(value: float) -> str:
    """Parameters, tokens, documents: ``8.03B``, ``1.24M``, ``950``. B is 10^9."""
    for size, letter in _DECIMAL:
        # 999,999 would be rounded to "1000K"
        if abs(value) >= size * 0.9995:
            return f"{_three_digits(value / size)}{letter}"
    return f"{value:g}" if value == int(value) else _three_digits(value)


def number(value: int, what: str) -> str:
    """``1 GPU``, ``2 GPUs``, ``8 micro-batches``."""
    ending = "" if value == 1 else "es" if what.endswith(("ch", "s", "x")) else "s"
    return f"{value:,} {what}{ending}"


def size(num_bytes: float) -> str:
    """Memory and files in binary units: ``13.50 GiB``, ``512 B``."""
    for unit_bytes, unit in _BINARY:
        if abs(num_bytes) >= unit_bytes:
            return f"{num_bytes / unit_bytes:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def gib(num_bytes: float) -> str:
    """Always GiB, for columns that are compared: ``0.49 GiB``."""
    return f"{num_bytes / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """``850 µs``, ``12.3 ms``, ``4.20 s``, ``3 min 05 s``, ``2 h 07 min``, ``3 d 04 h``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 1e-3:
        # adding 0 makes a zero of a negative one
        return f"{round(seconds * 1e6) + 0.0:.0f} µs"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def rate(per_second: float, what: str) -> str:
    """``12.3K tokens/s``."""
    return f"{count(per_second)} {what}/s"


def tflops(value: float) -> str:
    """A rate of computation, given in TFLOP/s: ``420 TFLOP/s``, ``0.0312 TFLOP/s``."""
    return f"{value:.3g} TFLOP/s" if abs(value) < 999.5 else f"{value:.0f} TFLOP/s"


def percent(fraction: float, digits: int = 1) -> str:
    """0.425 is ``42.5 %``."""
    return f"{round(fraction * 100, digits) + 0.0:.{digits}f} %"


def apart(seconds: float) -> str:
    """A difference with its sign: ``+1.25 ms``."""
    return f"{round(seconds * 1e3, 2) + 0.0:+.2f} ms"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
