"""The page docs/measured/eight_gpus.md from predictions, entries and the record of a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import dense_jobs
from dense_table import tflops
from eight_gpus_jobs import NAIVE, PARTS, all_jobs, best_jobs, jobs_of
from eight_gpus_targets import Entries, figures, pairs, verdicts
from plan_results import PREDICTIONS, Pair, percent, signed
from results import head, notes_and_failures

from paceline.doctor.measured.record import TITLES, UNITS

DRY_RUN = "dry_run"
"""Of the data: what `--tiny` did on CPUs."""
_TITLES = {
    "thirteen": "The 13B: from a first attempt to the best of this host",
    "layouts": "The 13B: layouts",
    "scaling": "Llama-3-8B, 8192 tokens: weak scaling",
    "wide": "Llama-3-70B's widths, and a long context",
    "experts": "Mixtures of experts",
    "rungs": "The 13B: the rungs between",
}
_NOT_YET = "not yet"


def page(data: Mapping[str, Any], pictures: Mapping[str, str]) -> list[str]:
    """``pictures``: by name, where each lies from here."""
    gpus, entries = int(data["gpus"]), data["entries"]
    return [
        *head(f"{gpus} GPUs of one host: predicted, then measured", dict(data)),
        *_state(data),
        *_targets(data),
        *_ladder(entries, gpus, pictures),
        *_layouts(data),
        *_scaling(entries, gpus),
        *_predicted(data),
        *_waterfalls(pictures),
        *_doctor(entries, pictures),
        *_dry_run(data),
        *notes_and_failures(entries),
    ]


def not_measured(data: Mapping[str, Any]) -> list[str]:
    """Keys of what has no entry, or one that failed."""
    done = {key for key, entry in data["entries"].items() if "failed" not in entry}
    return [job.key for job in all_jobs(int(data["gpus"])) if job.key not in done]


def _state(data: Mapping[str, Any]) -> list[str]:
    predicted = data.get(PREDICTIONS, {})
    made = sorted({each["commit"] for each in predicted.values()})
    lines = [
        "Every recipe was predicted by `paceline plan` and written down, with the commit that did it; then it was",
        "measured. Errors are predicted over measured, less 1.",
        "",
    ]
    if made:
        lines += [f"Predictions: {len(predicted)}, by commit {', '.join(made)}, of {_cards(predicted)}.", ""]
    left = not_measured(data)
    if not data["entries"]:
        lines += [
            f"**Nothing is measured yet: no host with {data['gpus']} such GPUs was to be had.** Below are the "
            "predictions that it will be held against, and what a dry run on CPUs shows: that every entry runs.",
            "",
        ]
    elif left and not data.get("tiny"):
        lines += [f"**Not measured yet:** {', '.join(left)}.", ""]
    return lines


def _cards(predicted: Mapping[str, Any]) -> str:
    return max((each["gpu"] for each in predicted.values()), default="")


def _targets(data: Mapping[str, Any]) -> Iterator[str]:
    yield from ("## Targets", "", "| what | target | found | |", "| --- | --- | --- | --- |")
    for one in verdicts(data):
        word = {None: _NOT_YET, True: "met", False: "**missed**"}[one.met]
        yield f"| {one.what} | {one.target} | {one.found} | {word} |"
    yield ""


# ---- what was measured


def _ladder(entries: Entries, gpus: int, pictures: Mapping[str, str]) -> Iterator[str]:
    keys = [f"thirteen/{NAIVE}", *(f"rungs/{name}" for name in dense_jobs.RUNGS if name != NAIVE)]
    keys += [job.key for job in best_jobs(gpus) if job.name != NAIVE]
    made = {key: found for key in keys if (found := figures(entries.get(key)))}
    if not made:
        return
    yield from ("## The ladder of the 13B", "")
    yield "| entry | change | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | loss | over naive |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    naive = made.get(keys[0])
    for key, found in made.items():
        times = f"{found['tokens_per_second_per_gpu'] / naive['tokens_per_second_per_gpu']:.2f} x" if naive else ""
        yield f"| `{key}` | {entries[key]['title']} | {_speed(found)} | {times} |"
    yield ""
    if "ladder" in pictures:
        yield from (f"![The ladder of the 13B]({pictures['ladder']})", "")


def _speed(found: Mapping[str, Any]) -> str:
    share = f"{found['fraction_of_gemm']:.3f} of {tflops(found['sustained_gemm_tflops'])}" if _has_gemm(found) else ""
    loss = "none" if found["loss"] is None else f"{found['loss']:.4f}"
    return (
        f"{found['tokens_per_second_per_gpu']:,.0f} | {tflops(found['tflops_per_gpu'])} | {share} "
        f"| {found['peak_memory_gib']:.1f} | {loss}"
    )


def _has_gemm(found: Mapping[str, Any]) -> bool:
    return "fraction_of_gemm" in found


def _layouts(data: Mapping[str, Any]) -> Iterator[str]:
    gpus, entries = int(data["gpus"]), data["entries"]
    predicted = data.get(PREDICTIONS, {})
    yield from (f"## Layouts of the 13B, {gpus} GPUs", "")
    yield (
        "The same work everywhere. *Exposed*: communication that nothing hides, of a step; measured, the captured step "
        "of the first and of the last rank, in which a wait for a pipeline's neighbour is communication too: hold it "
        "against exposed and bubble together."
    )
    yield from (
        "",
        "| layout | | step s: predicted | measured | error | GiB: predicted | measured | error "
        "| exposed s: predicted | bubble s | exposed s: measured |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    for job in jobs_of("layouts", gpus=gpus):
        if (said := predicted.get(job.key)) is None:
            continue
        pair = next((each for each in pairs(data) if each.key == job.key), None)
        exposed = ""
        if pair is not None and pair.measured is not None:
            exposed = ", ".join(f"{one['exposed']:.3f}" for one in pair.measured.get("communication", []))
        cells = _beside(said, pair, entries.get(job.key, {}))
        yield (
            f"| `{job.key}` | {job.title} | {' | '.join(cells)} | {said['exposed_seconds']:.3f} "
            f"| {said['bubble_seconds']:.3f} | {exposed} |"
        )
    yield ""


def _beside(said: Mapping[str, Any], pair: Pair | None, entry: Mapping[str, Any]) -> list[str]:
    """Step predicted, measured, error; memory predicted, measured, error."""
    seconds, gib = f"{said['step_seconds']:.3f}", f"{said['memory_gib']:.1f}" + ("" if said["fits"] else ", no fit")
    if pair is None:
        why = "failed" if "failed" in entry else "predicted after" if entry else _NOT_YET
        return [seconds, why, "", gib, "", ""]
    if pair.measured is None:
        return [seconds, "ran out", "", gib, "", ""]
    return [
        seconds, f"{pair.measured['step_seconds']:.3f}", signed(pair.time_error),
        gib, f"{pair.measured['peak_memory_gib']:.1f}", signed(pair.memory_error),
    ]  # fmt: skip


def _scaling(entries: Entries, gpus: int) -> Iterator[str]:
    made = [(job, found) for job in jobs_of("scaling", gpus=gpus) if (found := figures(entries.get(job.key)))]
    if not made:
        return
    yield from (f"## {_TITLES['scaling']}", "")
    yield "| entry | GPUs | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | loss | kept of the fewest |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for job, found in made:
        same = [(one, each) for one, each in made if _precision(one.name) == _precision(job.name)]
        fewest, base = min(same, key=lambda item: item[0].processes)
        kept = found["tokens_per_second_per_gpu"] / base["tokens_per_second_per_gpu"]
        shown = "" if fewest is job else percent(kept)
        yield f"| `{job.key}` | {job.processes} | {_speed(found)} | {shown} |"
    yield ""


def _precision(name: str) -> str:
    return name.rpartition("_")[0]


def _predicted(data: Mapping[str, Any]) -> Iterator[str]:
    """Every other part, predicted beside measured."""
    found = {pair.key: pair for pair in pairs(data)}
    predicted = data.get(PREDICTIONS, {})
    for part in PARTS:
        jobs = [job for job in jobs_of(part, gpus=int(data["gpus"])) if job.key in predicted]
        if part in ("layouts", "explain") or not jobs:
            continue
        yield from (f"## {_TITLES[part]}: predicted and measured", "")
        yield "| entry | | GPUs | step s: predicted | measured | error | GiB: predicted | measured | error |"
        yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
        for job in jobs:
            cells = _beside(predicted[job.key], found.get(job.key), data["entries"].get(job.key, {}))
            yield f"| `{job.key}` | {job.title} | {job.processes} | {' | '.join(cells)} |"
        yield ""


def _waterfalls(pictures: Mapping[str, str]) -> Iterator[str]:
    shown = [name for name in ("fastest", "slowest") if name in pictures]
    if not shown:
        return
    yield from ("## Where a step goes", "")
    for name in shown:
        yield from (f"![Waterfall of the {name} step]({pictures[name]})", "")


# ---- the machine


def _doctor(entries: Entries, pictures: Mapping[str, str]) -> Iterator[str]:
    found = next((each["doctor"] for each in entries.values() if each.get("doctor")), None)
    if found is None:
        return
    yield from ("## The machine: every GPU, pair and collective", "")
    yield "| what | unit | least | median | most |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for name in TITLES:
        rates = sorted(each["rates"][name] for each in found["ranks"] if name in each["rates"])
        if rates:
            low, middle, high = rates[0], rates[len(rates) // 2], rates[-1]
            yield f"| {TITLES[name]} | {UNITS[name]} | {low:.4g} | {middle:.4g} | {high:.4g} |"
    pairs_found = sorted(found["pairs"].values())
    if pairs_found:
        low, middle, high = pairs_found[0], pairs_found[len(pairs_found) // 2], pairs_found[-1]
        yield f"| between two GPUs, {len(pairs_found)} pairs | GB/s | {low:.4g} | {middle:.4g} | {high:.4g} |"
    yield from ("", "| collective, all ranks | size | bus GB/s |", "| --- | ---: | ---: |")
    for each in found["collectives"]:
        size = each["size_bytes"]
        shown = f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"
        yield f"| {each['name']} | {shown} | {each['bus_gb_per_s']:.4g} |"
    yield ""
    yield from (f"- {each['severity']}: {each['subject']} (`{each['id']}`)" for each in found["findings"])
    yield ""
    if "links" in pictures:
        yield from (f"![Links between GPUs]({pictures['links']})", "")


def _dry_run(data: Mapping[str, Any]) -> Iterator[str]:
    found = data.get(DRY_RUN)
    if not found:
        return
    ended = [each for each in found["entries"].values() if each["ended"] == "well"]
    yield from ("## Dry run: tiny models on CPUs", "")
    yield (
        "**Whether it runs, and nothing else.** The same jobs, layouts and scripts with tiny models, each rank a "
        f"process that talks over gloo; {found['devices']}, torch {found['torch']}, commit {found['commit']}. "
        f"{len(ended)} of {len(found['entries'])} ended well."
    )
    yield from ("", "| entry | processes | seconds | ended | loss |", "| --- | ---: | ---: | --- | ---: |")
    for key, each in found["entries"].items():
        loss = "" if each.get("loss") is None else f"{each['loss']:.4f}"
        yield f"| `{key}` | {each['processes']} | {each['seconds']:.0f} | {each['ended']} | {loss} |"
    yield ""
