"""What `paceline --version` says: versions and devices."""

from __future__ import annotations

import torch

from paceline.runtime.device import GIB, versions


def version_lines() -> list[str]:
    """One line a component, then one a device."""
    lines = [f"{name:<9} {version}" for name, version in versions().items()]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        lines.append(f"gpu {index:<5} {properties.name}, {memory}, sm_{properties.major}{properties.minor}")
    if not torch.cuda.device_count():
        lines.append(f"device    CPU, {torch.get_num_threads()} threads (torch sees no GPU)")
    return lines
