"""The result as one page that opens without a network: findings, the trials as a picture, and all tables."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report import chart
from paceline.report.finding import Finding
from paceline.report.findings_page import findings_page
from paceline.report.html import section, table_html
from paceline.tuner.ladder import Result
from paceline.tuner.show import tables, tokens_per_second
from paceline.tuner.space import Space
from paceline.tuner.tune import told

_TAKEN, _OTHER = 0, 3
"""Colours of the chart."""


def page(result: Result, space: Space, found: Sequence[Finding], title: str) -> str:
    """One self-contained document."""
    drawn = [section("Speed and memory of each trial", _trials_picture(result, space))]
    return findings_page(title, found, drawn + [section(one.title, table_html(one)) for one in tables(result, space)])


def _trials_picture(result: Result, space: Space) -> str:
    """A point a trial that ran to its end; a line from the recipe as it is through what was taken, in their order."""
    taken = [*([result.base] if result.base is not None else []), *(rung.trial for rung in result.rungs)]
    numbers = {trial.number for trial in taken}
    points = {
        trial.number: chart.Point(
            x=trial.peak_bytes / 2**30,
            y=tokens_per_second(space, trial.even_seconds),
            label=f"trial {trial.number}: {told(trial)}",
            series=_TAKEN if trial.number in numbers else _OTHER,
        )
        for trial in result.trials
        if trial.is_good
    }
    line = [(points[trial.number].x, points[trial.number].y) for trial in taken if trial.number in points]
    svg = chart.scatter(
        list(points.values()),
        x_title="GiB on the fullest device",
        y_title="tokens/s a device",
        title="Speed and memory of each trial",
        line=line if len(line) > 1 else (),
    )
    return svg + chart.legend(["the recipe as it is, and what was taken", "", "", "not taken"])
