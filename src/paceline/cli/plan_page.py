"""The page of `paceline plan --html`: where time and memory go, and which layouts are on the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.planner.rank import Candidate, Ranking
from paceline.planner.reasons import PART_NAMES, Reasons, layout_text
from paceline.report import chart, units
from paceline.report.html import page, section, sentences, table_html
from paceline.report.table import Table

KINDS = ("weights", "gradients", "optimizer", "gathered", "activations", "logits", "framework")
"""Of `StageMemory`."""
_MOST_POINTS = 600
_MOST_STAGES = 32


def plan_page(
    title: str, question: Table, layouts: Table, shown: Sequence[Candidate], ranking: Ranking, why: Reasons
) -> str:
    """Everything that the terminal shows, with pictures."""
    room = ranking.space.cluster.gpu.memory_bytes / 2**30
    best = shown[0]
    stages = best.estimate.stages[:_MOST_STAGES]
    memory = [{kind: getattr(stage, kind) / 2**30 for kind in KINDS} for stage in stages]
    names = [f"{place}. {layout_text(found.config)}" for place, found in enumerate(shown, 1)]
    return page(
        title,
        [
            table_html(question),
            *([section("Does it fit?", sentences(why.answer))] if why.answer else []),
            section("Layouts", table_html(layouts)),
            section(
                "Where a step goes",
                chart.stacked_bars(names, _parts(shown), unit="s", title="Step time", written=units.duration),
            ),
            section(
                "Memory of the first, by position in the pipeline",
                chart.stacked_bars(
                    [f"pipeline rank {rank}" for rank in range(len(stages))],
                    memory,
                    unit="GiB",
                    limit=room,
                    title="Memory",
                ),
            ),
            section("Speed against memory", _front(ranking, room)),
            section("The first", sentences(why.first)),
            section("In place of it", sentences(why.others)),
            section("Not in the table", sentences(why.rejected)),
            section("What would help", sentences([f"{found.subject}. {found.next_step}" for found in why.helps])),
        ],
    )


def _parts(shown: Sequence[Candidate]) -> list[Mapping[str, float]]:
    """Seconds."""
    return [{PART_NAMES.get(name, name): value for name, value in found.estimate.parts.items()} for found in shown]


def _front(ranking: Ranking, room: float) -> str:
    """All predicted layouts; a line through those that no other beats in both."""
    found = [*ranking.fitting[: _MOST_POINTS * 3 // 4], *ranking.too_large[: _MOST_POINTS // 4]]
    points = [
        chart.Point(
            x=one.estimate.memory_gib,
            y=one.tokens_per_second,
            label=f"{layout_text(one.config)}: {one.tokens_per_second:,.0f} tokens/s, "
            f"{one.estimate.memory_gib:.1f} GiB",
            series=0 if one.estimate.fits else 3,
        )
        for one in found
    ]
    line: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point.x, -point.y)):
        if not line or point.y > line[-1][1]:
            line.append((point.x, point.y))
    return chart.scatter(
        points,
        x_title="GiB on the fullest card",
        y_title="tokens/s",
        title="Every predicted layout",
        line=line,
        x_limit=room,
    ) + chart.legend(["fits", "", "", "does not fit"])
