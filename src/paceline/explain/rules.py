"""What do the numbers of a run say is wrong, what does it cost, and what would change it?

Each rule looks at one thing and gives the causes it finds. Costs are of the step as it is: the share that would be
gone. A thing that holds one rank up costs all ranks its time, so costs are of the worst rank in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import PacelineError
from paceline.explain.attribution import Attribution, attribute
from paceline.explain.capture_report import captures_of, unattributed
from paceline.explain.cause import Cause, ranked
from paceline.explain.hang_rules import hang_causes
from paceline.explain.ranks import RankReport, SlowLink, SlowRank, began, judge_ranks, place_of
from paceline.explain.run_folder import Numbers, RunView
from paceline.explain.settings_rules import settings_causes
from paceline.explain.shares import Shares, mean_known
from paceline.explain.storage_rules import checkpoint_causes, data_causes
from paceline.explain.waterfall import Waterfall, make_waterfall
from paceline.report.finding import Finding

UNEVEN = 1.5
"""Busiest expert's load over the mean from which on experts are called uneven."""
LONGEST = 5
"""Slow ranks that get a finding of their own."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that is known of a run."""

    view: RunView
    shares: Shares
    waterfall: Waterfall | None
    ranks: RankReport
    findings: tuple[Finding, ...]
    captured: Path | None
    """The capture that was read, and what it says."""
    attribution: Attribution | None


def diagnose(view: RunView) -> Diagnosis:
    """Reads a run's numbers and names what is wrong, the dearest first."""
    shares = Shares(view=view)
    report = judge_ranks(view, shares)
    captured = next(iter(captures_of(view.path)), None)
    owned = _read(captured)
    waterfall = make_waterfall(view, shares, owned.by_part() if owned is not None and owned.on_gpu else None)
    causes: list[Cause] = []
    if waterfall is not None:
        for rule in _RULES:
            causes += rule(view, shares, report)
        causes += settings_causes(view, shares, waterfall)
    causes += [*_state_of_run(view, waterfall), *(unattributed(owned) if owned is not None else ())]
    return Diagnosis(
        view=view,
        shares=shares,
        waterfall=waterfall,
        ranks=report,
        findings=tuple(cause.finding() for cause in ranked(_once(causes))),
        captured=captured,
        attribution=owned,
    )


def _read(captured: Path | None) -> Attribution | None:
    """None where the capture is still being written, or damaged."""
    try:
        return None if captured is None else attribute(captured)
    except PacelineError:
        return None


def _once(causes: Iterable[Cause]) -> list[Cause]:
    """One of each id; the dearest."""
    kept: dict[str, Cause] = {}
    for cause in causes:
        known = kept.get(cause.id)
        if known is None or (cause.share or 0.0) > (known.share or 0.0):
            kept[cause.id] = cause
    return list(kept.values())


def worst_rank(values: Numbers) -> float:
    """Seconds of a mean step that the worst rank of each step takes: all wait for it."""
    return float(np.mean(np.nanmax(np.nan_to_num(values), axis=0)))


def of_step(shares: Shares, seconds: float) -> float:
    return seconds / max(float(mean_known(shares.wall)), 1e-12)


# ---- rules


def _garbage(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    seconds = worst_rank(shares.collections)
    runs = float(np.nansum(view.column("gc_runs")) / max(view.column("gc_runs").size, 1))
    own = int(view.recipe.get("train.gc_interval", 100))
    alike = _together(shares.collections)
    how = "on all ranks at once" if alike else "on one rank after the other, while the others wait"
    if len(view.ranks) == 1:
        how = "on the one rank"
    step = (
        "--set train.gc_interval=1000 collects every 1000 steps, on all ranks at once"
        if own
        else "--set train.gc_interval=100 collects at fixed steps, on all ranks at once"
    )
    yield Cause(
        id="explain.garbage-collection",
        subject="Python's garbage collection holds the step up",
        evidence=f"{seconds * 1e3:.1f} ms a step on the rank that collects most, {runs:.1f} collections a step; {how}.",
        next_step=f"{step}. If a plugin or a hook calls gc.collect(), take that out.",
        share=of_step(shares, seconds),
    )


def _together(values: Numbers) -> bool:
    """Whether ranks collect at the same steps."""
    if len(values) < 2:
        return True
    often = values > 0
    return bool(often.any() and often.all(axis=0).sum() >= 0.8 * often.any(axis=0).sum())


def _processor(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    if not view.knows("thread_queue_us"):
        return
    seconds = worst_rank(shares.queue)
    busy = float(mean_known(view.column("cpu_busy_pct")))
    own = float(np.nansum(mean_known(view.column("process_cpu_pct"), axis=1)))
    cpus = int(view.fact("cpus", 0)) or 1
    threads = int(view.fact("threads", 1)) * int(view.fact("local_world_size", 1))
    crowded = "" if threads <= cpus else f" {threads} threads of this run share {cpus} processors (OMP_NUM_THREADS)."
    if not np.isnan(busy):
        crowded += f" Processors are {busy:.0f} % busy; the run's own ranks take {own / cpus:.0f} % of them."
    share = of_step(shares, seconds)
    if shares.on_device:
        # on a GPU the host may be late without the stream noticing
        share = min(share, of_step(shares, worst_rank(shares.own["other"] + shares.own["data"])))
    yield Cause(
        id="explain.cpu-contention",
        subject="the training thread waits for a processor",
        evidence=f"It could run and had none for {seconds * 1e3:.1f} ms a step.{crowded}",
        next_step="End other programs on this host, ask the scheduler for whole cores, or set OMP_NUM_THREADS so that "
        "all ranks' threads fit; `top` shows who takes the processors.",
        share=share,
    )


def _evaluation(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    seconds = worst_rank(shares.own["evaluation"])
    interval = view.recipe.get("train.eval_interval", 0)
    yield Cause(
        id="explain.evaluation",
        subject="evaluation takes a part of every step's time",
        evidence=f"{seconds * 1e3:.1f} ms of a mean step; every {interval} steps, "
        f"{view.recipe.get('train.eval_steps')} batches.",
        next_step=f"--set train.eval_interval={4 * int(interval or 25)}, or fewer train.eval_steps.",
        share=0.75 * of_step(shares, seconds),
        certain=False,
    )


def _logging(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    interval = int(view.recipe.get("observe.log_interval", 10))
    if interval >= 10:
        return
    seconds = worst_rank(shares.own["log"] + shares.blocked("log"))
    yield Cause(
        id="explain.logging",
        subject="reading the metrics holds the step up",
        evidence=f"{seconds * 1e3:.1f} ms of a mean step with observe.log_interval = {interval}: "
        "every logged step waits for the device.",
        next_step="--set observe.log_interval=10",
        share=of_step(shares, seconds) * (1 - interval / 10),
        certain=False,
    )


def _bubble(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    pp = int(view.recipe.get("parallel.pp", 1))
    if pp < 2:
        return
    micro_batches = int(view.fact("micro_batches", 0)) or 1
    per_rank = int(view.recipe.get("parallel.stages_per_rank", 1))
    uneven = _stage_excess(view, shares)
    wall = float(mean_known(shares.wall))
    formula = (pp - 1) / (micro_batches * per_rank + pp - 1)
    waiting = float(mean_known(shares.phase("pipeline"))) / wall
    if uneven is not None:
        yield uneven
    doubled = (pp - 1) / (2 * micro_batches * per_rank + pp - 1)
    yield Cause(
        id="explain.pipeline-bubble",
        subject=f"{waiting:.0%} of a rank's time is waiting for another stage",
        evidence=f"pp {pp} with {micro_batches} micro-batches and {per_rank} run(s) of layers a rank leaves at least "
        f"(p - 1) / (m v + p - 1) = {formula:.1%} idle.",
        next_step=f"--set parallel.stages_per_rank={2 * per_rank} --set parallel.pipeline_schedule=interleaved_1f1b, "
        "or a smaller train.micro_batch_size: twice as many micro-batches halve it.",
        share=max(min(waiting, formula) - doubled, 0.0),
        certain=False,
    )


def _stage_excess(view: RunView, shares: Shares) -> Cause | None:
    """The slowest stage decides; what it takes beyond the mean is lost by all others."""
    work = shares.own["forward"] + shares.own["backward"]
    by_stage: dict[int, list[float]] = {}
    for position, facts in enumerate(view.facts):
        stage = int(dict(facts.get("place", {})).get("pp", 0))
        by_stage.setdefault(stage, []).append(float(np.nanmedian(work[position])))
    if len(by_stage) < 2:
        return None
    seconds = {stage: float(np.mean(values)) for stage, values in sorted(by_stage.items())}
    slowest = max(seconds, key=lambda stage: seconds[stage])
    even = float(np.mean(list(seconds.values())))
    more = seconds[slowest] - even
    listed = ", ".join(f"stage {stage} {value * 1e3:.1f} ms" for stage, value in seconds.items())
    layout = view.recipe.get("parallel.pipeline_layout") or ()
    proposed = _even_layout(view, seconds)
    step = (
        "--set parallel.pipeline_layout='[]' cuts by cost" if layout else f"--set parallel.pipeline_layout='{proposed}'"
    )
    return Cause(
        id="explain.stage-imbalance",
        subject=f"pipeline stage {slowest} has more work than the others, which wait for it",
        evidence=f"Own forward and backward of a step: {listed}; even would be {even * 1e3:.1f} ms.",
        next_step=f"{step}.",
        share=of_step(shares, more),
    )


def _even_layout(view: RunView, seconds: dict[int, float]) -> list[int]:
    """Layers by rank, moved from slow stages to fast ones by their measured pace; the sum stays."""
    counts = []
    for stage in seconds:
        facts = next(facts for facts in view.facts if int(dict(facts["place"]).get("pp", 0)) == stage)
        counts.append(sum(last - first + 1 for first, last in facts.get("stages", [])))
    total = sum(counts)
    if not total or min(counts) < 1:
        return counts
    pace = sum(seconds.values()) / total
    extra = [value - count * pace for value, count in zip(seconds.values(), counts, strict=True)]
    wanted = [(sum(seconds.values()) / len(counts) - more) / pace for more in extra]
    layout = [max(1, int(value)) for value in wanted]
    order = sorted(range(len(layout)), key=lambda index: wanted[index] - layout[index], reverse=True)
    for index in (order * total)[: max(0, total - sum(layout))]:
        layout[index] += 1
    while sum(layout) > total:
        layout[layout.index(max(layout))] -= 1
    return layout


def _slow(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    uneven = int(view.recipe.get("parallel.ep", 1)) > 1 and (expert_load(view) or 0.0) >= UNEVEN
    for one in report.slow[:LONGEST]:
        # the rank with the busiest experts works longest: that is told with the experts
        if not (uneven and one.cause in ("forward", "backward")):
            yield _slow_rank(one, report.group)
    for one in report.pausing[:LONGEST]:
        yield _pausing_rank(one)
    for link in report.links[:LONGEST]:
        yield _slow_link(link)


_WHY = {
    "clock": "Its GPU runs at a lower clock: look at its power limit, cooling and `nvidia-smi -q -d PERFORMANCE`; move "
    "the run off this card if it stays.",
    "processor": "Other programs take its processors: end them, or pin ranks to cores.",
    "garbage collection": "--set train.gc_interval=100 collects on all ranks at once.",
    "data": "Its loader is late: raise data.num_workers, or look at this host's disk.",
    "checkpoint": "It writes more slowly than the others: look at this host's disk or network file system.",
}


def _slow_rank(one: SlowRank, group: str) -> Cause:
    since = f" since step {one.since}" if one.since else ""
    ids = {"data": "explain.data-loading", "garbage collection": "explain.garbage-collection"}
    ids |= {"processor": "explain.cpu-contention", "checkpoint": "explain.slow-storage"}
    return Cause(
        id=ids.get(one.cause, "explain.slow-rank"),
        subject=f"rank {one.rank} holds all others back{since}: {one.cause}",
        evidence=f"Its own work takes {one.seconds * 1e3:.1f} ms a step more than its peers' ({one.place}), over "
        f"{one.steps} steps; {one.detail}.{f' Slow ranks: {group}.' if group else ''}",
        next_step=_WHY.get(
            one.cause,
            "What differs on this rank is not determined by the record: compare a capture of it with one of "
            "another rank "
            f"(`paceline explain RUN --capture 3`, ranks {one.rank} and a peer), and run `paceline doctor "
            "--measure` there.",
        ),
        share=one.share,
    )


def _pausing_rank(one: SlowRank) -> Cause:
    collected = one.cause == "garbage collection"
    return Cause(
        id="explain.garbage-collection" if collected else "explain.pauses",
        subject=f"rank {one.rank} pauses now and then while the others wait: {one.cause}",
        evidence=f"{one.detail} ({one.place}).",
        next_step=_WHY["garbage collection"]
        if collected
        else "Not determined: look at what else runs on this host at these steps (cron, monitoring, swapping).",
        share=one.share,
        certain=collected,
    )


def _slow_link(link: SlowLink) -> Cause:
    shown = ", ".join(map(str, link.ranks[:8])) + (" ..." if len(link.ranks) > 8 else "")
    return Cause(
        id="explain.slow-link",
        subject=f"collectives of {link.axis} among ranks {shown} are {link.times:.1f} times slower than elsewhere",
        evidence=f"{link.gb_per_second:.2f} GB/s of tensors while nobody of the group is late; "
        f"{link.seconds * 1e3:.1f} ms a step.",
        next_step="Run `paceline doctor --measure` on these hosts: a cable, a port or a PCIe slot is slow, or "
        "NCCL took "
        "another path (NCCL_DEBUG=INFO, `paceline doctor nccl LOG`).",
        share=link.share,
    )


def _memory(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    """The allocator frees its cache and asks the driver again: each time the device stands still."""
    if not view.knows("alloc_retries"):
        return
    retries = np.nan_to_num(view.column("alloc_retries"))
    new = np.diff(retries, axis=1, prepend=retries[:, :1]) > 0
    allocated, reserved = view.column("allocated_mb"), view.column("reserved_mb")
    gap = float(np.nanmax(1 - allocated / np.maximum(reserved, 1)))
    if not new.any():
        return
    steps = new.any(axis=0)
    wall = shares.wall.max(axis=0)
    slower = float(wall[steps].mean() - np.median(wall[~steps])) if (~steps).any() else 0.0
    seconds = max(slower, 0.0) * float(steps.mean())
    worst = int(retries[:, -1].argmax())
    yield Cause(
        id="explain.memory-fragmentation",
        subject=f"the allocator runs out and frees its cache again and again (rank {view.ranks[worst]})",
        evidence=f"{retries[worst, -1] - retries[worst, 0]:.0f} retries in {retries.shape[1]} steps; steps with "
        "one take "
        f"{slower * 1e3:.0f} ms more. Reserved and not in use: up to {gap:.0%}.",
        next_step="Set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment; if it stays, less memory: "
        "--set parallel.recompute=selective or a smaller train.micro_batch_size.",
        share=of_step(shares, seconds),
    )


def _throttled(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    if not view.knows("gpu_clock_mhz"):
        return
    most = float(view.fact("gpu_clock_max_mhz", 0) or 0)
    clock = mean_known(view.column("gpu_clock_mhz"), axis=1)
    if most <= 0 or np.isnan(clock).all():
        return
    mean = float(np.nanmean(clock))
    hot = float(np.nanmax(mean_known(view.column("gpu_temperature_c"), axis=1)))
    power = float(np.nanmean(view.column("gpu_power_w")))
    worst = int(np.nanargmin(clock))
    if mean >= 0.85 * most:
        return
    yield Cause(
        id="explain.clocks",
        subject=f"GPUs run at {mean:.0f} of {most:.0f} MHz",
        evidence=f"{power:.0f} W of {view.fact('gpu_power_limit_w', '?')} W, at most {hot:.0f} C; the slowest is rank "
        f"{view.ranks[worst]} ({place_of(view, worst)}).",
        next_step="Near the power limit this is the card's own doing and no fault; far below it, look for a "
        "lowered limit, "
        "locked clocks or heat (`paceline doctor`).",
        share=None,
        certain=False,
    )


def _changed(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    """The whole run got slower at some step and stayed so."""
    wall = mean_known(shares.wall, axis=0)
    if len(wall) < 20 or report.slow:
        return
    usual = float(np.percentile(wall, 10))
    cut = began(np.maximum(wall - usual, 0))
    if not cut:
        return
    before, after = float(np.median(wall[:cut])), float(np.median(wall[cut:]))
    if after < 1.1 * before:
        return
    parts = {
        name: float(np.median(mean_known(values, axis=0)[cut:]) - np.median(mean_known(values, axis=0)[:cut]))
        for name, values in {**shares.own, "waiting": shares.waits}.items()
    }
    part = max(parts, key=lambda name: parts[name])
    yield Cause(
        id="explain.slower-since",
        subject=f"every step since {view.shown_steps[cut]} is slower than before",
        evidence=f"{before * 1e3:.1f} ms before, {after * 1e3:.1f} ms after; most of it in {part} "
        f"({parts[part] * 1e3:+.1f} ms).",
        next_step="See what changed at that time: another job on the hosts or the network, a filling disk, the data.",
        share=1 - before / after,
        certain=False,
    )


def _loads(view: RunView) -> list[list[float]]:
    """By logged step: the busiest expert's load over the mean, by expert layer."""
    found = [record.extra.get("moe/load_max_over_mean") for record in view.metrics[-20:]]
    return [load for load in found if isinstance(load, list) and load]


def expert_load(view: RunView) -> float | None:
    """The busiest expert's load over the mean, mean over layers and steps; None without experts."""
    known = _loads(view)
    return float(np.mean([np.mean(load) for load in known])) if known else None


def _experts(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    mean = expert_load(view)
    if mean is None or mean < UNEVEN:
        return
    by_layer = np.mean(np.array(_loads(view)), axis=0)
    worst = int(np.argmax(by_layer))
    seconds = _expert_excess(view, shares)
    yield Cause(
        id="explain.expert-imbalance",
        subject=f"experts are used unevenly: the busiest gets {mean:.1f} times the mean load",
        evidence=f"Worst in expert layer {worst}: {by_layer[worst]:.1f} times."
        + (f" Ranks differ by {seconds * 1e3:.1f} ms of own forward and backward." if seconds is not None else ""),
        next_step="--set model.moe.bias_balance=true balances without a loss; or a larger model.moe.aux_loss_coef.",
        share=None if seconds is None else of_step(shares, seconds),
        certain=seconds is not None,
    )


def _expert_excess(view: RunView, shares: Shares) -> float | None:
    """What the rank with the most expert work takes beyond the mean of its expert-parallel group."""
    if int(view.recipe.get("parallel.ep", 1)) < 2 or len(view.ranks) < 2:
        return None
    work = shares.own["forward"] + shares.own["backward"]
    return float(np.mean(np.nanmax(work, axis=0) - mean_known(work, axis=0)))


Rule = Callable[[RunView, Shares, RankReport], Iterator[Cause]]

_RULES: tuple[Rule, ...] = (
    data_causes,
    checkpoint_causes,
    _garbage,
    _processor,
    _evaluation,
    _logging,
    _bubble,
    _slow,
    _memory,
    _throttled,
    _changed,
    _experts,
)


def _state_of_run(view: RunView, waterfall: Waterfall | None) -> Iterator[Cause]:
    """What is missing, and how the run ended."""
    if view.problems:
        yield Cause(
            id="explain.incomplete",
            subject="a part of the run folder cannot be read",
            evidence="; ".join(view.problems[:6]) + ".",
            next_step="What is said here is of the rest.",
            share=None,
            severity="note",
            gain="-",
        )
    yield from hang_causes(
        view.path,
        ranks=range(view.world_size),
        last_step=int(view.steps[-1]) if len(view.steps) else 0,
        ended=bool(view.end),
    )
    last = view.events[-1] if view.events else {}
    if last.get("event") == "error":
        yield Cause(
            id="explain.run-failed",
            subject=f"the run ended with an error at step {last.get('step')}",
            evidence=str(last.get("error") or last.get("subject") or last.get("message") or "see logs/"),
            next_step="The whole error is in the run folder's logs/.",
            share=None,
            severity="error",
            gain="-",
        )
    if waterfall is None and not view.problems:
        yield Cause(
            id="explain.no-steps",
            subject="no step is finished yet",
            evidence=f"{view.path}",
            next_step="Come back when some steps are done.",
            share=None,
            severity="note",
            gain="-",
        )
