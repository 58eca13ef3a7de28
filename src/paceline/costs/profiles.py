"""How does a framework spend time and memory where the arithmetic leaves it free? A few named numbers for each.

Every number has a physical meaning and a unit; `planner/fitting.py` fits those named in `FITTED` on published runs, and
docs/accuracy.md says on which rows, and how far off rows are that it did not see.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One framework, as a whole."""

    name: str
    title: str


PACELINE = Profile(name="paceline", title="Paceline")
MEGATRON = Profile(name="megatron", title="Megatron-LM")

PROFILES: tuple[Profile, ...] = (PACELINE, MEGATRON)


def find_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: there is none.
    """
    for profile in PROFILES:
        if profile.name == name:
            return profile
    raise ConfigError(
        f"there is no profile {name!r}",
        evidence=f"There are {', '.join(profile.name for profile in PROFILES)}.",
        next_step="Choose one of these.",
    )
