"""Is Triton there? It does not come with a CPU build of torch, so files that need it are imported only where it is."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("triton") is not None
