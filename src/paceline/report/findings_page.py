"""Findings as one page that opens offline: `doctor`, `explain` and `tune` write theirs with it.

Severity is said in words, not by colour alone; colours have a contrast of 4.5 to 1 or more on both themes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.report.finding import SEVERITIES, Finding, tally
from paceline.report.html import page

FINDINGS_STYLE = (
    ":root{--error:#b3261e;--warning:#7a5200;--note:#1f5fa8}"
    "@media (prefers-color-scheme:dark){:root{--error:#ff9d94;--warning:#f0c060;--note:#8fc1ff}}"
    "article{border-left:4px solid var(--edge);padding:2px 0 2px 14px;margin:18px 0}"
    ".is-error{--edge:var(--error)}.is-warning{--edge:var(--warning)}.is-note{--edge:var(--note)}"
    "article h3{font-size:1rem;margin:0}article p{margin:4px 0}article b{color:var(--edge)}"
    "code{font:13px ui-monospace,monospace;color:var(--dim)}"
)
"""For `page(..., style=FINDINGS_STYLE)`, where `findings_section` is not the first part."""


def findings_page(title: str, findings: Sequence[Finding], sections: Sequence[str] = ()) -> str:
    """A whole document: what was found, then the finished sections with tables and pictures."""
    return page(title, [findings_section(findings), *sections], style=FINDINGS_STYLE)


def findings_section(findings: Sequence[Finding], title: str = "Findings") -> str:
    """Every finding under a heading of its own, in the order given."""
    articles = "".join(_article(finding) for finding in findings)
    return f"<h2>{escape(title)}</h2><p>{escape(tally(findings))}</p>{articles}"


def _article(finding: Finding) -> str:
    assert finding.severity in SEVERITIES
    parts = [
        f'<article class="is-{finding.severity}"><h3><b>{finding.severity}</b>: {escape(finding.subject)}</h3>',
        f"<p>{escape(finding.evidence)}</p>" if finding.evidence else "",
        f"<p>→ {escape(finding.next_step)}</p>" if finding.next_step else "",
        f"<p>Expected gain: {escape(finding.gain)}</p>" if finding.gain else "",
        f"<p><code>{escape(finding.id)}</code></p></article>",
    ]
    return "".join(parts)
