"""What was found, on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from paceline.doctor.examination import Examination
from paceline.errors import ConfigError
from paceline.report.console import make_console, print_findings, print_table
from paceline.report.finding import exit_code, findings_dict, tally
from paceline.report.findings_page import findings_page


def show(examination: Examination, title: str, *, as_json: bool, html: str) -> int:
    """Prints and writes; the exit code is 1 with an error among the findings.

    Raises:
        ConfigError: the page cannot be written.
    """
    findings = examination.findings
    if html:
        try:
            Path(html).write_text(findings_page(title, findings, examination.sections), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--html {html} cannot be written", evidence=f"{error.strerror}.", next_step="Give another path."
            ) from error
    if as_json:
        typer.echo(json.dumps(findings_dict(findings, **examination.facts), indent=1))
        return exit_code(findings)
    console = make_console()
    for shown in examination.tables:
        print_table(console, shown)
        console.print()
    print_findings(console, findings)
    console.print(tally(findings) + (f" Written: {html}." if html else ""))
    return exit_code(findings)
