"""What can be said from a log alone, and what it does not tell and how to get that?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from paceline.costs.hardware import Hardware, find_hardware, hardware_names
from paceline.errors import ConfigError
from paceline.explain.cause import Cause, ranked
from paceline.explain.explanation import Explanation
from paceline.explain.log_file import LogData, read_log
from paceline.explain.megatron_rules import megatron_causes
from paceline.explain.ranks import began
from paceline.report import units
from paceline.report.table import Table, table

_WARM_UP = 2
"""Logged steps that are left out where there are enough: compilation, first allocations."""


def explain_log(path: Path, *, gpu: str = "") -> Explanation:
    """A log of Megatron-LM, torchtitan or the Hugging Face Trainer, or of NCCL.

    Args:
        gpu: name of the card, since no log names it reliably; for MFU.

    Raises:
        ConfigError: the log is not known, the card is not in the table, or the log's speed is above the card's peak.
    """
    log = read_log(path)
    card = card_named(gpu) if gpu else None
    facts = log_facts(log, card)
    causes = [*_missing(log, card), *_trend(log), *_watchdog(log), *_network(log), *_data(log)]
    if log.framework == "Megatron-LM" or "tensor_model_parallel_size" in log.arguments:
        causes += megatron_causes(log, facts)
    return Explanation(
        title=f"{log.framework} log {path.name}" if log.framework != "unknown" else f"Log {path.name}",
        tables=(_facts_table(log, facts), *([_timers_table(log)] if log.timers else [])),
        findings=tuple(cause.finding() for cause in ranked(causes)),
        data={"framework": log.framework, "steps": len(log.steps), **facts},
    )


def card_named(name: str) -> Hardware:
    """The card of that name.

    Raises:
        ConfigError: it is not in the table of hardware.
    """
    card = find_hardware(name)
    if card is None:
        names = {each.lower(): each for each in hardware_names()}
        begins = [each for low, each in names.items() if low.startswith(name.lower().split(" ")[0])]
        near = begins or [names[low] for low in get_close_matches(name.lower(), list(names), n=3, cutoff=0.5)]
        raise ConfigError(
            f"there is no GPU {name!r} in the table of hardware: MFU is not available",
            evidence=f"{'Nearest' if near else 'It has'}: {', '.join(near or names.values())}.",
            next_step="Give one of these names, or leave --gpu out to go on without MFU.",
        )
    return card


def log_facts(log: LogData, card: Hardware | None = None) -> dict[str, float]:
    """Medians over settled steps; what the log does not say is left out."""
    steps = log.steps[_WARM_UP:] if len(log.steps) > 2 * _WARM_UP else log.steps
    names = ("seconds", "tflops", "tokens_per_second", "mfu", "memory_gib", "data_seconds", "batch")
    facts = {}
    for name in names:
        known = [value for value in (getattr(step, name) for step in steps) if not math.isnan(value)]
        if known:
            facts[name] = float(np.median(known))
    world, seq_len = log.number("world_size"), log.number("seq_length")
    if "tokens_per_second" not in facts and "seconds" in facts and "batch" in facts and world > 0 and seq_len > 0:
        facts["tokens_per_second"] = facts["batch"] * seq_len / facts["seconds"] / world
    for name in ("train_samples_per_second", "train_steps_per_second", "train_runtime"):
        if name in log.summary:
            facts[name] = log.summary[name]
    if "seconds" not in facts and facts.get("train_steps_per_second"):
        facts["seconds"] = 1 / facts["train_steps_per_second"]
    if card is not None and "tflops" in facts:
        peak = card.peak_tflops("bf16") or card.peak_tflops("fp16")
        if peak:
            if facts["tflops"] > peak:
                raise ConfigError(
                    f"MFU would be {facts['tflops'] / peak:.1%}: {facts['tflops']:.4g} TFLOP/s against {peak:.4g}",
                    evidence=f"{card.name}'s dense bf16 peak.",
                    next_step="It is another card, fp8, or FLOPs counted for another model.",
                )
            facts["mfu"], facts["peak_tflops"] = facts["tflops"] / peak, peak
    return facts


_LABELS = {
    "seconds": ("step", units.duration),
    "tokens_per_second": ("tokens/s of a GPU", units.count),
    "tflops": ("TFLOP/s of a GPU", lambda value: f"{value:.1f}"),
    "mfu": ("MFU", units.percent),
    "peak_tflops": ("peak", units.tflops),
    "memory_gib": ("memory", lambda value: f"{value:.2f} GiB"),
    "data_seconds": ("of a step, waiting for data", units.duration),
    "batch": ("sequences a step", lambda value: f"{value:g}"),
    "train_samples_per_second": ("samples/s", lambda value: f"{value:g}"),
    "train_steps_per_second": ("steps/s", lambda value: f"{value:g}"),
    "train_runtime": ("training took", units.duration),
}

_NOT_MEDIANS = {
    "train_runtime": "in all",
    "train_samples_per_second": "of the whole run",
    "train_steps_per_second": "of the whole run",
    "peak_tflops": "",
}
"""What numbers are that are no medians of steps."""


def _facts_table(log: LogData, facts: dict[str, float]) -> Table:
    rows = [("logged steps", str(len(log.steps)), f"of {log.total_steps}" if log.total_steps else "")]
    rows += [
        (_LABELS[name][0], _LABELS[name][1](value), _NOT_MEDIANS.get(name, "median"))
        for name, value in facts.items()
        if name in _LABELS
    ]
    return table(("log", "", ""), rows, title=f"{log.framework}")


def _timers_table(log: LogData) -> Table:
    rows = [
        (name, units.duration(least * 1e-3), units.duration(most * 1e-3), f"{most / max(least, 1e-9):.2f}")
        for name, (least, most) in sorted(log.timers.items(), key=lambda item: -item[1][1])[:12]
    ]
    return table(
        ("timer", ">fastest rank", ">slowest rank", ">ratio"),
        rows,
        title="Timers",
        notes=("Megatron-LM's timers wait at barriers and gather over all ranks: logging them slows the run.",),
    )


def _missing(log: LogData, card: Hardware | None) -> Iterator[Cause]:
    wanted = []
    has_speed = any(not math.isnan(step.tflops) for step in log.steps)
    if log.framework == "Megatron-LM" and not has_speed:
        wanted.append("TFLOP/s: run with --log-throughput")
    if has_speed and card is None and not any(not math.isnan(step.mfu) for step in log.steps):
        wanted.append("MFU: the log does not name the card, give --gpu NAME")
    if log.framework == "Megatron-LM" and not log.timers:
        wanted.append("which rank or phase is slow: --timing-log-level 2 --timing-log-option minmax, for a few steps")
    if log.framework in ("torchtitan", "Hugging Face Trainer"):
        wanted.append("where a step goes: record a trace with torch.profiler and give it to `paceline explain`")
    if wanted and log.steps:
        yield Cause(
            id="explain.not-in-the-log",
            subject="not determined from this log",
            evidence="; ".join(wanted) + ".",
            next_step="Measure this: a trace of two or three steps on one rank answers most of it.",
            share=None,
            severity="note",
            gain="not determined",
        )


def _trend(log: LogData) -> Iterator[Cause]:
    known = [(step.step, step.seconds) for step in log.steps[1:] if not math.isnan(step.seconds)]
    if len(known) < 10:
        return
    seconds = np.array([value for _, value in known])
    usual = float(np.median(seconds))
    cut = began(np.maximum(seconds - float(np.percentile(seconds, 10)), 0))
    if cut and np.median(seconds[cut:]) > 1.1 * np.median(seconds[:cut]):
        before, after = float(np.median(seconds[:cut])), float(np.median(seconds[cut:]))
        yield Cause(
            id="explain.slower-since",
            subject=f"every step since {known[cut][0]} is slower than before",
            evidence=f"{units.duration(before)} before, {units.duration(after)} after.",
            next_step="Not determined: see what changed at that time (another job, a hot or throttled card, the disk).",
            share=1 - before / after,
            certain=False,
        )
        return
    spikes = seconds > 1.5 * usual
    lost = float((seconds[spikes] - usual).sum() / seconds.sum())
    if spikes.any() and lost > 0.02:
        at = [known[index][0] for index in np.flatnonzero(spikes)]
        gaps = np.diff(at)
        regular = len(gaps) > 1 and gaps.std() < 0.1 * gaps.mean()
        yield Cause(
            id="explain.pauses",
            subject=f"{len(at)} of {len(known)} logged steps take more than 1.5 times the median",
            evidence=f"Steps {', '.join(map(str, at[:6]))}{' ...' if len(at) > 6 else ''}"
            + (f", every {gaps.mean():.0f} steps" if regular else ", at no fixed distance")
            + f"; {lost:.0%} of the time.",
            next_step="Regular ones are most often checkpoints or evaluations: save less often or asynchronously."
            if regular
            else "Not determined: garbage collection on one rank, a shared file system or network; look at "
            "timers by rank.",
            share=lost,
            certain=False,
        )


def _watchdog(log: LogData) -> Iterator[Cause]:
    """Same sequence number on all ranks: a slow or failed transfer. Different ones: the programs went different
    ways."""
    if not log.stuck:
        return
    places = Counter((one.sequence, one.operation, one.elements) for one in log.stuck)
    (common, number), *others = places.most_common()
    world = log.number("world_size")
    silent = [] if math.isnan(world) else sorted(set(range(int(world))) - {one.rank for one in log.stuck})
    listed = _describe(common)
    if others:
        culprits = [one for one in log.stuck if (one.sequence, one.operation, one.elements) != common]
        shown = "; ".join(
            f"rank {one.rank} at {_describe((one.sequence, one.operation, one.elements))}" for one in culprits[:6]
        )
        yield Cause(
            id="explain.collective-mismatch",
            subject=f"ranks went different ways: {', '.join(f'rank {one.rank}' for one in culprits[:8])} left "
            "the others",
            evidence=f"{number} ranks wait in {listed}; {shown}.",
            next_step="Something on these ranks skipped or added a collective: a branch on rank or data, an "
            "uneven last "
            "batch, an exception that was caught. Compare their stacks at this step (TORCH_NCCL_TRACE_BUFFER_SIZE).",
            share=None,
            severity="error",
            gain="-",
        )
        return
    done = {one.completed for one in log.stuck}
    numbers = ""
    if done - {None}:
        numbers = f" Last completed: {', '.join(map(str, sorted(done - {None})))}."  # type: ignore[type-var]
    yield Cause(
        id="explain.collective-timeout",
        subject=f"{number} rank{'s' * (number > 1)} timed out in the same collective, {listed}",
        evidence="All that spoke were at the same place of the program: the transfer was slow or failed, or a "
        "peer was gone."
        f"{numbers}" + (f" Ranks that said nothing: {', '.join(map(str, silent[:8]))}." if silent else ""),
        next_step="Look for a rank that ended first (out of memory, killed) or a broken link "
        "(`paceline doctor nccl LOG`, `dmesg`); the cause is not determined by this log."
        if not silent
        else f"Look at rank {silent[0]} first: it did not reach the collective or is dead.",
        share=None,
        severity="error",
        gain="-",
    )


def _describe(place: tuple[int, str, int | None]) -> str:
    sequence, operation, elements = place
    return f"{operation} number {sequence}" + (f" of {elements:,} elements" if elements else "")


def _network(log: LogData) -> Iterator[Cause]:
    if "socket" not in log.network or "ib" in log.network:
        return
    if "ib disabled" in log.network:
        reason, step = "NCCL_IB_DISABLE=1 is set", "Unset NCCL_IB_DISABLE."
    elif "no ib device" in log.network:
        reason = "NCCL found no InfiniBand or RoCE device"
        step = "See whether the container sees /dev/infiniband and `ibv_devinfo` lists a port; without such a card the "
        step += "network is what it is: shard inside a node and replicate across."
    else:
        reason, step = "the log does not say why", "Run with NCCL_DEBUG=INFO and read it with `paceline doctor "
        "nccl LOG`."
    yield Cause(
        id="explain.sockets",
        subject="NCCL talks over TCP sockets",
        evidence=f"The log says so; {reason}. A GPU that shows 100 % busy may be spinning in NCCL: that is no proof of "
        "useful work.",
        next_step=step,
        share=None,
        severity="warning",
    )


def _data(log: LogData) -> Iterator[Cause]:
    """torchtitan tells how long a step waited for data."""
    known = [
        step.data_seconds / step.seconds
        for step in log.steps[1:]
        if not math.isnan(step.data_seconds) and step.seconds > 0
    ]
    if known:
        share = float(np.median(known))
        yield Cause(
            id="explain.data-loading",
            subject=f"{share:.0%} of a step is waiting for data",
            evidence="By the log's own time_metrics/data_loading.",
            next_step="More loader workers; tokenize ahead of time.",
            share=share,
        )
