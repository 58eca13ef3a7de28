"""The page of findings can be read by anyone: offline, in both themes, with a screen reader."""

from __future__ import annotations

from paceline.report.chart import STYLE, stacked_bars
from paceline.report.finding import Finding, exit_code, findings_dict, tally, worst_first
from paceline.report.findings_page import FINDINGS_STYLE, findings_page
from paceline.report.html import page, section, table_html
from paceline.report.table import table
from tests.report.pages import assert_readable, blended, contrast, themes

NOTE = Finding(id="doctor.a", severity="note", subject="<b> & 1 GB/s", evidence="e", next_step="", gain=None)
ERROR = Finding(id="doctor.b", severity="error", subject="s", evidence="", next_step="--set a.b=1", gain="2x")
WARNING = Finding(id="doctor.c", severity="warning", subject="w", evidence="", next_step="n")


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
    assert_readable(text)
    assert "&lt;b&gt; &amp; 1 GB/s" in text and "Expected gain: 2x" in text


def test_columns_without_a_name_have_no_header_and_long_cells_are_broken() -> None:
    named = table_html(table(("", "how", ""), [("a", "b", "c")]))
    assert named.count("<th") == 1 and named.count("<td") == 5
    bare = table_html(table(("", ""), [("a", "b " * 60)], title="Result"))
    assert "<th" not in bare and bare.count("<tr>") == 1 and 'class="left long"' in bare
    assert_readable(page("T", [section("S", named, bare)]))


def test_text_has_contrast_in_both_themes() -> None:
    for colours in themes(STYLE, FINDINGS_STYLE):
        for name in ("ink", "dim", "error", "warning", "note"):
            assert contrast(colours[name], colours["back"]) >= 4.5, name


def test_pictures_have_contrast_in_both_themes() -> None:
    """Areas against the page as WCAG asks of pictures, but for three pale ones whose names stand in the legend; and
    letters in cells of the link matrix, whose colours are thinned."""
    for colours in themes(STYLE):
        series = [colours[f"c{index}"] for index in range(12)]
        assert sum(contrast(colour, colours["back"]) >= 3 for colour in series) >= 9
        assert all(contrast(colours["ink"], blended(one, colours["back"], 0.35)) >= 4.5 for one in series)
