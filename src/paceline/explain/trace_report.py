"""What do traces of any PyTorch program say? Where the time went, on each rank, and what of it can be had back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.explain.attribution import attribute
from paceline.explain.capture_report import attribution_data, module_table, unattributed
from paceline.explain.cause import ranked
from paceline.explain.explanation import Explanation, bars
from paceline.explain.host_parts import host_trace
from paceline.explain.host_trace_rules import host_causes, host_operators_table, host_parts_table
from paceline.explain.kinds import NAMES
from paceline.explain.rank_trace import RankTrace, as_dict, is_capture, load, short
from paceline.explain.trace_rules import trace_causes
from paceline.report import units
from paceline.report.table import Table, table


def explain_traces(paths: Sequence[Path]) -> Explanation:
    """Traces of the ranks of one program.

    Raises:
        ConfigError: one cannot be read.
    """
    loaded = sorted((load(path) for path in paths), key=lambda one: (one.trace.rank is None, one.trace.rank, one.label))
    causes = list(trace_causes(loaded))
    owned = [attribute(one.trace.path) for one in loaded[:1] if is_capture(one.trace)]
    causes += [cause for one in owned for cause in unattributed(one)]
    # modules of a capture of ours tell more than operators
    on_cpu = [] if any(len(one.trace.start) for one in loaded) or owned else [host_trace(one) for one in loaded]
    causes += host_causes(on_cpu) if on_cpu else []
    known = [host for host in on_cpu if host.seconds and host.operators]
    title = f"Trace {paths[0].name}" if len(paths) == 1 else f"{len(paths)} traces"
    with_gpu = [one for one in loaded if len(one.trace.start)]
    parts = {one.label: one.parts for one in with_gpu} or {host.one.label: host.parts for host in known}
    return Explanation(
        title=title,
        tables=(
            *([_breakdown_table(with_gpu)] if with_gpu else []),
            *(module_table(one, "By module and phase") for one in owned),
            *([_kernel_table(with_gpu[0])] if with_gpu else []),
            *([host_parts_table(known), host_operators_table(known[0])] if known else []),
        ),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={
            "ranks": [as_dict(one) for one in loaded],
            "attribution": [attribution_data(one) for one in owned],
            "host": [{"seconds": host.seconds, "parts": host.parts, "operators": host.operators.own} for host in known],
        },
        pictures=(bars("Where the time went", list(parts), list(parts.values())),) if parts else (),
    )


def _breakdown_table(loaded: Sequence[RankTrace]) -> Table:
    rows = []
    for one in loaded:
        made = one.breakdown
        cells = (made.computation, made.exposed, made.memory, made.idle)
        rows.append(
            (
                one.label,
                units.duration(made.total),
                *(units.percent(one.share(value)) for value in cells),
                units.percent(made.overlap) if made.communication else "-",
                str(one.steps or "-"),
            )
        )
    return table(
        ("trace", ">time", ">computation", ">exposed communication", ">copies", ">idle", ">overlap", ">steps"),
        rows,
        title="Where the GPU's time went",
        notes=(
            "From the first kernel to the last, or of the marked steps where these take longer. Overlap: the share of "
            "communication beside which something computes. Definitions as in HolisticTraceAnalysis.",
        ),
    )


def _kernel_table(one: RankTrace) -> Table:
    trace = one.trace
    seconds = np.zeros(len(trace.names))
    np.add.at(seconds, trace.name, trace.end - trace.start)
    calls = np.bincount(trace.name, minlength=len(trace.names))
    kinds = dict(zip(trace.name.tolist(), trace.kind.tolist(), strict=True))
    first = np.argsort(-seconds)[:12]
    rows = [
        (
            NAMES[kinds[int(index)]],
            short(trace.names[index]),
            units.duration(float(seconds[index])),
            units.percent(one.share(float(seconds[index]))),
            f"{calls[index]:,}",
        )
        for index in first
        if calls[index]
    ]
    return table(("kind", "kernel", ">time", ">share", ">calls"), rows, title=f"Largest kernels of {one.label}")
