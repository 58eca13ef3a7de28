"""Writes docs/reference/findings.md: ids of the findings that checks of a recipe have. Run it through scripts/docs.

They are read from the source: calls of `Finding` and `error`, and rows of `Exclusion`, whose id has one of `PREFIXES`.
The ids of `doctor`, `explain` and `tune` stand on the pages of these verbs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
TARGET = Path(__file__).parent / "reference" / "findings.md"
PREFIXES = ("checkpoint", "config", "costs", "launch", "observe")
_ID = re.compile(rf"({'|'.join(PREFIXES)})\.[a-z0-9…-]+")

HEAD = """\
# Findings of a recipe's checks

<!-- Written by docs/make_finding_reference.py from the source. Change the findings there, then run scripts/docs. -->

What `paceline train`, its `--dry-run`, [`doctor`](../doctor.md) and [`plan`](../plan.md) say of a recipe, its start and
its checkpoints.
Ids are stable; `…` stands for what differs from case to case. Findings of [`doctor`](../doctor.md#every-finding),
[`explain`](../explain.md#every-finding) and [`tune`](../tune.md#findings) are on their own pages.

| id | severity | says |
| --- | --- | --- |
"""


def text_of_page() -> str:
    rows: dict[str, tuple[str, str]] = {}
    for name, severity, says in sorted(found()):
        rows.setdefault(name, (severity, says))
    known = {name: [_or_any(text) for text in texts] for name, texts in rows.items()}
    return HEAD + "".join(f"| `{name}` | {severity} | {says} |\n" for name, (severity, says) in known.items())


def _or_any(text: str) -> str:
    return "differs from case to case" if text == "…" else text


def found() -> Iterator[tuple[str, str, str]]:
    """(id, severity, what it says) of every call."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield from _said(node, node.func.id)


def _said(call: ast.Call, function: str) -> Iterator[tuple[str, str, str]]:
    if function not in ("Finding", "error", "Exclusion"):
        return
    given = {word.arg: word.value for word in call.keywords if word.arg}
    given |= dict(zip(("id", "subject"), call.args, strict=False))
    severity = given.get("severity", ast.Constant("error"))
    says = given.get("because" if function == "Exclusion" else "subject")
    for name in _texts(given.get("id")):
        if _ID.fullmatch(name) and says is not None:
            words = " or ".join(dict.fromkeys(_texts(says)))
            yield name, " or ".join(_texts(severity)), words.replace("|", "\\|")


def _texts(node: ast.expr | None) -> list[str]:
    """What an expression can say; ``…`` for what only a run knows."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return ["".join(map(str, parts))]
    return ["…"]


if __name__ == "__main__":
    TARGET.write_text(text_of_page(), encoding="utf-8")
