"""What was noticed, what it means, and what to do about it: the one voice of checks, doctor, planner and explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst first."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence with numbers.

    ``id`` is stable and made of ``room.what`` (``"config.zero-0"``), so that others can filter by it.
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


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, warnings, notes; in their order within each."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def findings_dict(findings: Iterable[Finding], **more: Any) -> dict[str, Any]:
    """What `--json` prints: ``{"findings": [{"id", "severity", "subject", "evidence", "next_step", "gain"}], ...}``."""
    return {"findings": [finding.as_dict() for finding in findings], **more}


def exit_code(findings: Iterable[Finding]) -> int:
    """1 with an error among them, 0 without. (2 is bad use, which is a ConfigError.)"""
    return int(any(finding.severity == "error" for finding in findings))


def tally(findings: Sequence[Finding]) -> str:
    """``"1 error, 2 warnings, 1 note."``, or ``"Nothing found."``."""
    counts = [(sum(one.severity == severity for one in findings), severity) for severity in SEVERITIES]
    words = [f"{count} {severity}{'s' * (count > 1)}" for count, severity in counts if count]
    return f"{', '.join(words)}." if words else "Nothing found."
