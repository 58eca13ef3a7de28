"""One self-contained page: no network, light and dark, readable on paper. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.report.chart import STYLE
from paceline.report.table import Table

_PAGE_STYLE = (
    "body{margin:2rem auto;max-width:1100px;padding:0 1rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);"
    "background:var(--back)}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px}"
    "th,td{padding:3px 10px;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}"
    "th.right,td.right{text-align:right;font-variant-numeric:tabular-nums}"
    ".note,.legend{color:var(--dim);font-size:13px}li{margin:2px 0}"
)


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
    def cells(tag: str, texts: Sequence[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return "".join(
            f'<{tag}{scope} class="{column.align}">{escape(text)}</{tag}>'
            for text, column in zip(texts, shown.columns, strict=True)
        )

    head = f"<tr>{cells('th', [column.name for column in shown.columns])}</tr>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in shown.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in shown.notes)
    # a part that scrolls must be reachable by keyboard, and then wants a name
    name = escape(shown.title or f"Table of {', '.join(column.name for column in shown.columns if column.name)}")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}"><table>{head}{body}</table></div>{notes}'
    )


def sentences(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""
