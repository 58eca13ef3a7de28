"""What would the predicted best layout have cost, among those that somebody measured?

A cell is one model on one number of GPUs with at least two layouts measured. Its regret: the measured time a token of
the layout that is predicted to be fastest, among those predicted to fit, over that of the fastest measured, less 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planner.validate import Cell, Scored


def cells(scored: Sequence[Scored]) -> list[Cell]:
    """Of predictions as they are; `validate.cross_validate` has those of profiles that never saw the cell."""
    by_cell: dict[tuple[object, ...], list[Scored]] = {}
    for one in scored:
        run, work = one.run, one.run.workload
        if run.step_seconds is not None and not run.secondary:
            key = (run.source.key, run.model_name, run.cluster.gpus, run.cluster.gpu.name, work.seq_len, work.precision)
            by_cell.setdefault((*key, run.release), []).append(one)
    return [_cell(found) for found in by_cell.values() if len({one.run.workload for one in found}) > 1]


def _cell(found: Sequence[Scored]) -> Cell:
    judged = any(one.run.memory_bytes is not None for one in found)

    def expected(one: Scored) -> tuple[bool, float]:
        # where nobody published memory, fits are not judged either
        return judged and not one.predicted_fits, one.predicted_seconds / one.run.workload.tokens

    def measured(one: Scored) -> float:
        return (one.run.step_seconds or 0.0) / one.run.workload.tokens

    order, best = sorted(found, key=expected), min(found, key=measured)
    first = found[0].run
    return Cell(
        source=first.source.key,
        model=first.model_name,
        gpus=first.cluster.gpus,
        rows=len(found),
        regret=measured(order[0]) / measured(best) - 1,
        rank=order.index(best) + 1,
    )
