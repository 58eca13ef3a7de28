from __future__ import annotations

import io

import pytest
from rich.console import Console

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
    print_table(Console(file=shown, force_terminal=True, width=80), TABLE)
    assert "tp 2 [x]" in shown.getvalue() and "peak: 989 TFLOP/s" in shown.getvalue()


def test_a_pipe_gets_plain_text_without_blanks_at_the_ends() -> None:
    shown = io.StringIO()
    print_table(make_console(shown), TABLE)
    assert shown.getvalue() == TABLE.to_text() + "\n"


def test_columns_without_names_have_no_heading() -> None:
    assert table(["", ""], [["a", "1"], ["bcd", "2"]]).to_text() == "a    1\nbcd  2"


def test_rows_fit_the_columns() -> None:
    with pytest.raises(AssertionError):
        table(["a", "b"], [["1"]])
