"""Writes docs/accuracy.md and its pictures: every published run predicted by a profile that never saw its model.

python docs/make_accuracy.py                        # the rows of docs/measured/published_runs.csv, half a minute
python docs/make_accuracy.py RUNS.csv MORE.csv      # other tables with the same columns
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from accuracy_notes import memory_notes, percent, time_notes, why_missed
from accuracy_own import own_runs

from paceline.costs.profiles import find_profile
from paceline.planner.first_choice import Cell
from paceline.planner.fit_recipes import RECIPES
from paceline.planner.published import KERNELS, NotScored, PublishedRun, read_run
from paceline.planner.run_sources import SOURCES
from paceline.planner.run_tables import read_rows
from paceline.planner.scored import Errors
from paceline.planner.validate import SourceReport, cross_validate, report, score

DOCS = Path(__file__).parent
RUNS = DOCS / "measured" / "published_runs.csv"
TARGET = DOCS / "accuracy.md"
PICTURES = DOCS / "pictures"


class Goal(NamedTuple):
    """What was asked for."""

    time: float
    others: str = ""


GOALS = {
    "vtrain_multi": Goal(0.07, "vTrain's own simulator: 14.7 %"),
    "vtrain_single": Goal(0.08, "vTrain's own simulator: 8.4 %"),
    "nanotron": Goal(0.15),
    "bridge": Goal(0.08),
    "llm_foundry": Goal(0.08),
    "torchtitan": Goal(0.08),
    "sc21": Goal(0.08),
    "korthikanti": Goal(0.08),
}
MEMORY_MEDIAN = {"nanotron": 0.05, "bridge": 0.07, "torchtitan": 0.07}
DENSE = ("LLAMA",)

HEAD = """\
# How far off is the planner?

<!-- Written by docs/make_accuracy.py. Change that or src/paceline/costs, then run it again (half a minute). -->

`paceline plan` predicts step time and memory of a layout without running it. This page holds its predictions against
runs that others measured and published: {rows} rows, {scored} of them scored. **Every row is predicted by a profile
that was fitted without any row of its model**: a source's models are left out one after the other, and the profile is
fitted on the rest of the source, from the same round numbers each time. Nothing on this page was fitted on the row that
it judges.

- *Inputs* are the model's sizes, the layout, the batch, the GPU and the nodes. *Fitted* are the few numbers listed
  [below](#what-is-fitted), each with a meaning and a unit. Which numbers to fit, and the arithmetic itself, were chosen
  while looking at these tables; only the values are blind.
- Errors are absolute and relative to what was measured. MAPE is their mean: it is ruled by the few worst rows; the
  median says what to expect of a usual row.
- A goal that is missed stays in the table, with its cause underneath.

## Step time

{time}

{time_notes}

### Publications that no fit has seen

Scored by the shipped profile of the nearest framework as it is, which was fitted on other publications only.

{unseen}

### Paceline's own runs

{own}

## Memory

{memory}

{memory_notes}

## Does it fit?

{fit}

## What does the first choice cost?

Of the layouts that were measured for one model on one number of GPUs (a cell; same precision, sequence length and
release), the planner's first choice is made as `paceline plan` does: of those predicted to fit and within 1 % of the
fastest, the plainest, then the lightest. Its *regret* is how much longer it took, when measured, than the best of the
cell. Each cell is left out of the fit as a whole.

{regret}

{cells}

## Predicted against measured

Both axes are logarithmic; the line is a perfect prediction.

{pictures}

## Which rows are not scored?

{not_scored}

## What is fitted

Least absolute log ratios (times) and least absolute relative errors (memory; linear), each model of a
source with the same weight. The value is that of the shipped profile, which is fitted on all rows of its sources
(`src/paceline/costs/profiles.py`); the meaning of every number stands there. A number at the end of its range
(`RANGES` in `planner/fit_recipes.py`) says that the arithmetic lacks something there which the number stands in for:
HBM above 0.95 of its rate, torchtitan's 0.2, a product above its best.

{fitted}

## Columns

`docs/measured/published_runs.csv`, and any file that `paceline plan validate` reads. Empty = not published.

| column | meaning |
| --- | --- |
| id, source, model | row id, publication (in brackets: release or table), model as published |
| layers, hidden, heads, kv_heads, ffn, vocab, experts, topk | sizes; `ffn` is per expert |
| seq, mbs, gbs | sequence length; micro-batch and global batch in sequences |
| gpu, n_gpus, gpus_per_node, precision | machines; bf16, fp16, fp8, mxfp8, nvfp4 |
| tp, pp, vpp, cp, ep, dp, zero | layout; `vpp` runs of layers on a pipeline rank; zero 0-3 or FSDP |
| recompute | none, full, selective, selective:modules |
| tflops_per_gpu, mfu_pct, tokens_per_s_per_gpu, step_time_s | measured; the last that is given counts |
| mem_GiB | measured, peak of a rank |
| notes | words that decide how a row is read (`planner/published.py`): `async TP`, `CRASHED`, {kernels} |
| evidence | `secondary` = a third party's copy, never counted |

Convention of TFLOP/s by source: {conventions}.
"""


# ---- tables


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    marks = [{"r": "---:"}.get(mark, "---") for mark in align.ljust(len(header), "l")]
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join(marks) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def errors_row(name: str, errors: Errors, goal: str, met: str) -> list[str]:
    return [
        name, str(errors.rows), percent(errors.mape), percent(errors.median), percent(errors.p90),
        percent(errors.worst, 0), goal, met,
    ]  # fmt: skip


def some(one: SourceReport, *, dense: bool) -> Errors | None:
    """Time errors of dense or of mixture-of-experts models."""
    rows = [row for row in one.scored if (row.run.workload.model.num_experts == 0) == dense]
    return Errors.of([row.time_error for row in rows if row.time_error is not None])


def time_table(reports: Sequence[SourceReport]) -> str:
    rows = []
    for one in reports:
        if one.time is None:
            continue
        goal = GOALS[one.key]
        met = "met" if one.time.mape <= goal.time else "**missed**"
        rows.append(errors_row(one.title, one.time, f"<= {percent(goal.time, 0)}", met))
        if one.irregular and one.regular_time is not None:
            rows.append(errors_row("... without irregular rows", one.regular_time, "", ""))
        dense, sparse = some(one, dense=True), some(one, dense=False)
        if dense and sparse:
            rows.append(errors_row("... dense models", dense, "", ""))
            rows.append(errors_row("... mixtures of experts", sparse, "", ""))
    everything = Errors.of([e for one in reports for row in one.scored if (e := row.time_error) is not None])
    assert everything is not None
    rows.append(errors_row("**all**", everything, "", ""))
    return table(["source", "rows", "MAPE", "median", "p90", "worst", "goal (MAPE)", ""], rows, "lrrrrrll")


def unseen_table(reports: Sequence[SourceReport]) -> str:
    rows = []
    for one in reports:
        profile = find_profile(one.scored[0].run.source.profile).title
        for what, errors in (("step time", one.time), ("memory", one.memory)):
            if errors is not None:
                rows.append([one.title, profile, what, *errors_row("", errors, "", "")[1:6]])
    return table(["source", "profile", "of", "rows", "MAPE", "median", "p90", "worst"], rows, "lllrrrrr")


def memory_table(reports: Sequence[SourceReport]) -> str:
    rows = []
    for one in reports:
        if one.memory is None:
            continue
        goal = MEMORY_MEDIAN.get(one.key, 0.07)
        met = "met" if one.memory.median <= goal else "**missed**"
        rows.append(errors_row(one.title, one.memory, f"median <= {percent(goal, 0)}", met))
    return table(["source", "rows", "MAPE", "median", "p90", "worst", "goal", ""], rows, "lrrrrrll")


def fit_table(reports: Sequence[SourceReport]) -> str:
    lines = []
    for one in reports:
        if one.fit is None:
            continue
        fit = one.fit
        refused, foreseen = fit.refused / fit.ran, fit.foreseen / max(1, fit.explained)
        lines.append(
            table(
                [one.title, "", "", "goal", ""],
                [
                    ["ran, but refused", f"{fit.refused} of {fit.ran}", percent(refused), "<= 3 %",
                     "met" if refused <= 0.03 else "**missed**"],
                    ["crashed, memory explains it, foreseen", f"{fit.foreseen} of {fit.explained}", percent(foreseen),
                     ">= 90 %", "met" if foreseen >= 0.9 else "**missed**"],
                    ["crashed, memory does not explain it (not scored)", str(fit.others),
                     f"{fit.others_flagged} refused", "", ""],
                ],
                "lrrll",
            )
        )  # fmt: skip
    lines.append(
        "\nMemory explains a crash when the same model, GPU count, tp, pp and ZeRO stage ran at smaller micro-batches\n"
        "and the line through the two largest (through the one, and the exact bytes of its states) exceeds what the\n"
        "allocator can have of the card. An estimate must leave 3 % of that."
    )
    return "\n".join(lines)


def regret_table(cells: Sequence[Cell]) -> str:
    good = sum(cell.regret <= 0.05 for cell in cells)
    third = sum(cell.rank <= 3 for cell in cells)
    met = "met" if good >= 0.9 * len(cells) else "**missed**"
    return (
        f"{good} of {len(cells)} cells ({percent(good / len(cells))}) have a regret of at most 5 %; goal: 90 % of\n"
        f"cells, {met}. The measured best is among the first three choices in {third}.{why_missed(cells)}"
    )


def cell_table(reports: Sequence[SourceReport]) -> str:
    rows = [
        [one.title, cell.model, str(cell.gpus), str(cell.rows), percent(cell.regret), str(cell.rank)]
        for one in reports
        for cell in one.cells
    ]
    header = ["source", "model", "GPUs", "rows", "regret", "place of the best"]
    return f'??? note "Every cell"\n\n{indented(table(header, rows, "llrrrr"))}'


def indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())


def fitted_table() -> str:
    rows = []
    for recipe in RECIPES:
        profile = find_profile(recipe.profile)
        numbers = ", ".join(
            f"{name} {getattr(profile, name):.3g}" for name in (*recipe.time, *recipe.experts, *recipe.memory)
        )
        titles = ", ".join(source.title for source in SOURCES if source.key in recipe.sources)
        rows.append([profile.title, titles, numbers])
    return table(["profile", "rows of", "numbers"], rows)


def not_scored_table(skipped: Sequence[NotScored], runs: Sequence[PublishedRun]) -> str:
    counts: dict[tuple[str, str], int] = {}
    titles = {source.key: source.title for source in SOURCES}
    for row in skipped:
        counts[row.source, _kind(row.reason)] = counts.get((row.source, _kind(row.reason)), 0) + 1
    secondary = sum(run.secondary for run in runs)
    rows = [[titles.get(source, source), reason, str(count)] for (source, reason), count in sorted(counts.items())]
    rows.append(["any", "a third party's copy of a figure (secondary)", str(secondary)])
    return table(["source", "why", "rows"], rows, "llr")


def _kind(reason: str) -> str:
    """Without the numbers that differ from row to row."""
    if "layers cannot be cut" in reason:
        return "more pipeline stages than layers"
    return {"heads is not published": "the model's sizes are not published"}.get(reason, reason)


# ---- pictures

WIDTH, HEIGHT, LEFT, TOP = 440, 360, 58, 30
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-size: 14px; font-weight: 600; fill: #24292f }
  .grid { stroke: #8c959f; stroke-opacity: .3 }
  .exact { stroke: #d9822b; fill: none }
  .runs { stroke: #2f7ed8; stroke-width: 4; stroke-linecap: round; stroke-opacity: .45; fill: none }
  .odd { stroke: #8c959f; stroke-width: 4; stroke-linecap: round; stroke-opacity: .45; fill: none }
  @media (prefers-color-scheme: dark) { text { fill: #9da7b1 } .title { fill: #e6edf3 } }
"""


def picture(title: str, unit: str, pairs: Sequence[tuple[float, float]], odd: Sequence[tuple[float, float]]) -> str:
    """(measured, predicted) pairs on logarithmic axes; ``odd`` in grey."""
    values = [value for pair in (*pairs, *odd) for value in pair]
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    span = high - low

    def x(value: float) -> float:
        return LEFT + (math.log(value) - low) / span * (WIDTH - LEFT - 14)

    def y(value: float) -> float:
        return HEIGHT - 44 - (math.log(value) - low) / span * (HEIGHT - 44 - TOP)

    def path(name: str, points: Sequence[tuple[float, float]]) -> str:
        dots = "".join(f"M{x(measured):.0f} {y(predicted):.0f}h0" for measured, predicted in points)
        return f'<path class="{name}" d="{dots}"/>' if points else ""

    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    digits = (1,) if span > 6 else (1, 2, 5)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    grid = "".join(
        f'<path class="grid" d="M{x(tick):.0f} {TOP}V{HEIGHT - 44}M{LEFT} {y(tick):.0f}H{WIDTH - 14}"/>'
        f'<text x="{x(tick):.0f}" y="{HEIGHT - 28}" text-anchor="middle">{tick:g}</text>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.0f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
        if low < math.log(tick) < high
    )
    ends = math.exp(low), math.exp(high)
    exact = f'<path class="exact" d="M{x(ends[0]):.0f} {y(ends[0]):.0f}L{x(ends[1]):.0f} {y(ends[1]):.0f}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"><style>{STYLE}</style>'
        f'<text class="title" x="{LEFT}" y="18">{title}</text>{grid}{exact}{path("odd", odd)}{path("runs", pairs)}'
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">measured, {unit}</text>'
        f'<text transform="translate(13 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">predicted</text></svg>\n'
    )


def draw(reports: Sequence[SourceReport]) -> list[str]:
    """Writes the pictures; their lines in Markdown."""
    lines = []
    for one in reports:
        timed = [(row.run.step_seconds, row.predicted_seconds, row.run.id) for row in one.scored]
        usual = [(t, p) for t, p, name in timed if t is not None and name not in one.irregular]
        odd = [(t, p) for t, p, name in timed if t is not None and name in one.irregular]
        lines += _write(f"accuracy_{one.key}", f"{one.title}: step time", "seconds", usual, odd)
        sized = [
            (row.run.memory_bytes / 2**30, row.predicted_bytes / 2**30)
            for row in one.scored
            if row.run.memory_bytes is not None
        ]
        if len(sized) > 20:
            lines += _write(f"accuracy_{one.key}_memory", f"{one.title}: memory", "GiB", sized, [])
    return lines


def _write(
    name: str, title: str, unit: str, pairs: Sequence[tuple[float, float]], odd: Sequence[tuple[float, float]]
) -> list[str]:
    if not pairs:
        return []
    (PICTURES / f"{name}.svg").write_text(picture(title.replace("&", "and"), unit, pairs, odd))
    grey = " (grey: irregular rows)" if odd else ""
    return [f"![{title}, predicted against measured{grey}](pictures/{name}.svg)"]


# ---- the page


def page(paths: Sequence[Path]) -> str:
    rows = read_rows(paths)
    found = [read_run(row) for row in rows]
    runs = [run for run in found if isinstance(run, PublishedRun)]
    skipped = [row for row in found if isinstance(row, NotScored)]
    fitted = {source for recipe in RECIPES for source in recipe.sources}
    scored, cells = cross_validate(runs)
    reports = report(scored, cells, skipped)
    unseen = report(score([run for run in runs if run.source.key not in fitted]), [], skipped)
    conventions = ", ".join(f"{source.title} {source.convention}" for source in SOURCES)
    return HEAD.format(
        rows=len(rows),
        scored=sum(not run.secondary for run in runs),
        time=time_table(reports),
        time_notes=time_notes(reports),
        unseen=unseen_table(unseen),
        own=own_runs(),
        memory=memory_table(reports),
        memory_notes=memory_notes(reports),
        fit=fit_table(reports),
        regret=regret_table([cell for one in reports for cell in one.cells]),
        cells=cell_table(reports),
        pictures="\n".join(draw([*reports, *unseen])),
        not_scored=not_scored_table(skipped, runs),
        fitted=fitted_table(),
        conventions=conventions,
        kernels=", ".join(f"`{words}`" for words in KERNELS),
    )


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    TARGET.write_text(page(given or [RUNS]))
