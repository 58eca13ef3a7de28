"""Which rank holds the others back, since when, and why?

Ranks that do the same work (one position in the pipeline) are compared on every step: what a rank's own work takes
beyond the median of its peers is its excess. In a synchronous step all wait for the last rank, so a slow rank costs
what lies between it and the last one of its peers, if none was slow: less than its excess where peers are uneven.

A rank is *slow* where its excess is there in most steps, and *pausing* where it comes now and then. The cause is the
part of its own work that is larger than its peers', or what the machine says: clock, processor, garbage collection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.explain.run_folder import Numbers, RunView
from paceline.explain.shares import OWN, Shares, mean_known, median_known
from paceline.observe.telemetry.columns import AXES
from paceline.observe.telemetry.nvml import SLOW_BITS

LEAST_SHARE = 0.03
"""Of a step, below which nobody is called slow."""
MOST_STEPS = 0.6
"""Share of steps in which a rank must be the last of its peers."""
_PAUSE = 0.5
"""Of a step: an excess of a single step beyond it is a pause, if the rank does not have it as a rule."""


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank and what it costs all."""

    rank: int
    place: str
    """``"dp 3, tp 1 on host a"``"""
    seconds: float
    """Of a mean step."""
    share: float
    """Of the step."""
    since: int | None
    """Step at which it began; None where it was so from the start."""
    cause: str
    """data, forward, backward, ...; clock, processor, garbage collection."""
    detail: str
    """Numbers behind the cause."""
    steps: int
    """In which it was seen."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """Ranks of an axis whose collectives take longer than those of others on the same axis."""

    axis: str
    ranks: tuple[int, ...]
    seconds: float
    share: float
    times: float
    """How many times slower a byte goes than in the median group."""
    gb_per_second: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    slow: tuple[SlowRank, ...]
    pausing: tuple[SlowRank, ...]
    links: tuple[SlowLink, ...]
    group: str
    """What the slow ranks have in common, ``""`` if nothing: a host, a stage."""


def judge_ranks(view: RunView, shares: Shares) -> RankReport:
    """What the record says about ranks; nothing with fewer than two."""
    if len(view.ranks) < 2 or not len(view.shown_steps):
        return RankReport(slow=(), pausing=(), links=(), group="")
    peers = peers_of(view)
    excess = _excess(shares.work, peers)
    step = mean_known(shares.wall)
    slow = _slow_ranks(view, shares, peers, excess, float(step))
    rest = np.array([rank for rank in range(len(view.ranks)) if view.ranks[rank] not in {one.rank for one in slow}])
    pausing = _pausing_ranks(view, shares, peers, excess, float(step), rest) if len(rest) else ()
    return RankReport(
        slow=slow, pausing=pausing, links=_slow_links(view, shares, float(step)), group=_common(view, slow)
    )


def peers_of(view: RunView) -> list[list[int]]:
    """Positions of ranks that do the same work."""
    groups: dict[int, list[int]] = {}
    for position, facts in enumerate(view.facts):
        groups.setdefault(int(dict(facts.get("place", {})).get("pp", 0)), []).append(position)
    return list(groups.values())


def _excess(values: Numbers, peers: Sequence[Sequence[int]]) -> Numbers:
    """[ranks, steps]: beyond the median of a rank's peers, of the others alone where they are few."""
    found = np.full_like(values, np.nan)
    for group in peers:
        own = values[group]
        if len(group) == 1:
            found[group] = 0.0
        elif len(group) <= 4:
            for index, position in enumerate(group):
                found[position] = own[index] - median_known(np.delete(own, index, axis=0), axis=0)
        else:
            found[group] = own - median_known(own, axis=0)
    return found


def _slow_ranks(
    view: RunView, shares: Shares, peers: Sequence[Sequence[int]], excess: Numbers, step: float
) -> tuple[SlowRank, ...]:
    known = np.nan_to_num(excess)
    worst = known.argmax(axis=0)
    chosen: dict[int, tuple[int, float]] = {}
    for position in range(len(view.ranks)):
        start = began(known[position])
        late = known[position, start:]
        typical = float(np.median(late)) if len(late) else 0.0
        last = float((worst[start:] == position).mean()) if len(late) else 0.0
        # several slow ranks share the blame: being far beyond the peers in most steps is enough
        often = float((late > 0.5 * typical).mean()) if typical > 0 else 0.0
        if typical < LEAST_SHARE * step or (last < MOST_STEPS and often < 0.9):
            continue
        chosen[position] = start, typical
    costs = _costs(np.nan_to_num(shares.work), peers, chosen)
    found = []
    for position, (start, _) in chosen.items():
        late = known[position, start:]
        cause, detail = _cause(view, shares, peers, position, start)
        found.append(
            SlowRank(
                rank=view.ranks[position],
                place=place_of(view, position),
                seconds=float(late.mean()),
                share=costs[position] / float(mean_known(shares.wall[:, start:])),
                since=int(view.shown_steps[start]) if start else None,
                cause=cause,
                detail=detail,
                steps=len(late),
            )
        )
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _costs(work: Numbers, peers: Sequence[Sequence[int]], slow: Mapping[int, tuple[int, float]]) -> dict[int, float]:
    """Seconds of a mean step that each slow rank costs: what it comes after the last of its peers, none being slow.

    Args:
        work: [ranks, steps], a rank's own.
        slow: by position: since when, and how far it is beyond its peers in a typical step.
    """
    healed = work.copy()
    for position, (start, typical) in slow.items():
        healed[position, start:] -= typical
    found = {}
    for position, (start, _) in slow.items():
        group = next(each for each in peers if position in each)
        last = healed[group, start:].max(axis=0)
        found[position] = float(np.maximum(work[position, start:] - last, 0.0).mean())
    return found


def began(series: Numbers) -> int:
    """Where a series steps up for good; 0 where it does not."""
    if len(series) < 10:
        return 0
    sums = np.concatenate(([0.0], np.cumsum(series)))
    cuts = np.arange(5, len(series) - 4)
    before = sums[cuts] / cuts
    after = (sums[-1] - sums[cuts]) / (len(series) - cuts)
    # the cut that explains most of the variance
    gain = (after - before) ** 2 * cuts * (len(series) - cuts)
    best = int(gain.argmax())
    cut = int(cuts[best])
    grown = after[best] > 0 and before[best] < 0.4 * after[best]
    noise = float(np.median(np.abs(np.diff(series)))) + 1e-12
    return cut if grown and after[best] - before[best] > 2 * noise else 0


def _cause(view: RunView, shares: Shares, peers: Sequence[Sequence[int]], position: int, start: int) -> tuple[str, str]:
    """What of the rank's own work is larger, and what the machine says about it."""

    def beyond(values: Numbers) -> float:
        return float(np.nanmean(np.nan_to_num(_excess(values, peers)[position, start:])))

    parts = {name: beyond(shares.own[name]) for name in OWN}
    total = max(sum(parts.values()), 1e-9)
    collections, queue = beyond(shares.collections), beyond(shares.queue)
    phase = max(parts, key=lambda name: parts[name])
    numbers = ", ".join(
        f"{name} {value * 1e3:+.1f} ms" for name, value in sorted(parts.items(), key=lambda item: -item[1])[:3]
    )
    if collections > 0.5 * total:
        return "garbage collection", f"{collections * 1e3:.1f} ms more of it than its peers"
    clock = _clock(view, position, start)
    if phase in ("forward", "backward", "optimizer") and clock is not None and clock[0] < 0.96 * clock[1]:
        return "clock", f"{clock[0]:.0f} MHz, its peers {clock[1]:.0f} MHz{clock[2]}; {numbers}"
    if queue > 0.5 * total:
        return "processor", f"its training thread waited {queue * 1e3:.1f} ms more for a processor; {numbers}"
    return phase, numbers


def _clock(view: RunView, position: int, start: int) -> tuple[float, float, str] | None:
    """(its clock, its peers' median, why) in MHz."""
    if not view.knows("gpu_clock_mhz"):
        return None
    clocks = mean_known(view.column("gpu_clock_mhz")[:, start:], axis=1)
    if np.isnan(clocks[position]) or np.isnan(clocks).all():
        return None
    bits = view.column("gpu_throttle_bits")[position, start:]
    seen = np.bitwise_or.reduce(bits[~np.isnan(bits)].astype(np.int64)) if (~np.isnan(bits)).any() else 0
    reasons = [name for bit, name in SLOW_BITS.items() if int(seen) & bit]
    return float(clocks[position]), float(np.nanmedian(clocks)), f" ({', '.join(reasons)})" if reasons else ""


def _pausing_ranks(
    view: RunView, shares: Shares, peers: Sequence[Sequence[int]], excess: Numbers, step: float, rest: Numbers
) -> tuple[SlowRank, ...]:
    known = np.nan_to_num(excess)
    usual = np.median(known, axis=1, keepdims=True)
    pauses = np.where(known - usual > _PAUSE * step, known - usual, 0.0)
    worst = pauses.argmax(axis=0)
    found = []
    for position in rest.astype(int):
        own = np.where(worst == position, pauses[position], 0.0)
        times = int((own > 0).sum())
        share = float(own.mean()) / step
        if times < 2 or share < LEAST_SHARE / 2:
            continue
        collected = np.minimum(shares.collections[position], own)
        cause = "garbage collection" if collected.sum() > 0.5 * own.sum() else _paused_in(shares, position, own > 0)
        found.append(
            SlowRank(
                rank=view.ranks[position],
                place=place_of(view, position),
                seconds=float(own.mean()),
                share=share,
                since=None,
                cause=cause,
                detail=f"{times} pauses of {own[own > 0].mean() * 1e3:.0f} ms on average in {own.size} steps",
                steps=times,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _paused_in(shares: Shares, position: int, steps: NDArray[np.bool_]) -> str:
    grown = {
        name: float(np.nanmean(shares.own[name][position][steps]) - np.nanmedian(shares.own[name][position]))
        for name in OWN
    }
    return max(grown, key=lambda name: grown[name])


def _slow_links(view: RunView, shares: Shares, step: float) -> tuple[SlowLink, ...]:
    """Compares groups of one axis: what the last of a group waits is the collective itself."""
    found = []
    for axis in AXES[:-1]:
        groups = groups_of(view, axis)
        sent = view.column(f"sent_{axis}_kb")
        if len(groups) < 3 or not np.nansum(sent):
            continue
        waits = shares.axis_waits[axis]
        itself = np.array([float(np.mean(np.nanmin(waits[group], axis=0))) for group in groups])
        kilobytes = np.array([float(np.nanmean(sent[group])) for group in groups])
        pace = itself / np.maximum(kilobytes, 1e-9)
        usual = float(np.median(pace))
        for index, group in enumerate(groups):
            more = (pace[index] - usual) * kilobytes[index]
            if usual > 0 and pace[index] > 1.5 * usual and more > LEAST_SHARE * step:
                found.append(
                    SlowLink(
                        axis=axis,
                        ranks=tuple(view.ranks[position] for position in group),
                        seconds=more,
                        share=more / step,
                        times=float(pace[index] / usual),
                        gb_per_second=kilobytes[index] * 1024 / itself[index] / 1e9,
                    )
                )
    return tuple(sorted(found, key=lambda one: -one.seconds))


def groups_of(view: RunView, axis: str) -> list[list[int]]:
    """Positions of ranks that differ along an axis only; those with at least two."""
    places = [dict(facts.get("place", {})) for facts in view.facts]
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for position, place in enumerate(places):
        # experts lie across data-parallel ranks: their index says nothing more about a dense axis
        key = tuple(sorted((name, index) for name, index in place.items() if name not in (axis, "ep")))
        groups.setdefault(key, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def place_of(view: RunView, position: int) -> str:
    facts: Mapping[str, object] = view.facts[position]
    degrees, place = facts.get("degrees", {}), facts.get("place", {})
    assert isinstance(degrees, Mapping) and isinstance(place, Mapping)
    axes = ", ".join(f"{axis} {place.get(axis, 0)}" for axis, size in degrees.items() if size > 1)
    host = facts.get("host", "")
    return f"{axes}{' on ' * bool(axes and host)}{host}"


def _common(view: RunView, slow: Sequence[SlowRank]) -> str:
    """A host or a coordinate that all slow ranks share, and that not everybody has."""
    if len(slow) < 2:
        return ""
    positions = [view.ranks.index(one.rank) for one in slow]
    hosts = Counter(str(view.facts[position].get("host", "")) for position in positions)
    everyone = Counter(str(facts.get("host", "")) for facts in view.facts)
    (host, number), *others = hosts.most_common()
    if not others and len(everyone) > 1 and number == everyone[host]:
        return f"all {number} ranks of host {host}"
    for axis in ("pp", "tp", "dp", "cp", "ep"):
        indices = {dict(view.facts[position].get("place", {})).get(axis, 0) for position in positions}
        sizes = {dict(facts.get("place", {})).get(axis, 0) for facts in view.facts}
        if len(indices) == 1 and len(sizes) > 1:
            return f"all at {axis} {indices.pop()}"
    return ""
