"""A pipeline schedule as lists of actions, one for each pipeline rank, and what follows from them: bubble and memory.

| schedule | stages a rank | bubble beside the work (F = I = W) | activations held at most (stage x micro-batch) |
| --- | --- | --- | --- |
| `1f1b` | 1 | (p - 1)(F + I + W) | rank r: min(m, p - r) |
| `interleaved_1f1b` | v | (p - 1)(F + I + W) of a stage v times smaller | rank r: min(mv, (v - 1)g + 2(p - r) - 1) |
| `zero_bubble` | v | (p - 1)(F + I - W) | min(mv, (v - 1)g + p), the same on all ranks |
| `zbv` | 2 | (p - 1)F of a stage twice smaller | min(2m, 2p), the same on all ranks |

p pipeline ranks, m micro-batches, v stages a rank, g micro-batches of a round: m cut into max(1, m // p) rounds as
equal as can be, so p where p divides m. Every schedule takes any m >= 1; with m < 2p - 1 `zbv` has idle time in its
middle. F forward, B whole backward, I gradients of inputs only, W those of weights.

Sources: 1F1B and interleaved: arXiv:2104.04473, section 2.2 (the last round may be uneven here). Zero bubble, its H1
form (memory of 1F1B): arXiv:2401.10241, section 3. V placement: arXiv:2405.15362, section 3 (V-ZB).
The runtime, `parallel/pipeline.py`, executes exactly these lists; `simulate` here proves that none can stall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble", "zbv")


class Action(NamedTuple):
    """What a rank does next, for one micro-batch on one of its stages."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


Actions = tuple[Action, ...]


def why_not(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> str:
    """The reason why a schedule does not admit these numbers; empty if it does."""
    if name not in SCHEDULES:
        return f"there is no schedule {name!r}; there are {', '.join(SCHEDULES)}"
    if micro_batches < 1:
        return "a step needs a micro-batch"
    if name == "1f1b" and stages_per_rank != 1:
        return f"1f1b has one stage a rank, not {stages_per_rank}; interleaved_1f1b has more"
    if name == "zbv" and stages_per_rank != 2:
        return f"zbv has two stages a rank, not {stages_per_rank}"
    return ""


def stages_of(name: str, ranks: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages on one rank, in the order of the model."""
    if name == "zbv":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * stages_per_rank, ranks))


def rank_of(name: str, ranks: int, stage: int) -> int:
    """Loop: stage s on rank s % p. V (zbv): down the ranks and back again."""
    return 2 * ranks - 1 - stage if name == "zbv" and stage >= ranks else stage % ranks


@cache
def schedule(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[Actions, ...]:
    """By pipeline rank: its actions in order. Every stage sees each micro-batch once forward and once backward."""
    return tuple(rank_schedule(name, ranks, stages_per_rank, micro_batches, rank) for rank in range(ranks))


def rank_schedule(name: str, ranks: int, stages_per_rank: int, micro_batches: int, rank: int) -> Actions:
    """The actions of one rank of `schedule`."""
    reason = why_not(name, ranks, stages_per_rank, micro_batches)
    assert not reason, reason
    if name == "zbv":
        return _v_shaped(ranks, rank, micro_batches)
    return _one_forward_one_backward(ranks, stages_per_rank, rank, micro_batches, name == "zero_bubble")


def _one_forward_one_backward(p: int, v: int, rank: int, m: int, split: bool) -> Actions:
    """Forwards until the first gradient can be here, then forward and backward in turn, then the backwards left.

    ``split``: the weights' part of a backward is put off, on rank r by r micro-batches: as many as rank 0 holds more
    activations than rank r. It fills the gaps at the end.
    """
    rounds = _rounds(m, p)
    loop = [rank + p * chunk for chunk in range(v)]
    forwards = [(stage, k) for group in rounds for stage in loop for k in group]
    backwards = [(stage, k) for group in rounds for stage in reversed(loop) for k in group]
    # interleaved 1F1B starts twice as many hops ahead, so that a hop's transfer hides behind another chunk's work;
    # zero bubble stays with one and the memory that goes with it
    ahead = (2 if v > 1 and not split else 1) * (p - 1 - rank)
    warm_up = min(len(forwards), (v - 1) * len(rounds[0]) + ahead)
    actions = [Action("F", *forward) for forward in forwards[:warm_up]]
    for done, backward in enumerate(backwards):
        if warm_up + done < len(forwards):
            actions.append(Action("F", *forwards[warm_up + done]))
        actions.append(Action("I" if split else "B", *backward))
        if split and done >= rank:
            actions.append(Action("W", *backwards[done - rank]))
    if split:
        actions += [Action("W", *backward) for backward in backwards[max(0, len(backwards) - rank) :]]
    return tuple(actions)


def _rounds(m: int, p: int) -> list[range]:
    """m micro-batches in max(1, m // p) runs, as equal as can be, longer ones first."""
    count = max(1, m // p)
    size, longer = divmod(m, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _v_shaped(p: int, rank: int, m: int) -> Actions:
    """Stage ``rank`` on the way down, stage 2p - 1 - ``rank`` on the way back up.

    Made for at least 2p - 1 micro-batches, which the start needs; of fewer, those that are not there are left out.
    """
    down, up = rank, 2 * p - 1 - rank
    made = max(m, 2 * p - 1)
    next_one: dict[tuple[Kind, int], int] = {}
    actions: list[Action] = []

    def do(*steps: tuple[Kind, int]) -> None:
        for step in steps:
            micro_batch = next_one.get(step, 0)
            if micro_batch < made:
                next_one[step] = micro_batch + 1
                if micro_batch < m:
                    actions.append(Action(step[0], step[1], micro_batch))

    for _ in range(2 * (p - rank) - 1):
        do(("F", down))
    for _ in range(rank):
        do(("F", up), ("F", down))
    for _ in range(p - rank):
        do(("F", up), ("I", up), ("W", up))
    while next_one["F", up] < made:
        do(("F", down), ("I", down), ("W", down), ("F", up), ("I", up), ("W", up))
    for _ in range(rank):
        do(("I", down), ("I", up))
    for _ in range(p - rank):
        do(("I", down), ("W", down))
    for stage in (up, down):
        for _ in range(p):
            do(("W", stage))
    return tuple(actions)


# ---- what follows from the lists


@dataclass(frozen=True, kw_only=True)
class ActionSeconds:
    """How long the actions of a stage take. In any unit; the defaults are the usual model, W = I = F."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    send: float = 0.0
    """From the end of an action on one rank to its result on another."""
    stage_scale: tuple[float, ...] = ()
    """By stage, times the three durations; empty = all 1."""

    def of(self, action: Action) -> float:
        duration = {
            "F": self.forward,
            "B": self.input_gradient + self.weight_gradient,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }[action.kind]
        return duration * (self.stage_scale[action.stage] if self.stage_scale else 1.0)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step."""

    end: dict[Action, float]
    """When each action is done; the step begins at 0."""
    busy: tuple[float, ...]
    """By rank: time spent in actions."""

    @property
    def makespan(self) -> float:
        return max(self.end.values())

    @property
    def bubble(self) -> float:
        """Idle part of all ranks' time, 0 ... 1."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan)


class StalledError(RuntimeError):
    """A set of action lists in which ranks wait for each other: a mistake in the lists, never in a recipe."""


def simulate(lists: Sequence[Actions], seconds: ActionSeconds | None = None) -> Timeline:
    """Every rank runs its list in order; an action waits for what it reads, and a send never holds up its sender.

    Raises:
        StalledError: the lists cannot be run to their end.
    """
    seconds = seconds or ActionSeconds()
    home = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    end: dict[Action, float] = {}
    clock, position = [0.0] * len(lists), [0] * len(lists)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                inputs = [_finished(end, *needed) for needed in _inputs(action, last_stage=len(home) - 1)]
                if None in inputs:
                    break
                ready = [
                    when + (seconds.send if home[source.stage] != rank else 0.0)
                    for source, when in (found for found in inputs if found is not None)
                ]
                clock[rank] = max([clock[rank], *ready]) + seconds.of(action)
                end[action] = clock[rank]
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} at {actions[at]}"
        for rank, (actions, at) in enumerate(zip(lists, position, strict=True))
        if at < len(actions)
    ]
    if stuck:
        raise StalledError("; ".join(stuck))
    return Timeline(end=end, busy=tuple(sum(map(seconds.of, actions)) for actions in lists))


def _inputs(action: Action, last_stage: int) -> Iterator[tuple[tuple[Kind, ...], int, int]]:
    """(kinds, stage, micro-batch) that must be done before: one of the kinds."""
    kind, stage, micro_batch = action
    if kind == "F":
        if stage > 0:
            yield ("F",), stage - 1, micro_batch
    elif kind == "W":
        yield ("I",), stage, micro_batch
    else:
        yield ("F",), stage, micro_batch
        if stage < last_stage:
            yield ("B", "I"), stage + 1, micro_batch


def _finished(
    end: dict[Action, float], kinds: tuple[Kind, ...], stage: int, micro_batch: int
) -> tuple[Action, float] | None:
    for kind in kinds:
        action = Action(kind, stage, micro_batch)
        if action in end:
            return action, end[action]
    return None


def bubble(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, seconds: ActionSeconds | None = None
) -> float:
    """Idle part of a step, 0 ... 1. 1F1B with free transfers: (p - 1) / (m + p - 1)."""
    return simulate(schedule(name, ranks, stages_per_rank, micro_batches), seconds).bubble


def peak_in_flight(actions: Actions) -> int:
    """Most (stage, micro-batch) pairs whose activations a rank holds at a time: from F to the end of B, or of W."""
    held = peak = 0
    for action in actions:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, held)
    return peak
