"""What torch says of itself: versions of the libraries that it has loaded, and the cards it sees."""

from __future__ import annotations

import torch

from paceline.runtime.device import versions


def what_torch_says() -> tuple[dict[str, str], tuple[int, int] | None, tuple[tuple[str, int], ...]]:
    """(versions by name, compute capability of the first GPU, name and bytes of each GPU)."""
    seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    capability = (seen[0].major, seen[0].minor) if seen else None
    return versions(), capability, tuple((card.name, card.total_memory) for card in seen)
