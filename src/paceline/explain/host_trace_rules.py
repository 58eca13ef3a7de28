"""What is wrong by a trace of the CPU alone, and what is there to show of it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.explain.cause import Cause
from paceline.explain.host_parts import DATA, PYTHON, UPDATE, HostTrace
from paceline.report import units
from paceline.report.table import Table, table

_MOST_OPERATORS = 12
"""Rows of a table."""
_ATTENTION = r"scaled_dot_product|flash_attention|efficient_attention"
_SOFTMAX = r"^aten::_?softmax(_backward_data)?$|^SoftmaxBackward"
_MOVES = r"^aten::(copy_|clone|contiguous|cat|_to_copy|to)$|^(Copy|Clone|ToCopy|Cat)\w*Backward"


def host_causes(hosts: Sequence[HostTrace]) -> Iterator[Cause]:
    """Of several ranks, the one that loses most in a respect speaks."""
    yield _without_gpu(hosts)
    known = [one for one in hosts if one.seconds and one.operators]
    if known:
        for rule in (_data, _python, _optimizer, _plain_attention, _copies):
            yield max((rule(one) for one in known), key=lambda cause: cause.share or 0.0)


def _without_gpu(hosts: Sequence[HostTrace]) -> Cause:
    first = hosts[0]
    number = sum(sum(one.operators.calls.values()) for one in hosts)
    length = ""
    if first.steps:
        length = f", {first.steps} steps take {units.duration(first.seconds / first.steps)} each"
    elif first.seconds:
        length = f" in {units.duration(first.seconds)}; steps are not marked"
    return Cause(
        id="explain.trace-without-gpu",
        subject="the trace holds no work of a GPU",
        evidence=f"{number:,} operations of the host were recorded{length}. What is said here is of the CPU.",
        next_step="If the program works on a GPU, record again with activities=[ProfilerActivity.CPU, "
        "ProfilerActivity.CUDA]" + ("." if first.steps else "; profile(schedule=...) and prof.step() mark the steps."),
        share=None,
        severity="note",
        gain="not determined",
    )


def _data(host: HostTrace) -> Cause:
    loading = host.parts[DATA]
    workers = any("MultiProcessing" in name for name in host.one.trace.spans)
    return Cause(
        id="explain.data-loading",
        subject=f"{host.share(loading):.0%} of the time is waiting for data",
        evidence=f"{units.duration(loading)} of {units.duration(host.seconds)} on {host.one.label} lie inside the "
        + (
            "loader's spans, although it has worker processes: they are too slow, or too few."
            if workers
            else "loader's spans, which has no worker processes: samples are made by the training process itself."
        ),
        next_step="More loader workers (num_workers), a larger prefetch factor; tokenize ahead of time. A faster "
        "processor or GPU for the model does not help.",
        share=host.share(loading),
    )


def _python(host: HostTrace) -> Cause:
    alone = host.parts[PYTHON]
    calls = sum(host.operators.calls.values())
    return Cause(
        id="explain.host-bound",
        subject=f"no operator runs for {host.share(alone):.0%} of the time",
        evidence=f"{units.duration(alone)} of {units.duration(host.seconds)} on {host.one.label}; {calls:,} operators, "
        f"{units.duration(sum(host.operators.own.values()) / max(calls, 1))} each on average. Python between them, and "
        "the profiler itself, which takes some microseconds an operator.",
        next_step="A larger micro-batch, torch.compile, fused operators; and look for loops over tensors, .item() and "
        "prints in the training loop.",
        share=host.share(alone) if host.share(alone) > 0.15 else 0.0,
        certain=False,
    )


def _optimizer(host: HostTrace) -> Cause:
    update = host.parts[UPDATE]
    fused = any("_fused_" in name for name in host.operators.calls)
    return Cause(
        id="explain.optimizer",
        subject=f"the optimizer takes {host.share(update):.0%} of the time",
        evidence=f"{units.duration(update)} inside the spans of its step, "
        f"{'with' if fused else 'without'} fused kernels.",
        next_step="More micro-batches a step, or its state sharded over ranks (ZeRO-1)."
        if fused
        else "A fused optimizer (fused=True), more micro-batches a step, or its state sharded over ranks (ZeRO-1).",
        share=host.share(update) if host.share(update) > 0.1 else 0.0,
        certain=False,
    )


def _plain_attention(host: HostTrace) -> Cause:
    softmax, fused = host.own(_SOFTMAX), host.own(_ATTENTION)
    return Cause(
        id="explain.plain-attention",
        subject="attention runs as separate products and a softmax",
        evidence=f"{units.duration(softmax)} of softmax and {units.duration(fused)} of fused attention.",
        next_step="Use a fused kernel: attn_implementation='sdpa', torch's scaled_dot_product_attention.",
        share=host.share(softmax) if softmax > fused and host.share(softmax) > 0.03 else 0.0,
    )


def _copies(host: HostTrace) -> Cause:
    moved = host.own(_MOVES)
    return Cause(
        id="explain.copies",
        subject=f"copies and casts take {host.share(moved):.0%} of the time",
        evidence=f"{units.duration(moved)} of operators that only move or cast.",
        next_step="Look for .contiguous(), .to(dtype) and torch.cat near the largest operators; torch.compile fuses "
        "many of them.",
        share=host.share(moved) if host.share(moved) > 0.1 else 0.0,
        certain=False,
    )


def host_parts_table(hosts: Sequence[HostTrace]) -> Table:
    """A row a trace: seconds of a step, or of all where steps are not marked."""
    names = list(hosts[0].parts)
    rows = []
    for host in hosts:
        shares = (units.percent(host.share(host.parts[name])) for name in names)
        rows.append(
            (
                host.one.label,
                units.duration(host.seconds / (host.steps or 1)),
                *shares,
                str(host.steps or "-"),
            )
        )
    return table(
        ("trace", ">step" if hosts[0].steps else ">time", *(f">{name}" for name in names), ">steps"),
        rows,
        title="Where the CPU's time went",
        notes=(
            "Data and optimizer: inside their spans. Backward: while autograd evaluates an operator. No operator: "
            "Python, and the profiler itself.",
        ),
    )


def host_operators_table(host: HostTrace) -> Table:
    rows = [
        (name, units.duration(seconds), units.percent(host.share(seconds)), f"{host.operators.calls[name]:,}")
        for name, seconds in list(host.operators.own.items())[:_MOST_OPERATORS]
    ]
    return table(("operator", ">own time", ">share", ">calls"), rows, title=f"Largest operators of {host.one.label}")
