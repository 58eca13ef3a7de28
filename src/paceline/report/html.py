"""One self-contained page: no network, light and dark, readable on paper. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.report.chart import STYLE
from paceline.report.table import Column, Table

_PAGE_STYLE = (
    "body{margin:2rem auto;max-width:1100px;padding:0 1rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);"
    "background:var(--back);overflow-wrap:anywhere}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px}"
    "th,td{padding:3px 10px;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th.right,td.right{text-align:right;font-variant-numeric:tabular-nums}"
    "td.long{white-space:normal;min-width:32ch}"
    ".note,.legend{color:var(--dim);font-size:13px}li{margin:2px 0}"
)


_LONG = 48
"""Characters from which on a cell is broken into lines."""


def page(title: str, sections: Sequence[str], *, style: str = "") -> str:
    """A whole document of finished sections; `style` is CSS of their own."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{_PAGE_STYLE}{style}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{''.join(sections)}</main></body></html>\n"
    )


def section(title: str, *bodies: str) -> str:
    return f"<h2>{escape(title)}</h2>{''.join(bodies)}"


def table_html(shown: Table) -> str:
    """A table that scrolls sideways where the page is narrow. A column without a name has no header cell."""

    def head(column: Column) -> str:
        return f'<th scope="col" class="{column.align}">{escape(column.name)}</th>' if column.name else "<td></td>"

    def cell(text: str, column: Column) -> str:
        long = " long" if len(text) > _LONG else ""
        return f'<td class="{column.align}{long}">{escape(text)}</td>'

    names = [column.name for column in shown.columns if column.name]
    first = f"<tr>{''.join(map(head, shown.columns))}</tr>" if names else ""
    body = "".join(f"<tr>{''.join(map(cell, row, shown.columns))}</tr>" for row in shown.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in shown.notes)
    # a part that scrolls must be reachable by keyboard, and then wants a name
    name = escape(shown.title or f"Table of {', '.join(names)}")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table>{first}{body}</table></div>{notes}'
    )


def sentences(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""
