"""Ids of findings are stable: each is in the documentation, and the documentation has no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_id_is_documented() -> None:
    said = {
        found
        for path in (ROOT / "src" / "paceline" / "tuner").glob("*.py")
        for found in re.findall(r'id="(tune\.[a-z-]+)"', path.read_text(encoding="utf-8"))
    }
    page = set(re.findall(r"^\| `(tune\.[a-z-]+)`", (ROOT / "docs" / "tune.md").read_text(encoding="utf-8"), re.M))
    assert len(said) > 5 and said == page
