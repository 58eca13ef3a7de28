"""Which tensors of a model that is converted hold NaN or infinity?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box
from paceline.checkpoint.weights import WeightSource

_SHOWN = 5


class FiniteWatch:
    """A ``WeightSource`` in the types that are written, which remembers the tensors with numbers that are not finite.

    Many threads may read it.

    Args:
        dtypes: by name; a number that is too large for its type is not finite in it.
    """

    def __init__(self, source: WeightSource, dtypes: Mapping[str, torch.dtype]) -> None:
        self._source = source
        self._dtypes = dtypes
        self._found: set[str] = set()

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._source.shapes()

    def dtype(self, name: str) -> torch.dtype:
        return self._dtypes[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        value = self._source.read(name, box).to(self._dtypes[name])
        # NaN is the least and the greatest of what it is among
        if value.numel() and not all(torch.isfinite(end) for end in torch.aminmax(value)):
            self._found.add(name)
        return value

    def warnings(self) -> tuple[str, ...]:
        """One line, of all that was read; none where every number is finite."""
        names = sorted(self._found)
        if not names:
            return ()
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"{len(names)} tensor{'s hold' if len(names) > 1 else ' holds'} NaN or infinity as written: "
            f"{', '.join(names[:_SHOWN])}{more}. Such a model says nothing of use: look at the source, its "
            "adapter, and --dtype (fp16 ends at 65,504).",
        )
