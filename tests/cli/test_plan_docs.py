"""The example that docs/plan.md goes through is what `paceline plan` says today, within a few percent."""

from __future__ import annotations

import re

from tests.cli.test_plan import ROOT, plan

NUMBER = re.compile(r"\d+(?:\.\d+)?")
NEAR = 0.03
"""Predictions move with what was measured last; a page that is further off has to be written again."""


def shown_in_docs() -> str:
    text = (ROOT / "docs" / "plan.md").read_text()
    return text.partition('--gpu "RTX 4090"\n```')[2].partition("```\n")[2].partition("```")[0]


def sentences(text: str, start: str) -> list[str]:
    """Those that begin so, each in one line."""
    flat = " ".join(text.split())
    return re.findall(rf"{re.escape(start)}.*?(?:tokens/s|host memory)\b", flat)


def assert_near(told: str, said: str) -> None:
    assert NUMBER.sub("#", told) == NUMBER.sub("#", said), (told, said)
    for one, other in zip(NUMBER.findall(told), NUMBER.findall(said), strict=True):
        assert abs(float(one) - float(other)) <= NEAR * float(other), (told, said)


def test_the_example_of_the_page_is_what_is_said() -> None:
    told, said = shown_in_docs(), plan("llama2_7b", "--gpus", "4", "--gpu", "RTX 4090").stdout
    for start in ("What fits: AdamW's", "What fits: 8-bit", "note: fine-tuning only: LoRA"):
        (one,), (other,) = sentences(told, start), sentences(said, start)
        assert_near(one, other)
    rows = [line.split() for line in told.splitlines() if re.match(r" \d ", line)]
    lines = [line.split() for line in said.partition("Layouts, predicted")[2].splitlines()]
    assert len(rows) == 2
    for row in rows:
        tp_to_zero, schedule = row[:5], row[5]
        (line,) = [line for line in lines if line[1:6] == tp_to_zero and line[6] == schedule and row[6] == line[7]]
        step = slice(row.index("full"), row.index("full") + 6)
        assert_near(" ".join(row[step]), " ".join(line[line.index("full") :][:6]))
