"""Every id of a finding is documented, and every documented one is said somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "paceline"
PREFIXED = {"hardware/judge.py": "hardware", "doctor/software.py": "software", "measured/judge.py": "measured"}
"""Files whose own `_finding` puts a prefix before the id."""


def said() -> Iterator[str]:
    for path in (*(SOURCE / "doctor").rglob("*.py"), *(SOURCE / "cli").glob("doctor*.py")):
        prefix = next((name for end, name in PREFIXED.items() if str(path).endswith(end)), "")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            given = {word.arg: word.value for word in node.keywords}
            if node.func.id in ("Finding", "Failure") and isinstance(given.get("id"), ast.Constant):
                yield str(ast.literal_eval(given["id"]))
            elif node.func.id == "judged":
                yield str(ast.literal_eval(node.args[2]))
            elif node.func.id == "_finding" and prefix:
                yield from (f"{prefix}.{one.value}" for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant))
    yield from (f"topology.{axis}-crosses" for axis in ("tp", "cp", "ep"))


def test_the_list_of_ids_is_whole() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text().partition("## Every finding")[2]
    listed = re.findall(r"^\| `([a-z]+\.[a-z0-9-]+)` \|", page, flags=re.MULTILINE)
    assert listed == sorted(listed) and len(set(listed)) == len(listed)
    assert set(said()) == set(listed)
    assert len(listed) > 100
