"""What every bench starts: one `paceline` (or a script of ours) with a recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start. ``estimate``: seconds from start to end on H200s."""

    part: str
    name: str
    recipe: str
    processes: int
    estimate: float
    kind: str = "bench"
    sets: tuple[str, ...] = ()
    title: str = ""
    warm_up: int = 4
    """Steps of `paceline bench` that are not measured."""
    steps: int = 10
    cut: str = ""
    """What one GPU is given of a model that wants more of them; "" = the whole model."""
    fits_shared: bool = True
    """Whether all its ranks fit one H200 together."""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"
