from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline.errors import ConfigError
from paceline.report.console import make_console, print_error, print_findings
from paceline.report.finding import Finding

FINDING = Finding(
    id="costs/fit", severity="warning", subject="It does not fit.", evidence="150 GiB of 139 GiB.",
    next_step="--set parallel.recompute='full'", gain="fits",
)  # fmt: skip


def test_error() -> None:
    shown = io.StringIO()
    error = ConfigError(
        "optim.betas = [0.9, 2] are wrong " + "x" * 200, evidence="They are not below 1.", next_step="Try [0.9, 0.95]."
    )
    print_error(make_console(shown), error)
    assert shown.getvalue().splitlines() == [
        "ConfigError: optim.betas = [0.9, 2] are wrong " + "x" * 200,
        "  They are not below 1.",
        "  → Try [0.9, 0.95].",
    ]


def test_findings() -> None:
    shown = io.StringIO()
    print_findings(make_console(shown), [FINDING])
    assert shown.getvalue() == (
        "warning: It does not fit.\n  150 GiB of 139 GiB.\n  → --set parallel.recompute='full' (gain: fits)\n"
    )
    assert FINDING.as_dict()["severity"] == "warning" and FINDING.as_dict()["gain"] == "fits"


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        file = io.StringIO()
        print_findings(Console(file=file, force_terminal=True, highlight=False), [FINDING])
        return file.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;33m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "33m" not in shown()
