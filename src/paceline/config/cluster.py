"""The `[cluster]` section: the machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class ClusterConfig(Section):
    """The machines a run is meant for."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPUs that are there, else the CPU."""
    nodes: int = Field(0, ge=0)
    """Machines of the run; times `gpus_per_node` it must be the number of ranks. 0 = as many as the ranks need."""
    gpus_per_node: int = Field(8, ge=1)
    """Ranks of one machine: where tensor and context parallelism had better stay inside."""
    gpu: str = ""
    """Hardware name of the table in `costs/hardware.py`, for planning; empty = the devices that are there."""
    calibration: str = ""
    """A file of measured rates for `paceline plan`, made by `paceline plan calibrate`."""
    check_host_memory: bool = True
    """Refuse to start processes whose estimate is larger than the memory of their host; false warns only."""
    timeout_seconds: int = Field(1800, ge=1, le=10_000_000)
    """How long a collective may wait before the run is ended."""

    def num_nodes(self, world_size: int) -> int:
        """`nodes`, or how many machines the ranks fill where it is 0."""
        return self.nodes or -(-world_size // self.gpus_per_node)
