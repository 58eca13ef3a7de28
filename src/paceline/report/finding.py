"""What was noticed, what it means, and what to do about it: the one voice of checks, doctor, planner and explain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence with numbers.

    ``id`` is stable and made of ``room/what`` (``"launch/one-process-many-gpus"``), so that others can filter by it.
    ``next_step`` is a ``--set section.key=value`` where it can be. ``gain`` says what following it is worth.
    """

    id: str
    severity: Severity
    subject: str
    evidence: str
    next_step: str
    gain: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
