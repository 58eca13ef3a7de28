"""Who holds the others back, and what to do about it: ranks, links, and a whole run that became slower."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.explain.cause import Cause
from paceline.explain.expert_rules import UNEVEN, expert_load
from paceline.explain.ranks import RankReport, SlowLink, SlowRank, began
from paceline.explain.run_folder import RunView
from paceline.explain.shares import Shares, mean_known

LONGEST = 5
"""Slow ranks that get a finding of their own."""
_WHY = {
    "clock": "Its GPU runs at a lower clock: look at its power limit, cooling and `nvidia-smi -q -d PERFORMANCE`; move "
    "the run off this card if it stays.",
    "processor": "Other programs take its processors: end them, or pin ranks to cores.",
    "garbage collection": "--set train.gc_interval=100 collects on all ranks at once.",
    "data": "Its loader is late: raise data.num_workers, or look at this host's disk.",
    "checkpoint": "It writes more slowly than the others: look at this host's disk or network file system.",
}


def slow_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    uneven = int(view.recipe.get("parallel.ep", 1)) > 1 and (expert_load(view) or 0.0) >= UNEVEN
    for one in report.slow[:LONGEST]:
        # the rank with the busiest experts works longest: that is told with the experts
        if not (uneven and one.cause in ("forward", "backward")):
            yield _slow_rank(one, report.group)
    for one in report.pausing[:LONGEST]:
        yield _pausing_rank(one)
    for link in report.links[:LONGEST]:
        yield _slow_link(link)


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


def change_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
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
