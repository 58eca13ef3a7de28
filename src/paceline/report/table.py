"""A table as plain data: made by rooms that know the numbers, shown by whoever knows the medium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table as RichTable
from rich.text import Text

Align = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    align: Align = "left"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of finished cells. Every row has one cell a column.

    ``notes`` stand below: the formula, peak or source behind the numbers.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells in a table of {len(self.columns)} columns: {row}"

    def to_text(self) -> str:
        """Plain text with aligned columns, two spaces apart; no colour, no frame."""
        widths = [
            max([len(column.name), *(len(row[index]) for row in self.rows)])
            for index, column in enumerate(self.columns)
        ]
        lines = [self.title] if self.title else []
        if any(column.name for column in self.columns):
            lines.append(self._line([column.name for column in self.columns], widths))
            lines.append("  ".join("-" * width for width in widths))
        lines += [self._line(row, widths) for row in self.rows]
        lines += self.notes
        return "\n".join(line.rstrip() for line in lines)

    def to_rich(self) -> RichTable:
        """For a terminal. Cells are taken literally: brackets in them are no markup."""
        table = RichTable(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=Text("\n".join(self.notes), style="dim") if self.notes else None,
            caption_justify="left",
            box=None,
            pad_edge=False,
            header_style="bold",
            show_header=any(column.name for column in self.columns),
        )
        for column in self.columns:
            table.add_column(Text(column.name), justify=column.align)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _line(self, cells: Sequence[str], widths: list[int]) -> str:
        padded = [
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        ]
        return "  ".join(padded)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", notes: Sequence[str] = ()
) -> Table:
    """Builds a table from column names; a name that starts with ``>`` is aligned to the right: ``">tokens/s"``."""
    made = tuple(Column(name=name.removeprefix(">"), align="right" if name[:1] == ">" else "left") for name in columns)
    return Table(columns=made, rows=tuple(tuple(row) for row in rows), title=title, notes=tuple(notes))
