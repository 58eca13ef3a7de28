"""Which collective did not end, and which rank is to blame? Lines of torch's NCCL watchdog, of all ranks.

Where all ranks wait in the same collective, a transfer is slow or a peer is dead; where they wait in different ones,
the program went apart, and the ranks that differ from most are the ones to look at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.report.finding import Finding

_RANK = re.compile(r"\[(?:PG \S+ )?[Rr]ank (\d+)\]|\bRank (\d+)\b|\[rank(\d+)\]")
_WORK = re.compile(r"SeqNum=(\d+), OpType=(\w+)(?:, NumelIn=(\d+))?(?:, NumelOut=(\d+))?")
_LAST = re.compile(r"last enqueued NCCL work: (-?\d+), last completed NCCL work: (-?\d+)")


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Where a rank waits."""

    rank: int
    sequence: int
    operation: str
    elements_in: int | None
    elements_out: int | None

    @property
    def where(self) -> tuple[int, str, int | None, int | None]:
        return self.sequence, self.operation, self.elements_in, self.elements_out


def find_stuck(texts: Iterable[str]) -> tuple[list[Stuck], dict[int, tuple[int, int]]]:
    """(where each rank waits, the last collective that it has enqueued and completed)."""
    found: dict[int, Stuck] = {}
    last: dict[int, tuple[int, int]] = {}
    for text in texts:
        ranks = _RANK.search(text)
        rank = int(next(group for group in ranks.groups() if group)) if ranks else None
        if rank is None:
            continue
        if match := _LAST.search(text):
            last.setdefault(rank, (int(match[1]), int(match[2])))
        work = _WORK.search(text)
        if work is not None and rank not in found:
            found[rank] = Stuck(
                rank=rank,
                sequence=int(work[1]),
                operation=work[2],
                elements_in=int(work[3]) if work[3] else None,
                elements_out=int(work[4]) if work[4] else None,
            )
    return sorted(found.values(), key=lambda one: one.rank), last


def judge_stuck(stuck: list[Stuck], last: dict[int, tuple[int, int]], num_ranks: int) -> Iterator[Finding]:
    """One finding about all ranks that timed out."""
    if not stuck:
        return
    places = Counter(one.where for one in stuck)
    usual, _ = places.most_common(1)[0]
    silent = sorted(set(range(num_ranks)) - {one.rank for one in stuck})
    if len(places) > 1:
        yield _diverged(stuck, places, usual)
        return
    completed = sorted({done for _, done in last.values()})
    seen = f" Last completed: {', '.join(map(str, completed))}." if completed else ""
    yield Finding(
        id="nccl.timeout",
        severity="error",
        subject=f"{len(stuck)} ranks time out in the same collective: number {usual[0]}, {usual[1]}"
        + (f", {usual[2]:,} elements" if usual[2] is not None else ""),
        evidence="The program is the same on all of them, so a transfer is slow or failed, or a peer is dead."
        + seen
        + (
            f" Ranks {_listed(silent)} say nothing: look at them first." if silent else " Every rank that speaks waits."
        ),
        next_step=(
            f"Look at the processes and hosts of ranks {_listed(silent)} (dmesg, nvidia-smi). " if silent else ""
        )
        + "Which link is slow is not determined here: paceline doctor --measure on these nodes, and the NCCL log "
        "before the timeout.",
    )


def _diverged(stuck: list[Stuck], places: Counter[tuple[int, str, int | None, int | None]], usual: object) -> Finding:
    groups = {where: [one.rank for one in stuck if one.where == where] for where in places}
    most = places.most_common(2)
    tie = most[0][1] == most[1][1]
    culprits = sorted(one.rank for one in stuck if tie or one.where != usual)
    shown = "; ".join(
        f"ranks {_listed(ranks)}: number {where[0]}, {where[1]}"
        + (f", {where[2]:,} in" if where[2] is not None else "")
        for where, ranks in groups.items()
    )
    return Finding(
        id="nccl.diverged",
        severity="error",
        subject="ranks wait in different collectives: the program went apart"
        + (f" on rank {_listed(culprits)}" if not tie else ", and which side is wrong is not determined"),
        evidence=f"{shown}. They must call the same collectives in the same order with the same sizes.",
        next_step="Look for what these ranks do differently: uneven batches, a branch on the rank, an exception that "
        "was swallowed. The flight recorder (TORCH_FR_BUFFER_SIZE) has the stack of each call.",
    )


def _listed(ranks: list[int]) -> str:
    """``0-3, 7``."""
    parts: list[str] = []
    start = 0
    for index in range(1, len(ranks) + 1):
        if index == len(ranks) or ranks[index] != ranks[index - 1] + 1:
            first, final = ranks[start], ranks[index - 1]
            parts.append(str(first) if first == final else f"{first}-{final}")
            start = index
    return ", ".join(parts)
