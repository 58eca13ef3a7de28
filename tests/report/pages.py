"""Can anyone read a page: offline, in both themes, on a telephone, with a screen reader or by keyboard alone?"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

VOID = frozenset({"meta", "br", "line", "rect", "circle", "polyline", "path"})
"""Tags that hold nothing."""
READABLE = 10.0
"""Pixels of the smallest letters of a picture, as small as it gets."""


class Reader(HTMLParser):
    """Tags in order, with attributes and text, and what is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, list[str]]] = []
        self._inside: list[list[str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.append((tag, []))
            self._inside.append(self.texts[-1][1])

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        for words in self._inside:
            words.append(data)


def assert_readable(text: str) -> None:
    """A whole page: well-formed, named, in order, with nothing that is fetched."""
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    tags = [tag for tag, _ in reader.tags]
    assert ("html", {"lang": "en"}) in reader.tags
    assert tags.count("main") == 1 and tags.count("h1") == 1 and tags.count("title") >= 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert all(attributes.get("scope") for tag, attributes in reader.tags if tag == "th")
    assert all(
        "".join(words).strip() for tag, words in reader.texts if tag in ("th", "h1", "h2", "h3", "title", "summary")
    )
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert_picture(attributes)
        if attributes.get("tabindex"):
            assert attributes["role"] == "region" and attributes["aria-label"]
    assert tags.count("svg") + tags.count("table") == sum("tabindex" in attributes for _, attributes in reader.tags)
    assert "prefers-color-scheme:dark" in text and 'name="viewport"' in text
    # no resource is fetched; the namespace of SVG is a name
    assert not re.search(r"(src|href)=|url\(|@import|<script|<link", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def assert_picture(attributes: dict[str, str | None]) -> None:
    """It has a name, and letters of 12 units stay readable where the page is narrow."""
    assert attributes["role"] == "img" and attributes["aria-label"]
    width = float(str(attributes["viewbox"]).split()[2])
    least = re.search(r"min-width:(\d+)px", str(attributes["style"]))
    assert least is not None and 12 * float(least[1]) / width >= READABLE


def contrast(one: str, other: str) -> float:
    """Of two colours, ``#rrggbb``. WCAG 2.1, relative luminance."""

    def luminance(colour: str) -> float:
        parts = [part / 255 for part in parts_of(colour)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def blended(above: str, below: str, opacity: float) -> str:
    """What is seen of a colour that lets another one through."""
    mixed = (opacity * a + (1 - opacity) * b for a, b in zip(parts_of(above), parts_of(below), strict=True))
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def parts_of(colour: str) -> list[int]:
    return [int(colour[index : index + 2], 16) for index in (1, 3, 5)]


def themes(*styles: str) -> tuple[dict[str, str], dict[str, str]]:
    """The colours by name, light and dark."""
    halves = [[dict(re.findall(r"--(\w+):(#\w{6})", half)) for half in style.split("@media")] for style in styles]
    light, dark = ({name: colour for half in halves for name, colour in half[theme].items()} for theme in (0, 1))
    return light, dark
