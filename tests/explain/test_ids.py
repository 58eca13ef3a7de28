"""Ids of findings are stable: each is in the documentation, and the documentation has no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_id_is_documented() -> None:
    code = {
        found
        for path in (ROOT / "src" / "paceline" / "explain").glob("*.py")
        for found in re.findall(r'"(explain\.[a-z0-9-]+)"', path.read_text())
    }
    page = set(re.findall(r"`(explain\.[a-z0-9-]+)`", (ROOT / "docs" / "explain.md").read_text()))
    assert len(code) > 30 and code == page
