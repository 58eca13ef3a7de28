"""Where do documents begin in rows that lie one behind the other? Kernels of attention want it like this.

Dims: B rows, T tokens of a row, N documents that there is room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOMS = (64, 128, 256)
"""For so many documents in a micro-batch: few sizes, so that compiled code sees few. A kernel pays for empty room: on
an H200, forward over 8192 tokens, 0.20, 0.22 and 0.31 ms (docs/measured/attention_documents.json)."""


def document_boundaries(documents_BT: Tensor) -> Tensor | None:
    """int32 [N + 1]: the first token of each document, counted through all rows, then B * T as often as there is room.

    None where there are more documents than the largest of `ROOMS`, or where a row does not number them upwards (a
    number that comes again would be another document).
    """
    before, after = documents_BT[:, :-1], documents_BT[:, 1:]
    if bool((after < before).any()):
        return None
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = after != before
    starts = first_BT.flatten().nonzero().flatten()
    room = next((room for room in ROOMS if len(starts) <= room), None)
    if room is None:
        return None
    boundaries = torch.full((room + 1,), documents_BT.numel(), dtype=torch.int32)
    boundaries[: len(starts)] = starts
    return boundaries
