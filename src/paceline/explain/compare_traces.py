"""Two traces of one program: which parts grew, and is a collective slower?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.explain.cause import Cause, ranked
from paceline.explain.compare import parts_table
from paceline.explain.explanation import Explanation, bars
from paceline.explain.kinds import COMMUNICATION, collective_of
from paceline.explain.rank_trace import RankTrace, as_dict, load
from paceline.report import units
from paceline.report.table import Table, table


def compare_traces(first: Path, second: Path) -> Explanation:
    """Two traces of the same program.

    Raises:
        ConfigError: one of them cannot be read.
    """
    a, b = load(first), load(second)
    causes = [*_slower_collectives(a, b), *_trace_difference(a, b)]
    return Explanation(
        title=f"{first.name} and {second.name}",
        tables=(parts_table(a.parts, b.parts), _collectives_table(a, b)),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={"traces": [as_dict(a), as_dict(b)]},
        pictures=(bars("Where the time went", [first.name, second.name], [a.parts, b.parts]),),
    )


def mean_collectives(one: RankTrace) -> dict[str, tuple[float, int]]:
    """By kind of collective: (mean seconds, number)."""
    trace = one.trace
    talks = trace.kind == COMMUNICATION
    kinds = np.array([collective_of(name) for name in trace.names], dtype=object)
    spent = (trace.end - trace.start)[talks]
    labels = kinds[trace.name[talks]] if talks.any() else np.zeros(0, dtype=object)
    return {
        str(kind): (float(spent[labels == kind].mean()), int((labels == kind).sum())) for kind in sorted(set(labels))
    }


def _slower_collectives(a: RankTrace, b: RankTrace) -> list[Cause]:
    first, second = mean_collectives(a), mean_collectives(b)
    found = []
    computing = b.breakdown.computation / a.breakdown.computation if a.breakdown.computation else 1.0
    for kind in first.keys() & second.keys():
        (before, count), (after, now) = first[kind], second[kind]
        if before > 0 and after > 1.5 * before and after * now > 0.02 * b.breakdown.total:
            same = abs(now / count - 1) < 0.1 and 0.8 < computing < 1.25
            share = b.share(b.breakdown.exposed) - a.share(a.breakdown.exposed)
            found.append(
                Cause(
                    id="explain.slower-collective",
                    subject=f"{kind} takes {after / before:.1f} times as long in the second trace"
                    + (": same overlap schedule, slower collective" if same else ""),
                    evidence=f"{units.duration(before)} and {units.duration(after)} on average; {count} and "
                    f"{now} calls; "
                    f"computation {units.duration(a.breakdown.computation)} and "
                    f"{units.duration(b.breakdown.computation)}. Exposed: {a.share(a.breakdown.exposed):.0%} and "
                    f"{b.share(b.breakdown.exposed):.0%} of the time.",
                    next_step="Check the fabric and other jobs on it (`paceline doctor --measure`); the model's "
                    "code does "
                    "the same work."
                    if same
                    else "The two do not do the same work: compare their settings first.",
                    share=max(share, 0.0),
                )
            )
    return found


def _trace_difference(a: RankTrace, b: RankTrace) -> list[Cause]:
    grown = {name: b.parts.get(name, 0.0) - a.parts.get(name, 0.0) for name in {**a.parts, **b.parts}}
    if not grown:
        return []
    name = max(grown, key=lambda key: abs(grown[key]))
    steps = " Neither marks its steps, so their number may differ." if not a.steps or not b.steps else ""
    return [
        Cause(
            id="explain.difference",
            subject=f"the second takes {units.duration(b.breakdown.total)}, the first "
            f"{units.duration(a.breakdown.total)}; most of the difference is in {name}",
            evidence=f"{name} {grown[name] * 1e3:+.2f} ms.{steps}",
            next_step="The table shows every part.",
            share=None,
            severity="note",
            gain="-",
        )
    ]


def _collectives_table(a: RankTrace, b: RankTrace) -> Table:
    first, second = mean_collectives(a), mean_collectives(b)
    rows = [
        (
            kind,
            *(units.duration(means.get(kind, (0.0, 0))[0]) for means in (first, second)),
            *(str(means.get(kind, (0.0, 0))[1]) for means in (first, second)),
        )
        for kind in sorted({**first, **second})
    ]
    return table(
        ("collective", ">mean, first", ">mean, second", ">calls, first", ">calls, second"), rows, title="Collectives"
    )
