"""The `[checkpoint]` section: what survives a restart."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config.base import Section, Several

Change = Literal["lr", "batch", "data"]


class CheckpointConfig(Section):
    """What survives a restart."""

    interval: int = Field(0, ge=0)
    """Save every so many steps; 0 = only at the end and when the run is stopped."""
    keep: int = Field(2, ge=1)
    """How many of the newest are kept."""
    keep_every: int = Field(0, ge=0)
    """Steps divisible by this are kept for good; 0 = none."""
    save_last: bool = True
    """Save at the end of the run."""
    async_save: bool = True
    """Write in the background; the step only waits for the copy to host memory."""
    export: str = ""
    """Also write the weights for other programs, into `exports/` of the run folder, from any layout: `hf` is a Hugging
    Face folder, in the precision of training. Empty = no."""
    export_interval: int = Field(0, ge=0)
    """Export every so many steps; 0 = at the end of the run only."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the newest whole checkpoint of the run folder, if there is one."""
    allow_change: Several[Change] = ()
    """What a resumed run may change on purpose: `lr` (the whole schedule), `batch`, `data`."""
