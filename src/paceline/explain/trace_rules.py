"""What is wrong by a trace, and what of the time could be had back?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from paceline.costs.hardware import find_hardware
from paceline.explain.cause import Cause
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
from paceline.explain.rank_trace import LOADER, RankTrace, short
from paceline.explain.timeline import covered, length, union
from paceline.report import units


def trace_causes(loaded: Sequence[RankTrace]) -> Iterator[Cause]:
    """What the traces say is wrong; of several ranks, the one that is worst in each respect speaks.

    Of work of GPUs; `host_trace_rules.host_causes` judges traces that hold none.
    """
    yield from incomplete(loaded)
    with_gpu = [one for one in loaded if len(one.trace.start)]
    if not with_gpu:
        return
    yield from _communication(with_gpu)
    yield from _late_ranks(with_gpu)
    for one in with_gpu[:1]:
        yield from _idle(one)
        yield from _synchronised_each_micro_step(one)
        yield from _kernels(one)


def incomplete(loaded: Sequence[RankTrace]) -> Iterator[Cause]:
    """What of the traces could not be read."""
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
    loading = _idle_in(one, LOADER)
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
        f"{int(kernels.sum()):,} kernels, half of them shorter than {units.duration(typical)}.{_waits(one)}",
        next_step="Launch less: torch.compile (parallel.compile=true), CUDA graphs, fused optimizers, a larger "
        "micro-batch; and look for .item(), print of tensors or synchronisation in the loop.",
        share=one.share(waiting),
    )


def _waits(one: RankTrace) -> str:
    """After each the GPU has nothing left to do, until the host has launched anew."""
    waits = one.trace.waits
    if not waits:
        return ""
    number = sum(waits.values())
    often = f"{number / one.steps:.3g} times a step" if one.steps else f"{number:,} times"
    return f" The host waited for the GPU {often} ({', '.join(list(waits)[:3])}), as .item() and printing make it."


def _idle_in(one: RankTrace, pattern: re.Pattern[str]) -> float:
    """Seconds inside host spans of such names in which the GPU does nothing."""
    trace = one.trace
    spans = sorted((start, end) for name, each in trace.spans.items() if pattern.search(name) for start, end in each)
    if not spans:
        return 0.0
    merged = union(np.array([start for start, _ in spans]), np.array([end for _, end in spans]))
    begin, finish = one.window
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
            f"{short(next(name for name, is_it in zip(trace.names, plain, strict=True) if is_it))}.",
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
