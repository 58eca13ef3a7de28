"""The page of findings can be read by anyone: offline, in both themes, with a screen reader."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

from paceline.report.chart import STYLE, stacked_bars
from paceline.report.finding import Finding, exit_code, findings_dict, tally, worst_first
from paceline.report.findings_page import FINDINGS_STYLE, findings_page
from paceline.report.html import section, table_html
from paceline.report.table import table

NOTE = Finding(id="doctor.a", severity="note", subject="<b> & 1 GB/s", evidence="e", next_step="", gain=None)
ERROR = Finding(id="doctor.b", severity="error", subject="s", evidence="", next_step="--set a.b=1", gain="2x")
WARNING = Finding(id="doctor.c", severity="warning", subject="w", evidence="", next_step="n")


class _Reader(HTMLParser):
    """Tags in order, with attributes, and what is left open."""

    VOID = frozenset({"meta", "br", "line", "rect", "circle", "polyline", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_json_schema() -> None:
    document = findings_dict([NOTE], versions={"torch": "2.13"})
    assert list(document) == ["findings", "versions"]
    assert list(document["findings"][0]) == ["id", "severity", "subject", "evidence", "next_step", "gain"]


def test_exit_codes_order_and_tally() -> None:
    assert (exit_code([]), exit_code([NOTE, WARNING]), exit_code([NOTE, ERROR])) == (0, 0, 1)
    assert worst_first([NOTE, WARNING, ERROR]) == [ERROR, WARNING, NOTE]
    assert tally([NOTE, NOTE, ERROR]) == "1 error, 2 notes." and tally([]) == "Nothing found."


def test_the_page_is_whole_and_accessible() -> None:
    text = findings_page(
        "Doctor",
        [ERROR, NOTE],
        [
            section("Links", table_html(table(("a", ">b"), [("1", "2")]))),
            section("Bars", stacked_bars(["x"], [{"y": 1.0}], unit="ms", title="Step time")),
        ],
    )
    reader = _Reader()
    reader.feed(text)
    assert reader.open == []
    tags = [tag for tag, _ in reader.tags]
    assert ("html", {"lang": "en"}) in reader.tags
    assert tags.count("main") == 1 and tags.count("h1") == 1 and tags.count("title") >= 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(attributes.get("scope") for tag, attributes in reader.tags if tag == "th")
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert attributes["role"] == "img" and attributes["aria-label"]
        if attributes.get("tabindex"):
            assert attributes["role"] == "region" and attributes["aria-label"]
    assert "&lt;b&gt; &amp; 1 GB/s" in text and "Expected gain: 2x" in text
    # no resource is fetched; the namespace of SVG is a name
    assert not re.search(r"(src|href)=|url\(|@import|<script|<link", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def _contrast(one: str, other: str) -> float:
    """WCAG 2.1, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_text_has_contrast_in_both_themes() -> None:
    themes = []
    for style in (STYLE, FINDINGS_STYLE):
        themes.append([dict(re.findall(r"--(\w+):(#\w{6})", half)) for half in style.split("@media")])
    for theme in (0, 1):
        colours = {**themes[0][theme], **themes[1][theme]}
        for name in ("ink", "dim", "error", "warning", "note"):
            assert _contrast(colours[name], colours["back"]) >= 4.5, (theme, name)
