"""Pictures are well-formed, hold every value, and know light from dark."""

from __future__ import annotations

from xml.dom.minidom import parseString

from paceline.report.chart import STYLE, Point, legend, scatter, stacked_bars
from paceline.report.html import page, section, sentences, table_html
from paceline.report.table import table


def test_bars_add_up() -> None:
    picture, _, key = stacked_bars(
        ["a & b", "c"], [{"x": 1.0, "y": 3.0}, {"x": 2.0, "z": 0.0}], unit="ms", limit=8.0, title="t"
    ).partition("</svg>")
    svg = parseString(picture + "</svg></div>")
    widths = [float(bar.getAttribute("width")) for bar in svg.getElementsByTagName("rect")]
    assert len(widths) == 3  # nothing for what is 0 everywhere
    assert abs(widths[1] - 3 * widths[0]) < 0.2
    assert "z" not in key
    assert "4 ms" in picture and "a &amp; b" in picture


def test_points_lie_inside() -> None:
    points = [Point(x=x, y=x * x, label=f"<{x}>", series=x % 2) for x in range(1, 30)]
    for logarithmic in (False, True):
        picture = scatter(
            points, x_title="x", y_title="y", title="t", line=[(1, 1), (29, 841)], x_limit=31, logarithmic=logarithmic
        )
        svg = parseString(picture)
        circles = svg.getElementsByTagName("circle")
        assert len(circles) == 29
        assert all(70 <= float(one.getAttribute("cx")) <= 710 for one in circles)
        assert all(14 <= float(one.getAttribute("cy")) <= 354 for one in circles)
    assert scatter([], x_title="x", y_title="y", title="t") == ""


def test_a_page_needs_no_network() -> None:
    shown = table(("name", ">value"), [("<b>", "1")], notes=("a note",))
    text = page("T & t", [section("S", table_html(shown), sentences(["one", "two"]), legend(["x", "", "y"]))])
    assert "T &amp; t" in text and "&lt;b&gt;" in text and "a note" in text
    assert text.count("<i style") == 2
    assert "http" not in text
    assert "prefers-color-scheme:dark" in STYLE
