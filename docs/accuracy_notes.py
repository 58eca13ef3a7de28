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


_GPT_OSS = "GPT OSS 120B"


def _left_out(one: SourceReport, **changes: Any) -> float:
    """MAPE of GPT-OSS, predicted by the other models, if its workloads were otherwise."""
    runs = [
        replace(row.run, workload=replace(row.run.workload, **changes)) if row.run.model_name == _GPT_OSS else row.run
        for row in one.scored
    ]
    scored = cross_validate(runs)[0]
    found = Errors.of([error for row in scored if row.run.model_name == _GPT_OSS and (error := row.time_error)])
    assert found is not None
    return found.mape


def _gpt_oss(one: SourceReport, what: str) -> str:
    """Median error, signed, of GPT-OSS on those GPUs in bf16, or with fused products."""
    errors = []
    for row in one.scored:
        work, hopper = row.run.workload, row.run.cluster.gpu.name.startswith("H")
        kind = "fused" if work.expert_epilogues else "hopper" if hopper else "blackwell"
        of_kind = kind == what and (kind == "fused" or work.precision == "bf16")
        if row.run.model_name == _GPT_OSS and of_kind and row.time_error is not None:
            errors.append(row.time_error)
    return f"{100 * float(np.median(errors)):+.0f} %"


def _gpt_oss_note(one: SourceReport) -> str:
    return (
        "Its experts have biases and clamp what they activate, and Megatron-Core does both by operators of their own, "
        "which are counted: 34 passes over rows, and 18 over as many elements as the gates have (without the latter "
        f"its MAPE would be {percent(_left_out(one, clamped_experts=False))}). What is left, in the median: bf16 on "
        f"Blackwell {_gpt_oss(one, 'blackwell')}, on Hopper {_gpt_oss(one, 'hopper')}, fused products in MXFP8 "
        f"{_gpt_oss(one, 'fused')}. Its causes were looked for:\n"
        "  - *Not the host's launches.* On GB200 half the tokens in a micro-batch take half the time of a layer (14.3 "
        "for 28.8 ms, forward and backward), and the rows that are furthest off run a whole step as one CUDA graph.\n"
        "  - *Not scores in memory, nor windows that are not used.* On GB300 rows of 8,192 tokens take 6 % longer than "
        "as many tokens in rows of 4,096, as is predicted of fused kernels with windows; with scores in memory the "
        f"MAPE would be {percent(_left_out(one, fused_attention=False))}.\n"
        "  - *Not widths of 2880.* Tiles that are not full are counted (`costs/roofline.py`: 2 % slower than 3072), "
        "and Transformer Engine's fused products take multiples of 64.\n"
        "  - *Perhaps reductions.* With experts over 8 ranks of 64, steps of two micro-batches miss no fewer seconds "
        "on B200 than steps of five (1.3, and 0.8 to 1.1). Gradients in fp32 would explain some of it "
        f"({percent(_left_out(one, reduce_bf16=False))}), but the recipe reduces them in bf16. A network of 400 "
        "Gb/s in place of 800 on B300 would too; DeepSeek-V3's rows there speak against it.\n\n"
        "  Two of its rows, of 26.06.01, are 60 % off: the publisher says that fused kernels were slower in that "
        "release and names it a known issue; neither those kernels' cost nor another path is published, so the recipe "
        "is taken as it is."
    )


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
        "three mixtures of experts: one left out is predicted by what two others teach. DeepSeek-V3 and Kimi K2 teach "
        "each other well. GPT-OSS takes longer than both teach. " + _gpt_oss_note(one)
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
