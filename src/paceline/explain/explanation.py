"""What `explain` has to say, whatever it looked at: tables, pictures, findings, and the same as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.report import chart
from paceline.report.finding import Finding, findings_dict
from paceline.report.findings_page import findings_page
from paceline.report.html import section, table_html
from paceline.report.table import Table


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A finished chart."""

    title: str
    svg: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One answer. ``data``: what `--json` prints beside the findings."""

    title: str
    tables: tuple[Table, ...]
    findings: tuple[Finding, ...]
    data: Mapping[str, Any]
    pictures: tuple[Picture, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return findings_dict(self.findings, title=self.title, **self.data)

    def page(self) -> str:
        """One self-contained document."""
        drawn = [section(picture.title, picture.svg) for picture in self.pictures]
        tables = [section(one.title or "Numbers", table_html(one)) for one in self.tables]
        return findings_page(self.title, self.findings, [*drawn, *tables])


def bars(title: str, names: Sequence[str], values: Sequence[Mapping[str, float]], *, unit: str = "ms") -> Picture:
    """Stacked bars of seconds, shown in milliseconds."""
    shown = [{part: 1e3 * max(value, 0.0) for part, value in row.items()} for row in values]
    return Picture(title=title, svg=chart.stacked_bars(names, shown, unit=unit, title=title))
