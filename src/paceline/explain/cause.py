"""A reason why a step is longer than it need be, with what it costs: what rules find, and what becomes a finding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.report import units
from paceline.report.finding import Finding, Severity

WARNING, NOTE = 0.08, 0.02
"""Shares of a step from which on a cause is a warning, and from which on it is worth a note."""
MOST = 0.9
"""Of a step, up to which a speed-up is told: beyond it what is left is smaller than what clocks differ by."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """``share``: of the step that would be gone without it, 0 ... 1; None where only a measurement would tell."""

    id: str
    subject: str
    evidence: str
    next_step: str
    share: float | None
    certain: bool = True
    """False: what was seen fits it, and something else could be behind it; then never more than a note."""
    severity: Severity | None = None
    """Set where it does not follow from the share."""
    gain: str = ""
    """In place of what follows from the share."""

    @property
    def speed_up(self) -> float:
        """Step before over step after."""
        share = min(max(self.share or 0.0, 0.0), 0.99)
        return 1.0 / (1.0 - share)

    def finding(self) -> Finding:
        return Finding(
            id=self.id,
            severity=self.severity or self._severity(),
            subject=self.subject,
            evidence=self.evidence,
            next_step=self.next_step,
            gain=self.gain or self._gain(),
        )

    def _severity(self) -> Severity:
        return "warning" if self.certain and (self.share or 0.0) >= WARNING else "note"

    def _gain(self) -> str | None:
        if self.share is None:
            return "not determined"
        share = min(max(self.share, 0.0), 1.0)
        if share > MOST:
            return f"{units.percent(share)} of the step at most"
        return f"{units.percent(share)} of the step, {self.speed_up:.2f}x tokens/s"


def ranked(causes: Iterable[Cause]) -> list[Cause]:
    """The dearest first; what has no price after what is worth a note, and the rest not at all."""
    found = [cause for cause in causes if cause.severity or cause.share is None or cause.share >= NOTE]
    order = {"error": 0, "warning": 1, "note": 2}

    def key(cause: Cause) -> tuple[int, float]:
        return order[cause.finding().severity], -(cause.share or 0.0)

    return sorted(found, key=key)
