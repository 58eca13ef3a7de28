"""Which rank keeps the others from going on, by what each was doing when a step did not end?

Ranks are grouped by where they stand: the collective and how many came before it, or the phase and the innermost
lines of the stack. The largest group waits; whoever stands elsewhere, or says nothing, is looked at first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.explain.cause import Cause
from paceline.observe.stall import read_stalls
from paceline.report import units

_FRAMES = 3
"""Of a stack, shown for a group."""


def hang_causes(
    folder: Path, *, ranks: Sequence[int], last_step: int, ended: bool, since: float = 0.0
) -> Iterator[Cause]:
    """From the stall files of a run folder.

    Args:
        ranks: of the world.
        last_step: the last one of which a line was written.
        ended: the run came to its end or was stopped. One that ended with an error may have hung until then.
        since: Unix time of the newest start; what was written before is of a start that is over.
    """
    stalls = read_stalls(folder, since=since)
    if not stalls:
        return
    step = max(int(one["step"]) for one in stalls)
    here = [one for one in stalls if int(one["step"]) == step]
    silent = sorted(set(ranks) - {int(one["rank"]) for one in here})
    groups = group_stalls(here)
    others = groups[1:]
    seconds = max(float(one.get("seconds", 0)) for one in here)
    goes_on = ended or last_step >= step
    culprits = [int(one["rank"]) for group in others for one in group]
    if culprits:
        subject = f"{_ranks(culprits)} {'keeps' if len(culprits) == 1 else 'keep'} the others from going on"
    elif silent:
        subject = f"{_ranks(silent)} said nothing, the others wait"
    else:
        subject = "all ranks stand at the same place"
    told = "; ".join(_describe(group) for group in groups[:4])
    yield Cause(
        id="explain.stall" if goes_on else "explain.hang",
        subject=f"step {step} {'took' if goes_on else 'has not ended for'} {units.duration(seconds)}: {subject}",
        evidence=f"{told}." + (f" Silent: {_ranks(silent)}." if silent else ""),
        next_step=_next(culprits, silent, folder),
        share=None,
        severity="note" if goes_on else "error",
        gain="-",
    )


def group_stalls(stalls: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Ranks that stand at the same place; those that wait for the others first.

    Who is inside a collective waits; where several groups are, the one that has begun most collectives is the furthest.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in stalls:
        inside = bool(one.get("in_collective"))
        key = (inside, one.get("collective"), one.get("calls")) if inside else (inside, *_place(one))
        groups.setdefault(key, []).append(one)
    return sorted(groups.values(), key=lambda group: (-len(group), not group[0].get("in_collective")))


def _place(one: Mapping[str, Any]) -> tuple[Any, ...]:
    """Innermost lines, without those of this machine's folders."""
    return (one.get("phase"), *(_short(line) for line in one["stack"][:2]))


def _short(line: str) -> str:
    path, _, function = str(line).partition(" ")
    parts = path.split("/")
    return f"{'/'.join(parts[-2:])} {function}"


def _describe(group: Sequence[Mapping[str, Any]]) -> str:
    one = group[0]
    names = _ranks([int(each["rank"]) for each in group])
    if one.get("in_collective"):
        size = units.size(float(one.get("collective_bytes") or 0))
        where = f"in {one['collective']} ({size}), number {one.get('calls')}"
    else:
        where = f"in phase {one.get('phase')}, after {one.get('calls')} collectives"
    stack = " < ".join(_short(line) for line in one["stack"][:_FRAMES])
    return f"{names} {where}: {stack}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _next(culprits: Sequence[int], silent: Sequence[int], folder: Path) -> str:
    if culprits:
        file = f"{folder}/record/stall-rank-{culprits[0]:05d}.json"
        return f"See what {_ranks(culprits)} is doing: its whole stack is in {file}."
    if silent:
        return (
            f"Look at {_ranks(silent)} first: the process is dead, or so stuck that not even its watch runs "
            "(`py-spy dump`, `dmesg`)."
        )
    return (
        "A transfer is slow or has failed, or the device does not answer: not determined; run "
        "`paceline doctor --measure`."
    )
