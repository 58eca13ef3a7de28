"""What do traces of any PyTorch program say? Where the time went, on each rank, and what of it can be had back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from paceline.costs.hardware import find_hardware
from paceline.explain.attribution import MODULE, attribute
from paceline.explain.capture_report import attribution_data, module_table, unattributed
from paceline.explain.cause import Cause, ranked
from paceline.explain.explanation import Explanation, bars
from paceline.explain.kinds import (
    ATTENTION,
    COMMUNICATION,
    MEMORY_INDEX,
    NAMES,
    OPTIMIZER,
    PRODUCTS,
    SOFTMAX,
    collective_of,
    is_fp32_product,
)
from paceline.explain.timeline import Breakdown, break_down, covered, exposed_by_collective, length, union
from paceline.explain.trace_file import TraceData, read_trace
from paceline.report import units
from paceline.report.table import Table, table

_STEP = re.compile(r"ProfilerStep#\d+")
_LOADER = re.compile(r"DataLoader|^data$|dataloader|next_batch|get_batch", re.IGNORECASE)
_UPDATE = re.compile(r"^Optimizer\.step#|optimizer", re.IGNORECASE)
_LAUNCH = 20e-6
"""Seconds; a gap up to this is one that a launch leaves."""


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """A trace with what was computed from it."""

    label: str
    trace: TraceData
    breakdown: Breakdown

    @cached_property
    def steps(self) -> int:
        """Profiled steps, 0 where the program did not mark them."""
        return sum(len(spans) for name, spans in self.trace.spans.items() if _STEP.fullmatch(name))

    @cached_property
    def updates(self) -> int:
        """Optimizer steps, 0 where they are not marked."""
        return sum(len(spans) for name, spans in self.trace.spans.items() if name.startswith("Optimizer.step#"))

    @cached_property
    def collectives(self) -> dict[str, tuple[float, float, int]]:
        return exposed_by_collective(self.trace)

    def share(self, seconds: float) -> float:
        return seconds / self.breakdown.total if self.breakdown.total else 0.0

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds that sum to the total: computation by kind, then what nothing covers."""
        one = self.breakdown
        computing = {name: seconds for name, seconds in one.by_kind.items() if name not in ("communication", "memory")}
        # kernels on several streams overlap: their own times are scaled to the time that is covered
        scale = one.computation / sum(computing.values()) if computing else 0.0
        found = {name: seconds * scale for name, seconds in computing.items()}
        exposed = sum(alone for _, alone, _ in self.collectives.values())
        for kind, (_, alone, _) in self.collectives.items():
            found[f"exposed {kind}"] = alone * (one.exposed / exposed if exposed else 0.0)
        found["memory copies"] = one.memory
        waiting = min(one.idle_host, one.idle)
        return found | {"idle: the host was late": waiting, "idle: other": one.idle - waiting}


def load(path: Path) -> RankTrace:
    """Reads and breaks down one trace.

    Raises:
        ConfigError: it cannot be read.
    """
    trace = read_trace(path)
    label = f"rank {trace.rank}" if trace.rank is not None else path.name
    return RankTrace(label=label, trace=trace, breakdown=break_down(trace))


def explain_traces(paths: Sequence[Path]) -> Explanation:
    """Traces of the ranks of one program.

    Raises:
        ConfigError: one cannot be read.
    """
    loaded = sorted((load(path) for path in paths), key=lambda one: (one.trace.rank is None, one.trace.rank, one.label))
    causes = list(trace_causes(loaded))
    owned = [attribute(one.trace.path) for one in loaded[:1] if _is_capture(one.trace)]
    causes += [cause for one in owned for cause in unattributed(one)]
    title = f"Trace {paths[0].name}" if len(paths) == 1 else f"{len(paths)} traces"
    with_gpu = [one for one in loaded if len(one.trace.start)]
    return Explanation(
        title=title,
        tables=(
            *([_breakdown_table(loaded)] if with_gpu or not owned else []),
            *(module_table(one, "By module and phase") for one in owned),
            *([_kernel_table(with_gpu[0])] if with_gpu else []),
        ),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={"ranks": [as_dict(one) for one in loaded], "attribution": [attribution_data(one) for one in owned]},
        pictures=(bars("Where the time went", [one.label for one in with_gpu], [one.parts for one in with_gpu]),)
        if with_gpu
        else (),
    )


def _is_capture(trace: TraceData) -> bool:
    """Whether modules are named in it, as ours are."""
    return any(name.startswith(MODULE) for name in trace.spans)


def as_dict(one: RankTrace) -> dict[str, object]:
    made = one.breakdown
    return {
        "path": str(one.trace.path),
        "rank": one.trace.rank,
        "device": one.trace.device,
        "seconds": made.total,
        "computation": made.computation,
        "non_computation": made.non_computation,
        "communication": made.communication,
        "exposed_communication": made.exposed,
        "overlap": made.overlap,
        "memory": made.memory,
        "idle": made.idle,
        "idle_host_wait": made.idle_host,
        "idle_kernel_wait": made.idle_kernel,
        "idle_other": made.idle_other,
        "steps": one.steps,
        "parts": one.parts,
        "truncated": one.trace.truncated,
    }


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
            "From the first kernel to the last. Overlap: the share of communication beside which something computes. "
            "Definitions as in HolisticTraceAnalysis.",
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
            _short(trace.names[index]),
            units.duration(float(seconds[index])),
            units.percent(one.share(float(seconds[index]))),
            f"{calls[index]:,}",
        )
        for index in first
        if calls[index]
    ]
    return table(("kind", "kernel", ">time", ">share", ">calls"), rows, title=f"Largest kernels of {one.label}")


def _short(name: str) -> str:
    return name if len(name) <= 70 else f"{name[:69]}…"


# ---- causes


def trace_causes(loaded: Sequence[RankTrace]) -> Iterator[Cause]:
    """What the traces say is wrong; of several ranks, the one that is worst in each respect speaks."""
    problems = [problem for one in loaded for problem in one.trace.problems]
    if problems:
        yield Cause(
            id="explain.incomplete",
            subject="a trace is not whole",
            evidence="; ".join(problems[:4]) + ".",
            next_step="What is said here is of what could be read; let the profiler finish before the process ends.",
            share=None,
            severity="note",
            gain="-",
        )
    with_gpu = [one for one in loaded if len(one.trace.start)]
    if not with_gpu and all(_is_capture(one.trace) for one in loaded):
        return
    if not with_gpu:
        yield Cause(
            id="explain.trace-without-gpu",
            subject="the trace holds no work of a GPU",
            evidence=f"{sum(one.trace.host_ops for one in loaded):,} operations of the host were recorded.",
            next_step="Not determined; record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA].",
            share=None,
            severity="note",
            gain="not determined",
        )
        return
    yield from _communication(with_gpu)
    yield from _late_ranks(with_gpu)
    for one in with_gpu[:1]:
        yield from _idle(one)
        yield from _synchronised_each_micro_step(one)
        yield from _kernels(one)


def _communication(loaded: Sequence[RankTrace]) -> Iterator[Cause]:
    # of several ranks the one that talks least is waited for: its communication is communication itself
    one = min(loaded, key=lambda each: each.breakdown.exposed)
    made = one.breakdown
    if not made.communication:
        return
    listed = ", ".join(
        f"{kind} {units.duration(alone)} of {units.duration(seconds)} ({number} calls)"
        for kind, (seconds, alone, number) in sorted(one.collectives.items(), key=lambda item: -item[1][1])
        if alone > 0.01 * made.total
    )
    speed = _collective_speed(one)
    yield Cause(
        id="explain.exposed-communication",
        subject=f"{one.share(made.exposed):.0%} of the time is communication that nothing hides",
        evidence=f"Exposed on {one.label}: {listed or 'little of each kind'}; {made.overlap:.0%} of all "
        "communication is "
        f"hidden.{speed}",
        next_step="Start gradients' reduction and parameters' gathering earlier (prefetch, smaller buckets), send less "
        "(bf16 gradients, sharding inside a node), or compute more between (gradient accumulation). A collective that "
        "is slower than the link should be: `paceline doctor --measure`.",
        share=one.share(made.exposed),
    )


def _collective_speed(one: RankTrace) -> str:
    trace = one.trace
    talks = (trace.kind == COMMUNICATION) & (trace.bytes_moved > 2**20)
    if not talks.any():
        return ""
    seconds = float((trace.end - trace.start)[talks].sum())
    rate = float(trace.bytes_moved[talks].sum()) / seconds / 1e9
    card = find_hardware(trace.device)
    link = f"; NVLink of this card has {card.nvlink_gb_per_s:.0f}" if card and card.nvlink_gb_per_s else ""
    return f" Tensors above 1 MiB travel at {rate:.1f} GB/s{link}."


def _late_ranks(loaded: Sequence[RankTrace]) -> Iterator[Cause]:
    """The rank that communicates least comes last: the others wait for it inside their collectives."""
    if len(loaded) < 2:
        return
    talked = np.array([one.breakdown.communication for one in loaded])
    worst = int(talked.argmin())
    others = float(np.median(np.delete(talked, worst)))
    late = others - float(talked[worst])
    one = loaded[worst]
    if one.share(late) < 0.02:
        return
    busy = one.breakdown.computation - float(
        np.median([each.breakdown.computation for index, each in enumerate(loaded) if index != worst])
    )
    reason = (
        f"It computes {units.duration(busy)} longer."
        if busy > 0.3 * late
        else "It does not compute longer, so its host is late: data, Python, or another program."
    )
    yield Cause(
        id="explain.slow-rank",
        subject=f"{one.label} comes last to the collectives, the others wait for it",
        evidence=f"It spends {units.duration(float(talked[worst]))} in them, the others "
        f"{units.duration(others)}. {reason}",
        next_step="Compare its clock, temperature and processors with the others' (`paceline doctor --measure`).",
        share=one.share(late),
    )


def _idle(one: RankTrace) -> Iterator[Cause]:
    made, trace = one.breakdown, one.trace
    loading = _idle_in(one, _LOADER)
    if one.share(loading) > 0.02:
        yield Cause(
            id="explain.data-loading",
            subject=f"the GPU is idle for {one.share(loading):.0%} of the time while the program waits for data",
            evidence=f"{units.duration(loading)} of {units.duration(made.total)} lie inside the loader's spans with no "
            "kernel running.",
            next_step="More loader workers, a larger prefetch factor, pinned memory; tokenize ahead of time.",
            share=one.share(loading),
        )
    waiting = max(0.0, min(made.idle_host, made.idle) - loading)
    kernels = trace.kind != COMMUNICATION
    typical = float(np.median((trace.end - trace.start)[kernels])) if kernels.any() else 0.0
    known = not np.isnan(trace.launched).all()
    if not known and one.share(made.idle) > 0.1:
        yield Cause(
            id="explain.idle",
            subject=f"the GPU is idle for {one.share(made.idle):.0%} of the time",
            evidence="The trace does not say when the host launched its kernels.",
            next_step="Not determined; record CPU activity too to tell a late host from waiting for another stream.",
            share=None,
        )
        return
    yield Cause(
        id="explain.host-bound",
        subject=f"the GPU waits for the host for {one.share(waiting):.0%} of the time",
        evidence=f"{units.duration(waiting)} of gaps end with a kernel that was launched after the one before "
        "had ended; "
        f"{int(kernels.sum()):,} kernels, half of them shorter than {units.duration(typical)}.",
        next_step="Launch less: torch.compile (parallel.compile=true), CUDA graphs, fused optimizers, a larger "
        "micro-batch; and look for .item(), print of tensors or synchronisation in the loop.",
        share=one.share(waiting),
    )


def _idle_in(one: RankTrace, pattern: re.Pattern[str]) -> float:
    """Seconds inside host spans of such names in which the GPU does nothing."""
    trace = one.trace
    spans = sorted((start, end) for name, each in trace.spans.items() if pattern.search(name) for start, end in each)
    if not spans:
        return 0.0
    merged = union(np.array([start for start, _ in spans]), np.array([end for _, end in spans]))
    begin, finish = float(trace.start.min()), float(trace.end.max())
    busy = union(trace.start, trace.end)
    idle = 0.0
    for start, end in zip(*merged, strict=True):
        start, end = max(start, begin), min(end, finish)
        if end > start:
            idle += end - start - covered(busy, start, end)
    return idle


def _synchronised_each_micro_step(one: RankTrace) -> Iterator[Cause]:
    """Bursts of gradient reductions between two optimizer steps: there should be one."""
    trace = one.trace
    reducing = {"all-reduce", "reduce-scatter"}
    which = trace.kind == COMMUNICATION
    chosen = np.array([collective_of(name) in reducing for name in trace.names])
    which &= chosen[trace.name] if len(trace.name) else False
    updates = sorted(
        start for name, each in trace.spans.items() if name.startswith("Optimizer.step#") for start, _ in each
    )
    if len(updates) < 2 or which.sum() < 4:
        return
    rounds, exposed = [], 0.0
    for begin, end in pairwise(updates):
        inside = which & (trace.start >= begin) & (trace.start < end)
        starts, ends = trace.start[inside], trace.end[inside]
        if len(starts) < 2:
            return
        gaps = starts[1:] - np.maximum.accumulate(ends)[:-1]
        long = gaps > max(0.08 * (end - begin), 4 * float(np.median(np.maximum(gaps, 0))))
        sizes = np.diff(np.flatnonzero(np.concatenate(([True], long, [True]))))
        if len(sizes) > 1 and len(set(sizes.tolist())) == 1:
            rounds.append(len(sizes))
            exposed += length(union(starts, ends))
    if not rounds or len(rounds) < 0.5 * (len(updates) - 1):
        return
    number = Counter(rounds).most_common(1)[0][0]
    wasted = exposed * (number - 1) / number
    yield Cause(
        id="explain.sync-every-micro-step",
        subject=f"gradients are reduced {number} times for each optimizer step",
        evidence=f"Reductions come in {number} equal bursts between two optimizer steps; together "
        f"{units.duration(exposed)}.",
        next_step="Accumulate first and reduce once: `with model.no_sync()` (DDP), set_requires_gradient_sync(False) "
        "(FSDP2), or accelerator.accumulate(model).",
        share=one.share(wasted * (1 - one.breakdown.overlap)),
        severity="warning",
    )


def _kernels(one: RankTrace) -> Iterator[Cause]:
    trace = one.trace
    spent = trace.end - trace.start

    def of_kind(index: int) -> float:
        return float(spent[trace.kind == index].sum())

    softmax = of_kind(SOFTMAX)
    if softmax > 0.03 * one.breakdown.total and of_kind(ATTENTION) < softmax:
        yield Cause(
            id="explain.plain-attention",
            subject="attention runs as separate products and a softmax",
            evidence=f"{units.duration(softmax)} of softmax kernels and {units.duration(of_kind(ATTENTION))} of fused "
            "attention.",
            next_step="Use a fused kernel: attn_implementation='sdpa' or 'flash_attention_2', torch's "
            "scaled_dot_product_attention.",
            share=one.share(softmax),
        )
    plain = np.array([is_fp32_product(name) for name in trace.names])
    slow = float(spent[(trace.kind == PRODUCTS) & plain[trace.name]].sum())
    if slow:
        yield Cause(
            id="explain.fp32",
            subject="matrix products run in fp32, outside the tensor cores",
            evidence=f"{units.duration(slow)} of kernels whose names say so, such as "
            f"{_short(next(name for name, is_it in zip(trace.names, plain, strict=True) if is_it))}.",
            next_step="bf16 autocast or bf16 weights; where fp32 is meant, "
            "torch.set_float32_matmul_precision('high') for TF32.",
            # what tensor cores take instead is less than a tenth on any card that has them
            share=0.85 * one.share(slow),
        )
    small = float(spent[(trace.kind == NAMES.index("copies and casts")) | (trace.kind == MEMORY_INDEX)].sum())
    yield Cause(
        id="explain.copies",
        subject=f"copies and casts take {one.share(small):.0%} of the time",
        evidence=f"{units.duration(small)} of kernels that only move or cast.",
        next_step="Look for .contiguous(), .to(dtype), torch.cat and host copies in the largest kernels' neighbours; "
        "torch.compile fuses many of them.",
        share=one.share(small) if one.share(small) > 0.1 else 0.0,
        certain=False,
    )
    update = of_kind(OPTIMIZER)
    yield Cause(
        id="explain.optimizer",
        subject=f"the optimizer takes {one.share(update):.0%} of the time",
        evidence=f"{units.duration(update)} of its kernels.",
        next_step="A fused optimizer (fused=True), more micro-batches a step, or its state sharded over ranks "
        "(ZeRO-1).",
        share=one.share(update) if one.share(update) > 0.1 else 0.0,
        certain=False,
    )
