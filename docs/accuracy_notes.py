"""What docs/make_accuracy.py says under its tables: what misses, why, and how well measured twins would have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.planner.first_choice import Cell
from paceline.planner.published import KERNELS
from paceline.planner.scored import Errors, Scored
from paceline.planner.twins import (
    constant_per_micro_batch,
    same_but_zero,
    same_on_a_rank,
    step_seconds,
    twin_errors,
    unsharded_bytes,
)
from paceline.planner.validate import SourceReport, cross_validate


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def by_model(one: SourceReport) -> str:
    """ "name 3.1 % (n)", ... of every model of a source."""
    names = dict.fromkeys(row.run.model_name for row in one.scored)
    found = []
    for name in names:
        rows = [row for row in one.scored if row.run.model_name == name]
        errors = Errors.of([row.time_error for row in rows if row.time_error is not None])
        if errors:
            found.append(f"{name} {percent(errors.mape)} ({errors.rows})")
    return ", ".join(found)


def time_notes(reports: Sequence[SourceReport]) -> str:
    by_key = {one.key: one for one in reports}
    notes = ["MAPE by the model that was left out (rows):", ""]
    notes += [f"- {one.title}: {by_model(one)}." for one in reports if one.time is not None]
    notes += ["", "What misses, and why:", ""]
    if one := by_key.get("nanotron"):
        notes.append(_nanotron_note(one))
    if "vtrain_multi" in by_key:
        notes.append(
            "- **vTrain, several nodes**: five rows of 81 (tp 8 with micro-batches 64 and 2; three of tp 2 with pp 8 "
            "and 16) make a third of the MAPE. Rows next to them take a third less to half the time."
        )
    if one := by_key.get("bridge"):
        notes.append(_bridge_note(one))
    return "\n".join(notes)


def _nanotron_note(one: SourceReport) -> str:
    timed = [row for row in one.scored if row.run.step_seconds is not None]
    twins = Errors.of(twin_errors([row.run for row in timed], step_seconds, same_but_zero))
    assert twins is not None
    far = [row for row in timed if row.run.workload.pp > 1 and _times_slower(row) > 1.5]
    share = sum(abs(row.time_error or 0.0) for row in far) / len(timed)
    return (
        f"- **nanotron**: {len(far)} rows of pipelines took more than 1.5 times as long as predicted, and alone make "
        f"{percent(share)} of the MAPE. They took a fixed time more for each micro-batch: {_waits(far, 2, 2)} with two "
        f"stages, {_waits(far, 4, 999)} with four or more, from 1B to 8B, micro-batches of 1 to 64, tp 1 to 32. It "
        "grows neither with what is computed nor with what is sent: two ways to run are mixed, and no column says "
        "which. One layout, listed twice, took 0.67 and 3.38 s (1B, tp 8, 256 GPUs). "
        f"{_where_slow([row for row in timed if row.run.workload.pp > 1])} How well "
        "would measurements do? A *measured* run of the same model, GPUs, tp, pp and micro-batch, with the other ZeRO "
        f"stage, predicts a row {percent(twins.mape, 0)} off in the mean, {percent(twins.median)} in the median "
        f"({twins.rows} rows have such a twin); ours are {percent(_mape(timed), 0)} and {percent(_median(timed))}. "
        f"{len(one.irregular)} such rows are found by measurements alone, without predictions "
        "(`planner/irregular.py`: more than three times what another micro-batch size, ZeRO stage or number of GPUs "
        "shows to be possible). No fit sees them; they are scored, and both figures are above."
    )


def _where_slow(piped: Sequence[Scored]) -> str:
    """What foretells slow rows, and how well."""
    kinds: dict[str, list[Scored]] = {"beyond": [], "beside": [], "wide": [], "rest": []}
    for row in piped:
        kinds[_mark(row)].append(row)
    said = {kind: f"{sum(_times_slower(row) > 1.5 for row in rows)} of {len(rows)}" for kind, rows in kinds.items()}
    return (
        f"Three marks of it: {said['beyond']} rows that should not have fitted and ran are slow, and hold less than "
        "predicted (so they may have been run again in a way that spares memory); of those without ZeRO, over several "
        f"nodes, with micro-batches of one sequence and 4 to 16 replicas, {said['beside']} are; of those on 256 GPUs "
        f"with 32 replicas or more and ZeRO-1, {said['wide']}. Of all other pipelines {said['rest']} are. No term "
        "stands for this: no cause is known (of runs without ZeRO, those with 32 replicas are as fast as predicted), "
        "and a false alarm costs the mean more than a miss: decision trees over all columns and what follows from them "
        "(bytes of a send, micro-batches a stage, nodes of a group), grown on two models and asked about the third, "
        "raise the MAPE to 38 % and more; the most cautious one calls 11 rows slow, 10 of them rightly, and lowers it "
        "by 0.3 points."
    )


def _mark(row: Scored) -> str:
    work, gpus = row.run.workload, row.run.cluster.gpus
    replicas = work.dp(gpus)
    if not row.predicted_fits:
        return "beyond"
    if work.zero == 0 and gpus > 8 and work.micro_batch_size == 1 and 4 <= replicas <= 16:
        return "beside"
    return "wide" if work.zero and gpus == 256 and replicas >= 32 else "rest"


def _times_slower(row: Scored) -> float:
    return (row.run.step_seconds or 0.0) / row.predicted_seconds


def _mape(rows: Sequence[Scored]) -> float:
    return float(np.mean([abs(row.time_error or 0.0) for row in rows]))


def _median(rows: Sequence[Scored]) -> float:
    return float(np.median([abs(row.time_error or 0.0) for row in rows]))


def _waits(rows: Sequence[Scored], least: int, most: int) -> str:
    """ "0.55 s (four of five between 0.47 and 0.73)": more than predicted, a micro-batch."""
    each = [
        constant_per_micro_batch(row.run, row.predicted_seconds) or 0.0
        for row in rows
        if least <= row.run.workload.pp <= most
    ]
    low, middle, high = np.quantile(each, [0.1, 0.5, 0.9])
    return f"{middle:.2f} s (four of five between {low:.2f} and {high:.2f})"


def _of_columns(one: SourceReport) -> float:
    """The source's mean error, nothing known but what its tables print."""
    switches: dict[str, Any] = dict.fromkeys(KERNELS.values(), False)
    bare = {"recompute": "none", "recompute_modules": (), **switches}
    runs = [
        replace(row.run, workload=replace(row.run.workload, **bare))
        if any(getattr(row.run.workload, name) for name in switches)
        else row.run
        for row in one.scored
    ]
    errors = [error for row in cross_validate(runs)[0] if (error := row.time_error) is not None]
    found = Errors.of(errors)
    assert found is not None
    return found.mape


def _bridge_note(one: SourceReport) -> str:
    said = []
    for name, dense in (("dense", True), ("mixtures of experts", False)):
        runs = [row.run for row in one.scored if (row.run.workload.model.num_experts == 0) == dense]
        twins = Errors.of(twin_errors(runs, step_seconds, same_but_zero))
        assert twins is not None
        said.append(f"{percent(twins.mape)} for {name}")
    return (
        "- **Megatron Bridge**: containers of a year are mixed. The same layout on the same GPUs, *measured* in "
        f"another release, predicts a row {' and '.join(said)} off. What changed between releases for mixtures of "
        "experts is an input here, where the release's own recipe says it for that layout: what is recomputed, whether "
        "the dispatcher permutes rows, whether products of experts activate and cast by themselves, whether rows are "
        "sent behind another micro-batch, and attention and head in 8 bits "
        f"(`planner/release_recipes.csv`; by the printed columns alone it would be {percent(_of_columns(one))}). "
        "For dense models, and for layouts of 25.09 and 25.11 that no stored recipe has, nothing is printed. There are "
        "three mixtures of experts: one left out is "
        "predicted by what two others teach. DeepSeek-V3 and Kimi K2 teach each other well. GPT-OSS takes longer than "
        "both teach, by a fifth to two fifths on Blackwell and a tenth on Hopper: about as many milliseconds a layer "
        "on either, in bf16 as in MXFP8. It alone has biases in experts, sinks in attention and a clamped activation; "
        "the passes for biases are counted, what else it costs is not known. (Their number, fitted for the "
        "other two, stands in for that.) Two of its rows, of 26.06.01, are 60 % off: the publisher says that fused "
        "kernels were slower in that release and names it a known issue; neither those kernels' cost nor another "
        "path is published, so the recipe is taken as it is."
    )


MEMORY_NOTES = """\
- nanotron prints GB and means GiB: its runs reach 77.4 of the 79.1 GiB that a card has and never more, and sharding 12
  bytes a parameter of the 1.34B model over 256 ranks saves 14.9 of them, which is 12 x 1.342e9 / 2^30. What it prints
  is the first rank's (its stages hold different amounts; the first stage's fits far better than the fullest).
- nanotron's median goal (5 %) is met, its 90th percentile (10 %) is not. Its tensors are counted, operator by operator,
  and agree within 3 % where tp is 1. With tp, most rows also keep the gathered inputs of products whole on every rank;
  the slow rows (above) do not, nor do two stages with a network between them or tp over four nodes. At tp 16 that is a
  factor of two, and no column says which a row is. The allocator's own spread is small: the same rank of the same
  layout without sharding, on other numbers of GPUs, {memory_twins}.
- Megatron Bridge and torchtitan give too few rows to fit anything: their numbers are arithmetic (what Transformer
  Engine and torchtitan's recomputation keep), written down with these rows in sight. They say that the arithmetic can
  be near, not that it was blind.
"""


def memory_notes(reports: Sequence[SourceReport]) -> str:
    runs = [row.run for one in reports if one.key == "nanotron" for row in one.scored]
    twins = Errors.of(twin_errors(runs, unsharded_bytes, same_on_a_rank))
    said = (
        "differs" if twins is None else f"differs by {percent(twins.median)} in the median, {percent(twins.p90)} in p90"
    )
    return MEMORY_NOTES.replace("{memory_twins}", said)


def why_missed(cells: Sequence[Cell]) -> str:
    missed = [cell for cell in cells if cell.regret > 0.05]
    if not missed:
        return ""
    near = sum(cell.rank <= 3 for cell in missed)
    theirs = sum(cell.source == "nanotron" for cell in missed)
    return (
        f"\n\nOf the {len(missed)} that miss, {near} have the best among the first three. {theirs} are nanotron's, "
        "where even a\nmeasured twin is further off in the median (above) than most of these regrets."
    )
