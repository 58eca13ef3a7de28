"""Triton's kernels on a CPU: their files, and Triton itself, imported anew for its interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import pytest


@contextmanager
def interpreted_modules(*names: str) -> Iterator[Sequence[ModuleType]]:
    """The files of `paceline.kernels` of these names, which import each other in this order, as they are interpreted.

    Triton too is imported anew: whether its own library (`tl.max` and the like) is interpreted is settled then.
    """
    pytest.importorskip("triton")
    package = importlib.import_module("paceline.kernels")
    full = [f"paceline.kernels.{name}" for name in names]
    before = {name: sys.modules.pop(name, None) for name in (*full, *_of_triton())}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            yield [importlib.import_module(name) for name in full]
    finally:
        # whoever imports them next gets the real ones
        for name in (*full, *_of_triton()):
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if module is not None})
        for short, name in zip(names, full, strict=True):
            if hasattr(package, short):
                delattr(package, short)
            if (module := before[name]) is not None:
                setattr(package, short, module)


def _of_triton() -> list[str]:
    """Its modules, those in Python."""
    names = [name for name in sys.modules if name.partition(".")[0] == "triton"]
    return [name for name in names if not name.startswith("triton._C")]
