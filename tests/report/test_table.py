from __future__ import annotations

import io

import pytest

from paceline.report.console import make_console, print_table
from paceline.report.table import table

TABLE = table(
    ["layout", ">tokens/s"],
    [["tp 2 [x]", "9"], ["dp", "12345"]],
    title="Layouts",
    notes=["peak: 989 TFLOP/s"],
)


def test_text() -> None:
    assert TABLE.to_text().splitlines() == [
        "Layouts",
        "layout    tokens/s",
        "--------  --------",
        "tp 2 [x]         9",
        "dp           12345",
        "peak: 989 TFLOP/s",
    ]


def test_terminal_shows_cells_literally() -> None:
    shown = io.StringIO()
    print_table(make_console(shown), TABLE)
    assert "tp 2 [x]" in shown.getvalue() and "peak: 989 TFLOP/s" in shown.getvalue()


def test_rows_fit_the_columns() -> None:
    with pytest.raises(AssertionError):
        table(["a", "b"], [["1"]])
