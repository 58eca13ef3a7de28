"""A capture's work by module and phase, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.explain.attribution import Attribution
from paceline.explain.cause import Cause
from paceline.observe.capture_request import TRACES
from paceline.observe.telemetry.record import FOLDER
from paceline.report import units
from paceline.report.table import Table, table

_MOST = 24
LEAST_ATTRIBUTED = 0.95


def captures_of(folder: Path) -> list[Path]:
    """Captures of a run folder, the newest step of each rank."""
    newest: dict[str, Path] = {}
    for path in sorted((folder / FOLDER).glob(TRACES)):
        newest[path.name.partition("-step-")[0]] = path
    return list(newest.values())


def module_table(found: Attribution, title: str) -> Table:
    """Where the time went, by module (blocks together) and phase."""
    what = "GPU time" if found.on_gpu else "time of operators on the CPU"
    rows = []
    for (module, phase), row in list(found.by_module().items())[:_MOST]:
        speed = row.flops / row.seconds / 1e12 if row.seconds else 0.0
        rows.append(
            (
                module or "-",
                phase or "-",
                units.duration(row.seconds),
                units.percent(row.seconds / found.seconds if found.seconds else 0.0),
                f"{row.calls:,}",
                units.count(row.flops) if row.flops else "-",
                f"{speed:.3g}" if row.flops else "-",
                units.size(row.bytes_moved) if row.bytes_moved else "-",
            )
        )
    return table(
        ("module", "phase", ">time", ">share", ">calls", ">FLOPs", ">TFLOP/s", ">bytes in"),
        rows,
        title=title,
        notes=(
            *([_over(found)] if found.steps else []),
            f"{found.attributed:.1%} of the {what} has an owner. FLOPs are of matrix products and fused attention "
            "(half of it where it is causal; other masks are not regarded), by the shapes of operators; * stands for "
            "all blocks.",
        ),
    )


def _over(found: Attribution) -> str:
    if found.steps == 1:
        return "Of one captured step."
    each = units.duration(found.seconds / found.steps)
    return f"Sums over {found.steps} captured steps, of {each} each on average."


def attribution_data(found: Attribution) -> dict[str, Any]:
    """With operators and shapes, the longest first."""
    return {
        "seconds": found.seconds,
        "steps": found.steps,
        "attributed": found.attributed,
        "on_gpu": found.on_gpu,
        "rows": [
            {
                "module": row.module,
                "phase": row.phase,
                "operator": row.operator,
                "shapes": row.shapes,
                "kind": row.kind,
                "seconds": row.seconds,
                "calls": row.calls,
                "flops": row.flops,
                "bytes": row.bytes_moved,
            }
            for row in found.rows[:400]
        ],
    }


def unattributed(found: Attribution) -> Iterator[Cause]:
    """A capture whose work has too few owners is said to be one."""
    if found.seconds and found.attributed < LEAST_ATTRIBUTED:
        yield Cause(
            id="explain.not-attributed",
            subject=f"{1 - found.attributed:.0%} of the captured time has no owner",
            evidence="Its launches lie outside of named spans, or were not recorded.",
            next_step="Not determined: capture whole steps with the CPU's activity too.",
            share=None,
        )
