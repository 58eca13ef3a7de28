"""The `[cluster]` section: the machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section


class ClusterConfig(Section):
    """The machines a run is meant for."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPUs that are there, else the CPU."""
    nodes: int = Field(1, ge=1)
    gpus_per_node: int = Field(8, ge=1)
    gpu: str = ""
    """Hardware name of the table in `costs/hardware.py`, for planning; empty = the devices that are there."""
    calibration: str = ""
    """A file of measured rates that replaces the table's."""
    timeout_seconds: int = Field(1800, ge=1)
    """How long a collective may wait before the run is ended."""
