"""How do we speak to a person at a terminal?

rich does the colours, and leaves them out where the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text

from paceline.report.finding import Finding, Severity
from paceline.report.table import Table

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


class Explained(Protocol):
    """What an error for the user has to tell; ``errors.PacelineError`` does. (This room imports no other.)"""

    subject: str
    evidence: str
    next_step: str


def make_console(file: TextIO | None = None, *, stderr: bool = False, width: int | None = None) -> Console:
    """A console whose numbers are not coloured for being numbers. Without a terminal, lines are not cut at 80."""
    console = Console(file=file, stderr=stderr, width=width, highlight=False, soft_wrap=False)
    if width is None and not console.is_terminal:
        console.width = 200
    return console


def print_error(console: Console, error: Explained) -> None:
    """Name, subject, evidence and next step of an error that is meant for the user; no stack trace."""
    _print_entry(console, type(error).__name__, _STYLES["error"], error.subject, error.evidence, error.next_step)


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Findings in their order."""
    for finding in findings:
        next_step = finding.next_step + (f" (gain: {finding.gain})" if finding.gain else "")
        style = _STYLES[finding.severity]
        _print_entry(console, finding.severity, style, finding.subject, finding.evidence, next_step)


def print_table(console: Console, table: Table) -> None:
    """In a file or a pipe as plain text: rich would fill every line with blanks up to the table's width."""
    if console.is_terminal:
        console.print(table.to_rich())
    else:
        console.print(Text(table.to_text()), soft_wrap=True)


def _print_entry(console: Console, label: str, style: str, subject: str, evidence: str, next_step: str) -> None:
    # Text, not markup: values such as [0.9, 0.95] are part of the messages
    console.print(Text.assemble((f"{label}: ", style), subject), soft_wrap=True)
    if evidence:
        console.print(Text(f"  {evidence}"), soft_wrap=True)
    if next_step:
        console.print(Text.assemble(("  → ", style), next_step), soft_wrap=True)
