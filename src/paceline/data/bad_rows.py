"""Which rows could not be used, and why? Counted by reason, the first of each kept with file and line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.data.chat_mask import UNSTABLE
from paceline.errors import DataError

SHOWN = 10
"""Rows that a message lists."""
KEPT_OF_A_KIND = 50

STEPS: Mapping[str, str] = {
    "record of another task": "Set task.kind to what these data are for, or name other data.",
    "unknown format": "Say what its keys mean in a dataset_info.json, or rename them to those that docs/data.md lists.",
    "unknown role": "Name the roles in the tags of a dataset_info.json, or rename them.",
    UNSTABLE: "Set data.mask = 'last', choose another data.template (chatml tells them), or mark the answers in the "
    "template with {% generation %}.",
    "longer than a sequence": "Raise train.seq_len, or set data.too_long = 'truncate' or 'drop'.",
}
"""The next step where a kind of fault has one of its own."""


@dataclass(frozen=True, kw_only=True)
class BadRow:
    path: str
    line: int
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.detail}"


@dataclass(kw_only=True)
class Tally:
    """Rows read from some files, and those that could not be used."""

    rows: int = 0
    """all, good and bad"""
    kinds: Counter[str] = field(default_factory=Counter)
    """reason -> rows"""
    first: list[BadRow] = field(default_factory=list)
    """up to `KEPT_OF_A_KIND` of each kind, in the order of the files"""

    @property
    def bad(self) -> int:
        return sum(self.kinds.values())

    def add(self, row: BadRow) -> None:
        self.kinds[row.kind] += 1
        if self.kinds[row.kind] <= KEPT_OF_A_KIND:
            self.first.append(row)

    def merge(self, other: Tally) -> None:
        self.rows += other.rows
        for row in other.first:
            if self.kinds[row.kind] + 1 <= KEPT_OF_A_KIND:
                self.first.append(row)
                self.kinds[row.kind] += 1
                other.kinds[row.kind] -= 1
        self.kinds.update(other.kinds)

    def summary(self) -> str:
        """``3 of 1,000 rows cannot be used: 2 empty assistant turn, 1 equal answers``"""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common() if count)
        return f"{self.bad:,} of {self.rows:,} rows cannot be used: {kinds}"

    def listing(self, limit: int = SHOWN) -> str:
        """The first bad rows, one a line."""
        lines = [str(row) for row in self.first[:limit]]
        if self.bad > len(lines):
            lines.append(f"... and {self.bad - len(lines):,} more")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "kinds": {kind: count for kind, count in self.kinds.items() if count},
            "first": [vars(row) for row in self.first],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, moved: Mapping[str, str] | None = None) -> Tally:
        """``moved``: path in the value -> path now."""
        new = moved or {}
        first = [BadRow(**{**row, "path": new.get(row["path"], row["path"])}) for row in value["first"]]
        return cls(rows=value["rows"], kinds=Counter(value["kinds"]), first=first)


def apply_policy(tally: Tally, policy: Literal["refuse", "skip"], what: str) -> None:
    """Refuses the data where a row is bad, unless they may be skipped; all of them bad is always refused.

    Raises:
        DataError: lists the first bad rows with file and line.
    """
    if not tally.rows:
        raise DataError(f"{what}: no rows", evidence="The files hold no record.", next_step="Check the path.")
    if not tally.bad or (policy == "skip" and tally.bad < tally.rows):
        return
    commonest = next((kind for kind, _ in tally.kinds.most_common() if kind in STEPS), "")
    step = STEPS.get(commonest, "Mend them.")
    if tally.bad < tally.rows:
        step += " To train on the others: data.bad_rows = 'skip'; the skipped ones are counted."
    raise DataError(f"{what}: {tally.summary()}", evidence="\n  ".join(tally.listing().splitlines()), next_step=step)
