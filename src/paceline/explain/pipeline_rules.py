"""Does the pipeline wait for itself: for filling and emptying, or for a stage with more work?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.explain.cause import Cause
from paceline.explain.ranks import RankReport
from paceline.explain.run_folder import RunView
from paceline.explain.shares import Shares, mean_known, of_step


def bubble_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
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
