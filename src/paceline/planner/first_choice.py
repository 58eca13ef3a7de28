"""What would the predicted best layout have cost, among those that somebody measured?

A cell is one model on one number of GPUs with at least two layouts measured. Its regret: the measured time a token of
the first choice over that of the fastest measured, less 1. The choice is a planner's (`planner/rank.py`): of those
predicted to fit and within `ALIKE` of the fastest, the plainest, then the lightest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.costs.workload import Workload
from paceline.planner.published import PublishedRun
from paceline.planner.rank import ALIKE
from paceline.planner.scored import Scored


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one number of GPUs, of at least two layouts."""

    source: str
    model: str
    gpus: int
    rows: int
    regret: float
    """Measured time a token of the predicted best layout over the measured best's, less 1."""
    rank: int
    """Place of the measured best in the predicted order, from 1."""


def cell_key(run: PublishedRun) -> str:
    work, cluster = run.workload, run.cluster
    parts = (run.source.key, run.model_name, cluster.gpus, cluster.gpu.name, work.seq_len, work.precision, run.release)
    return "|".join(map(str, parts))


def cells_of(runs: Sequence[PublishedRun]) -> dict[str, list[int]]:
    """Positions of the timed runs of every cell of at least two layouts."""
    found: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        if run.step_seconds is not None and not run.secondary:
            found.setdefault(cell_key(run), []).append(position)
    return {key: rows for key, rows in found.items() if len({runs[row].workload for row in rows}) > 1}


def cells(scored: Sequence[Scored]) -> list[Cell]:
    """Of predictions as they are; `validate.cross_validate` has those of profiles that never saw the cell."""
    return [_cell([scored[row] for row in rows]) for rows in cells_of([one.run for one in scored]).values()]


def _cell(found: Sequence[Scored]) -> Cell:
    # where nobody published memory, fits are not judged either
    judged = any(one.run.memory_bytes is not None for one in found)
    fitting = [one for one in found if one.predicted_fits or not judged] or list(found)
    enough = (1 + ALIKE) * min(map(_expected, fitting))
    first = min(
        (one for one in fitting if _expected(one) <= enough),
        key=lambda one: (_oddness(one.run.workload), one.predicted_bytes, _expected(one)),
    )
    order = sorted(found, key=lambda one: (one is not first, one not in fitting, _expected(one)))
    best = min(found, key=_measured)
    return Cell(
        source=first.run.source.key,
        model=first.run.model_name,
        gpus=first.run.cluster.gpus,
        rows=len(found),
        regret=_measured(first) / _measured(best) - 1,
        rank=order.index(best) + 1,
    )


def _expected(one: Scored) -> float:
    """Seconds a token."""
    return one.predicted_seconds / one.run.workload.tokens


def _measured(one: Scored) -> float:
    return (one.run.step_seconds or 0.0) / one.run.workload.tokens


def _oddness(work: Workload) -> int:
    return sum(axis > 1 for axis in (work.tp, work.pp, work.cp, work.ep, work.dp_replicate, work.stages_per_rank))
