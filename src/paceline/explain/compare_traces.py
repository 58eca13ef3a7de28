"""Two traces of one program: which parts grew, and is a collective slower?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from paceline.explain.cause import Cause, ranked
from paceline.explain.compare import parts_table
from paceline.explain.explanation import Explanation, bars
from paceline.explain.host_parts import host_trace
from paceline.explain.kinds import COMMUNICATION, collective_of
from paceline.explain.rank_trace import RankTrace, as_dict, load
from paceline.explain.trace_rules import incomplete
from paceline.report import units
from paceline.report.table import Table, table

_MOST_OPERATORS = 12
"""Rows of a table."""


def compare_traces(first: Path, second: Path) -> Explanation:
    """Two traces of the same program: by profiled step where both mark theirs, else as a whole.

    Raises:
        ConfigError: one of them cannot be read.
    """
    a, b = load(first), load(second)
    names = first.name, second.name
    if not len(a.trace.start) or not len(b.trace.start):
        return compare_host_traces(a, b)
    steps = steps_of(a, b)
    parts = [
        {name: seconds / number for name, seconds in one.parts.items()}
        for one, number in zip((a, b), steps or (1, 1), strict=True)
    ]
    causes = [*incomplete((a, b)), *_slower_collectives(a, b, steps or (1, 1)), *_trace_difference(a, b, parts)]
    talks = [_collectives_table(a, b)] if mean_collectives(a) or mean_collectives(b) else []
    return Explanation(
        title=f"{first.name} and {second.name}",
        tables=(parts_table(*parts, whole="step" if steps else "whole trace"), *talks),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={"traces": [as_dict(a), as_dict(b)], "per_step": bool(steps), "parts": parts},
        pictures=(bars("Where the time of a step went" if steps else "Where the time went", names, parts),),
    )


def steps_of(a: RankTrace, b: RankTrace) -> tuple[int, int] | None:
    """Profiled steps of each; None where one does not mark them: then only whole traces can be compared."""
    return (a.steps, b.steps) if a.steps and b.steps else None


def unknown_steps(a: RankTrace, b: RankTrace) -> str:
    """Who does not mark its steps, and what follows from it; ``""`` where both do."""
    names = ("the first", "the second")
    without = [name for name, one in zip(names, (a, b), strict=True) if not one.steps]
    if not without:
        return ""
    who = "Neither marks its steps" if len(without) == 2 else f"{without[0].capitalize()} does not mark its steps"
    marked = [f" ({name} has {one.steps})" for name, one in zip(names, (a, b), strict=True) if one.steps]
    return f" {who}{''.join(marked)}: whole traces are compared, and their number of steps may differ."


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


def _slower_collectives(a: RankTrace, b: RankTrace, steps: tuple[int, int]) -> list[Cause]:
    first, second = mean_collectives(a), mean_collectives(b)
    found = []
    computed = a.breakdown.computation / steps[0], b.breakdown.computation / steps[1]
    computing = computed[1] / computed[0] if computed[0] else 1.0
    for kind in first.keys() & second.keys():
        (before, count), (after, now) = first[kind], second[kind]
        if before > 0 and after > 1.5 * before and after * now > 0.02 * b.breakdown.total:
            same = abs(now / steps[1] / (count / steps[0]) - 1) < 0.1 and 0.8 < computing < 1.25
            share = b.share(b.breakdown.exposed) - a.share(a.breakdown.exposed)
            found.append(
                Cause(
                    id="explain.slower-collective",
                    subject=f"{kind} takes {after / before:.1f} times as long in the second trace"
                    + (": same overlap schedule, slower collective" if same else ""),
                    evidence=f"{units.duration(before)} and {units.duration(after)} on average; {count} and "
                    f"{now} calls; "
                    f"computation {units.duration(computed[0])} and {units.duration(computed[1])}"
                    f"{' a step' if a.steps and b.steps else ''}. Exposed: {a.share(a.breakdown.exposed):.0%} and "
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


def _trace_difference(a: RankTrace, b: RankTrace, parts: list[dict[str, float]]) -> list[Cause]:
    grown = {name: parts[1].get(name, 0.0) - parts[0].get(name, 0.0) for name in {**parts[0], **parts[1]}}
    if not grown:
        return []
    name = max(grown, key=lambda key: abs(grown[key]))
    what = "a step of " if a.steps and b.steps else ""
    counted = f" {a.steps} and {b.steps} steps." if a.steps and b.steps else ""
    return [
        Cause(
            id="explain.difference",
            subject=f"{what}the second takes {units.duration(sum(parts[1].values()))}, {what}the first "
            f"{units.duration(sum(parts[0].values()))}; most of the difference is in {name}",
            evidence=f"{name} {units.apart(grown[name])}.{counted}{unknown_steps(a, b)}",
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
        ("collective", ">mean, first", ">mean, second", ">calls, first", ">calls, second"),
        rows,
        title="Collectives of the whole traces",
    )


def compare_host_traces(a: RankTrace, b: RankTrace) -> Explanation:
    """Where one of two traces holds no work of a GPU: the operators of the CPU, if both recorded any."""
    both = not len(a.trace.start) and not len(b.trace.start)
    hosts = [host_trace(one) for one in (a, b)] if both else []
    marked = [host.steps for host in hosts]
    steps = (marked[0], marked[1]) if all(marked) and both else None
    spent, parts = (
        [
            {name: seconds / number for name, seconds in one.items()}
            for one, number in zip(of_each, steps or (1, 1), strict=False)
        ]
        for of_each in ([host.operators.own for host in hosts], [host.parts for host in hosts])
    )
    known = both and all(spent)
    if not both:
        subject = f"only the {'first' if len(a.trace.start) else 'second'} trace holds work of a GPU"
        evidence = "A step of the one cannot be held against a step of the other."
    elif not known:
        subject, evidence = "neither trace holds work of a GPU, nor do both hold operators of the CPU", ""
    else:
        part, operator = _most_apart(*parts), _most_apart(*spent)
        what = "a step" if steps else "the program"
        subject = (
            f"neither trace holds work of a GPU; on the CPU {what} takes {units.duration(sum(parts[0].values()))} "
            f"and {units.duration(sum(parts[1].values()))}"
        )
        counted = f" {steps[0]} and {steps[1]} steps." if steps else unknown_steps(a, b)
        evidence = f"Most of the difference is in {part}; of operators, in {operator}.{counted}"
    cause = Cause(
        id="explain.trace-without-gpu",
        subject=subject,
        evidence=evidence or "There is nothing to compare.",
        next_step="For a program on a GPU record both again with activities=[ProfilerActivity.CPU, "
        "ProfilerActivity.CUDA]; profile(schedule=...) and prof.step() mark the steps.",
        share=None,
        severity="note",
        gain="not determined",
    )
    shown = _largest(*spent) if known else ({}, {})
    whole = "step" if steps else "whole trace"
    return Explanation(
        title=f"{a.trace.path.name} and {b.trace.path.name}",
        tables=(
            parts_table(*parts, whole=whole),
            parts_table(*shown, whole=f"operators, {whole}", title="Operators of the CPU, own time"),
        )
        if known
        else (),
        findings=tuple(each.finding() for each in (cause, *incomplete((a, b)))),
        data={"traces": [as_dict(a), as_dict(b)], "per_step": bool(steps), "parts": parts, "operators": spent},
        pictures=(bars("Where the time went", (a.trace.path.name, b.trace.path.name), parts),) if known else (),
    )


def _most_apart(first: Mapping[str, float], second: Mapping[str, float]) -> str:
    """``"data: +5.00 ms"``."""
    grown = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {**first, **second}}
    name = max(grown, key=lambda key: abs(grown[key]))
    return f"{name}: {units.apart(grown[name])}"


def _largest(first: dict[str, float], second: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The operators that differ most; the others as one."""
    names = sorted({**first, **second}, key=lambda name: -abs(second.get(name, 0.0) - first.get(name, 0.0)))
    kept = set(names[:_MOST_OPERATORS])

    def short(one: dict[str, float]) -> dict[str, float]:
        shown = {name: seconds for name, seconds in one.items() if name in kept}
        rest = sum(seconds for name, seconds in one.items() if name not in kept)
        return shown | ({f"{len(names) - len(kept)} others": rest} if len(names) > len(kept) else {})

    return short(first), short(second)
