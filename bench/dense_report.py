"""The page docs/measured/dense.md from the numbers of `bench/dense.py`."""

from __future__ import annotations

import itertools
from typing import Any

from curve_report import SAID, Curves, ends, gap_rows, skipped_lines
from dense_table import Entries, cut_of, table, tflops
from results import head, notes_and_failures

FIGURES = (
    "step_seconds",
    "step_seconds_min",
    "step_seconds_max",
    "steps",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "fraction_of_gemm",
    "sustained_gemm_tflops",
    "peak_memory_gib",
    "loss",
    "gradient_reduction",
)
"""Of the record of `paceline bench`, what the pages show."""
REFERENCE, OTHER_SEEDS = "fast", ("seed1", "seed2")
COMPARED = {
    "off": "bf16, all fast paths off",
    "fp8": "fp8",
    "fp8_head": "fp8, the head and fused casts too",
    "fp8_delayed": "the same, scales of earlier steps",
}


def page(
    data: dict[str, Any], curves: Curves, picture: str = "", *, title: str = "Dense training, measured", about: str = ""
) -> list[str]:
    """The page; ``picture``: path of the curves' drawing from where the page lies, "" without one.

    ``about``: what a reader must know before any figure.
    """
    entries: Entries = data["entries"]
    lines = head(title, data)
    lines += [about, ""] if about else []
    lines += table(entries)
    for section in (tuned, agreement, start_up, overheads):
        lines += section(entries)
    lines += numerics(curves, picture)
    lines += profiles(entries)
    lines += ceilings(entries)
    return lines + notes_and_failures(entries)


def tuned(entries: Entries) -> list[str]:
    done = {key: entry for key, entry in entries.items() if key.startswith("tune/") and "bench" in entry}
    if not done:
        return []
    lines = ["", "## Other ways to the same work", ""]
    lines += ["| entry | change | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for key, entry in done.items():
        bench = entry["bench"]
        lines.append(
            f"| `{key}` ({entry['work']}{cut_of(entry)}) | {entry['title']} "
            f"| {bench['tokens_per_second_per_gpu']:,.0f} "
            f"| {tflops(bench['tflops_per_gpu'])} | {bench['fraction_of_gemm']:.3f} | {bench['peak_memory_gib']:.1f} |"
        )
    return lines


# ---- beside the step


def agreement(entries: Entries) -> list[str]:
    """`paceline train` on a dataset against `paceline bench`."""
    pairs = []
    for key, entry in entries.items():
        # such an entry's title is the name of the bench that does the same
        bench = entries.get(f"dense/{entry['title']}", {}).get("bench") if key.startswith("dense/") else None
        if bench and "train" in entry:
            pairs.append((entry["title"] + cut_of(entry), bench, entry["train"]))
    if not pairs:
        return []
    lines = ["", "## `paceline bench` against `paceline train` on a dataset", ""]
    lines += ["| work | bench, median step s | train, median step s | difference |", "| --- | ---: | ---: | ---: |"]
    for name, bench, train in pairs:
        ours, theirs = bench["step_seconds"], train["step_seconds"]
        lines.append(f"| {name} | {ours:.4f} | {theirs:.4f} | {theirs / ours - 1:+.2%} |")
    return lines


def start_up(entries: Entries) -> list[str]:
    found = []
    for key, entry in entries.items():
        phases = (entry.get("bench") or entry.get("train") or {}).get("start_up_seconds")
        if phases:
            found.append((f"`{key}`{cut_of(entry)}", entry["compiled_before"], phases))
    if not found:
        return []
    names = list(dict.fromkeys(itertools.chain.from_iterable(phases for _, _, phases in found)))
    lines = ["", "## From the command to the end of the first step, seconds", ""]
    lines += [
        f"| entry | compiled kernels | all | {' | '.join(names)} |",
        "| --- | --- | ---: |" + " ---: |" * len(names),
    ]
    for name, warm, phases in found:
        cells = " | ".join(f"{phases[phase]:.1f}" if phase in phases else "" for phase in names)
        kernels = "some there before" if warm else "none there before"
        lines.append(f"| {name} | {kernels} | {sum(phases.values()):.1f} | {cells} |")
    return lines


def overheads(entries: Entries) -> list[str]:
    logged, saving = (entries.get(f"overheads/{name}", {}) for name in ("8b_logged", "8b_saving"))
    plain, train = (entries.get(f"dense/{name}", {}) for name in ("8b_bf16", "8b_train"))
    rows = []
    if "bench" in plain and "train" in train:
        what = f"loading a dataset, a line of metrics every 5 steps{cut_of(train)}"
        rows.append((what, train["train"]["step_seconds"], plain["bench"]["step_seconds"]))
    if "train" in train and "train" in logged:
        what = f"a line of metrics every step instead{cut_of(logged)}"
        rows.append((what, logged["train"]["step_seconds"], train["train"]["step_seconds"]))
    figures = saving.get("train", {})
    if "while_writing_step_seconds" in figures:
        what = f"steps while a checkpoint is written{cut_of(saving)}"
        rows.append((what, figures["while_writing_step_seconds"], figures["step_seconds"]))
    if not rows:
        return []
    lines = [
        "",
        f"## What is not the step itself (llama3_8b{', two GPUs' if not any(map(cut_of, entries.values())) else ''})",
        "",
    ]
    lines += ["| what | step s | without it | cost |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {what} | {with_it:.4f} | {base:.4f} | {with_it / base - 1:+.2%} |" for what, with_it, base in rows]
    for name, what in (
        ("checkpoint_stall_seconds", "The step that hands over an asynchronous checkpoint waits"),
        ("evaluation_seconds", "An evaluation on one global batch takes"),
    ):
        if name in figures:
            share = figures[name] / figures["step_seconds"]
            lines += ["", f"{what} {figures[name]:.2f} s, {share:.2f} of a step{cut_of(saving)}."]
    return lines


# ---- numerics


def numerics(curves: Curves, picture: str) -> list[str]:
    if REFERENCE not in curves:
        return []
    reference = curves[REFERENCE]
    return [
        "",
        "## Numerics",
        "",
        f"{len(reference)} steps of the demo's text, llama3_1b, 8,192 tokens a step, the same seed and data unless the "
        "row says otherwise; differences of the training loss from bf16 with all fast paths on "
        f"{ends(reference)}, {SAID}",
        "",
        *([f"![loss curves]({picture})", ""] if picture else []),
        *gap_rows(curves, (REFERENCE, *OTHER_SEEDS), COMPARED),
        *skipped_lines(curves),
    ]


# ---- where the time goes


def profiles(entries: Entries) -> list[str]:
    done = {entry["title"] + cut_of(entry): entry["profile"] for entry in entries.values() if "profile" in entry}
    if not done:
        return []
    kinds = list(dict.fromkeys(itertools.chain.from_iterable(profile["by_kind_ms"] for profile in done.values())))
    totals = ("exposed_communication_ms", "idle_ms", "wall_ms")
    lines = ["", "## Where a step goes, milliseconds", ""]
    lines += ["Kernels of several streams overlap, so the parts may sum to more than the step.", ""]
    lines += [f"| kind | {' | '.join(done)} |", "| --- |" + " ---: |" * len(done)]
    for kind in kinds:
        lines.append(f"| {kind} | {' | '.join(_ms(profile['by_kind_ms'].get(kind)) for profile in done.values())} |")
    for name in totals:
        title = name.removesuffix("_ms").replace("_", " ")
        lines.append(f"| *{title}* | {' | '.join(_ms(profile[name]) for profile in done.values())} |")
    return lines


def ceilings(entries: Entries) -> list[str]:
    """What attention and products alone would reach."""
    models = entries.get("ceilings/models", {}).get("ceilings", {}).get("models")
    if not models:
        return []
    lines = ["", "## What a step could reach: attention and products alone, bf16, short bursts", ""]
    lines += [
        "*Kernel*: 3.5 times the forward's FLOPs, with the scores that the backward computes again. *Together*: model "
        "TFLOP/s of a micro-batch that did nothing else.",
        "",
        "| model | attention forward / with backward, TFLOP/s (kernel) | products, TFLOP/s | together |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, found in models.items():
        attention = ", ".join(
            f"{kernel} {tflops(each['forward_tflops'])} / {tflops(each['kernel_tflops'])}"
            for kernel, each in found["attention"].items()
        )
        work = sum(each["tflops"] * each["ms"] * each["number"] for each in found["linears"])
        together = tflops(found["ceiling_tflops"]) if "ceiling_tflops" in found else ""
        layers = f", {found['layers']} layers" if "layers" in found else ""
        lines.append(f"| {name}{layers} | {attention} | {tflops(work / found['linears_ms'])} | {together} |")
    return lines


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
