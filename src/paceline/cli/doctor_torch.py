"""What torch says of itself: versions of the libraries that it has loaded, and the card it sees."""

from __future__ import annotations

import torch

from paceline.runtime.device import versions


def what_torch_says() -> tuple[dict[str, str], tuple[int, int] | None]:
    """(versions by name, compute capability of the first GPU)."""
    return versions(), torch.cuda.get_device_capability(0) if torch.cuda.device_count() else None
