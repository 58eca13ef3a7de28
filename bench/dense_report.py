"""The page docs/measured/dense.md from the numbers of `bench/dense.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from results import head, notes_and_failures

Entries: TypeAlias = dict[str, dict[str, Any]]
Curve: TypeAlias = Sequence[float | None]
"""The loss of each step; None of one that was skipped."""
Curves: TypeAlias = Mapping[str, Curve]

SMOOTH = 20
"""Steps of the running mean of curves."""
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
PEER_MACHINE = "measured on another machine of the kind"
NAIVE_PEER = 2600.0
"""Tokens/s/GPU of the usual first attempt at the 13B (Transformers, FSDP2, eager), measured on such a machine too."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row of the table: what Megatron-LM with Transformer Engine reaches, and what was aimed at."""

    title: str
    peer_name: str = "Megatron-LM + Transformer Engine"
    peer: tuple[float, float, float]
    """tokens/s/GPU, TFLOP/s/GPU, peak GiB"""
    peer_fraction: float | None = None
    """of the sustained GEMM rate of its own machine, in the run's precision"""
    target: str


WORKS = {
    "8b_bf16": Work(
        title="llama3_8b bf16, seq 8192, micro-batch 1, 4 accumulation steps, 2 GPUs",
        peer=(10_830, 557, 120),
        peer_fraction=0.84,
        target=">= 580 TFLOP/s, 0.875",
    ),
    "8b_fp8": Work(
        title="llama3_8b fp8, the same",
        peer=(13_217, 680, 115),
        peer_fraction=0.535,
        target=">= 850 TFLOP/s, 0.67",
    ),
    "13b_bf16": Work(
        title="gpt_13b bf16, seq 2048, 2 GPUs",
        peer=(6_580, 523, 125),
        target=">= 570 TFLOP/s",
    ),
    "13b_fp8": Work(
        title="gpt_13b fp8, the same",
        peer=(6_580, 523, 125),
        peer_name="Megatron-LM + Transformer Engine, bf16",
        target=">= 3.3 x naive",
    ),
    "13b_naive": Work(
        title="gpt_13b, the naive recipe (recipes/ladder/naive.toml)",
        peer=(NAIVE_PEER, 207, 102),
        peer_name="Transformers + FSDP2, eager attention",
        target=">= 2,500 tokens/s",
    ),
    "1b_bf16": Work(
        title="llama3_1b bf16, seq 8192, one GPU",
        peer=(52_220, 471, 64),
        target=">= 505 TFLOP/s",
    ),
}


def page(data: dict[str, Any], curves: Curves, picture: str = "") -> list[str]:
    """The page; ``picture``: path of the curves' drawing from where the page lies, "" without one."""
    entries: Entries = data["entries"]
    lines = head("Dense training, measured", data)
    lines += table(entries)
    for section in (tuned, agreement, start_up, overheads):
        lines += section(entries)
    lines += numerics(curves, picture)
    lines += profiles(entries)
    lines += ceilings(entries)
    return lines + notes_and_failures(entries)


def fastest(entries: Entries, work: str) -> tuple[str, dict[str, Any]] | None:
    """Key and bench record of the fastest entry that does this work."""
    found = [(key, entry["bench"]) for key, entry in entries.items() if entry.get("work") == work and "bench" in entry]
    return max(found, key=lambda item: item[1]["tokens_per_second_per_gpu"], default=None)


# ---- the table


def table(entries: Entries) -> list[str]:
    rows = [(work, best) for work in WORKS if (best := fastest(entries, work))]
    if not rows:
        return ["Nothing measured yet."]
    lines = [
        "Medians of the steps after the warm-up. TFLOP/s are model FLOPs: causal attention, recomputation not counted; "
        "the sustained GEMM is of the same run and of the run's precision. fp32 masters and moments, clipping at 1.0. "
        f"Peers: {PEER_MACHINE}, so the share of the sustained GEMM decides, not the absolute figure.",
        "",
        "| work | system | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | tokens/J | step s (spread) "
        "| gradients reduced in | loss | target |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for name, (key, bench) in rows:
        work = WORKS[name]
        energy = bench.get("tokens_per_joule")
        lines.append(
            f"| {work.title} | Paceline (`{key}`) | {bench['tokens_per_second_per_gpu']:,.0f} "
            f"| {tflops(bench['tflops_per_gpu'])} "
            f"| {bench['fraction_of_gemm']:.3f} of {tflops(bench['sustained_gemm_tflops'])} "
            f"| {bench['peak_memory_gib']:.1f} | {'' if energy is None else f'{energy:.2f}'} "
            f"| {bench['step_seconds']:.3f} ({bench['step_seconds_min']:.3f} to {bench['step_seconds_max']:.3f}; "
            f"{bench['steps']} steps) | {bench['gradient_reduction']} | {loss_text(bench['loss'])} | {work.target} |"
        )
        tokens, rate, gib = work.peer
        fraction = "" if work.peer_fraction is None else f"{work.peer_fraction}"
        lines.append(f"| | {work.peer_name} | {tokens:,.0f} | {rate:.0f} | {fraction} | {gib:.0f} | | | | | |")
    return [*lines, *against_naive(entries)]


def against_naive(entries: Entries) -> list[str]:
    naive, candidates = fastest(entries, "13b_naive"), [fastest(entries, work) for work in ("13b_bf16", "13b_fp8")]
    best = max(
        (each for each in candidates if each), key=lambda each: each[1]["tokens_per_second_per_gpu"], default=None
    )
    if naive is None or best is None:
        return []
    slow, fast = (each[1]["tokens_per_second_per_gpu"] for each in (naive, best))
    base = max(slow, NAIVE_PEER)
    return [
        "",
        f"gpt_13b, best precision against naive: {fast:,.0f} / {base:,.0f} tokens/s/GPU = **{fast / base:.2f}x** "
        f"(`{best[0]}`; the naive recipe reaches {slow:,.0f}, the usual first attempt {NAIVE_PEER:,.0f}). The rungs "
        "between them: [ladder.md](../ladder.md).",
    ]


def loss_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def tflops(value: float) -> str:
    """Whole TFLOP/s of a GPU; of a tiny model on a CPU what there is."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


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
            f"| `{key}` ({entry['work']}) | {entry['title']} | {bench['tokens_per_second_per_gpu']:,.0f} "
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
            pairs.append((entry["title"], bench, entry["train"]))
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
            found.append((key, entry["compiled_before"], phases))
    if not found:
        return []
    names = list(dict.fromkeys(itertools.chain.from_iterable(phases for _, _, phases in found)))
    lines = ["", "## From the command to the end of the first step, seconds", ""]
    lines += [
        f"| entry | compiled kernels | all | {' | '.join(names)} |",
        "| --- | --- | ---: |" + " ---: |" * len(names),
    ]
    for key, warm, phases in found:
        cells = " | ".join(f"{phases[name]:.1f}" if name in phases else "" for name in names)
        kernels = "some there before" if warm else "none there before"
        lines.append(f"| `{key}` | {kernels} | {sum(phases.values()):.1f} | {cells} |")
    return lines


def overheads(entries: Entries) -> list[str]:
    plain, train = entries.get("dense/8b_bf16", {}).get("bench"), entries.get("dense/8b_train", {}).get("train")
    logged, saving = (entries.get(f"overheads/{name}", {}).get("train") for name in ("8b_logged", "8b_saving"))
    rows = []
    if plain and train:
        rows.append(
            ("loading a dataset, a line of metrics every 5 steps", train["step_seconds"], plain["step_seconds"])
        )
    if train and logged:
        rows.append(("a line of metrics every step instead", logged["step_seconds"], train["step_seconds"]))
    if saving and "while_writing_step_seconds" in saving:
        rows.append(
            ("steps while a checkpoint is written", saving["while_writing_step_seconds"], saving["step_seconds"])
        )
    if not rows:
        return []
    lines = ["", "## What is not the step itself (llama3_8b, two GPUs)", ""]
    lines += ["| what | step s | without it | cost |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {what} | {with_it:.4f} | {base:.4f} | {with_it / base - 1:+.2%} |" for what, with_it, base in rows]
    if saving:
        usual = saving["step_seconds"]
        for name, what in (
            ("checkpoint_stall_seconds", "The step that hands over an asynchronous checkpoint waits"),
            ("evaluation_seconds", "An evaluation on one global batch takes"),
        ):
            if name in saving:
                lines += ["", f"{what} {saving[name]:.2f} s, {saving[name] / usual:.2f} of a step."]
    return lines


# ---- numerics


def numerics(curves: Curves, picture: str) -> list[str]:
    if REFERENCE not in curves:
        return []
    reference = curves[REFERENCE]
    there = [loss for loss in reference if loss is not None]
    ends = f"(loss {there[0]:.3f} to {there[-1]:.3f})" if there else "(no step of it has a loss)"
    lines = ["", "## Numerics", ""]
    lines += [
        f"{len(reference)} steps of the demo's text, llama3_1b, 8,192 tokens a step, the same seed and data unless the "
        "row says otherwise; differences of the training loss from bf16 with all fast paths on "
        f"{ends}, nats a token; *smoothed*: of running means over {SMOOTH} "
        "steps. The band is the largest difference between any two of the three seeds.",
        "",
        *([f"![loss curves]({picture})", ""] if picture else []),
        *_gap_rows(curves, reference),
    ]
    skipped = {name: sum(loss is None for loss in curve) for name, curve in curves.items()}
    if any(skipped.values()):
        said = ", ".join(f"{name} {number}" for name, number in skipped.items() if number)
        lines += ["", f"Steps skipped because something was not finite, left out of every difference: {said}."]
    return lines


def _gap_rows(curves: Curves, reference: Curve) -> Iterator[str]:
    yield "| run | largest, smoothed | mean | last, smoothed | of the seeds' band (smoothed) |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    band = seeds_band(curves)
    if band is not None:
        number = sum(name in curves for name in (REFERENCE, *OTHER_SEEDS))
        yield f"| **band of {number} seeds** | **{band:.4f}** | | | |"
    for name, title in (("off", "bf16, all fast paths off"), ("fp8", "fp8"), ("fp8_head", "fp8, the head too")):
        if name not in curves or len(curves[name]) != len(reference):
            continue
        if not (smooth := difference(curves[name], reference)):
            yield f"| {title} | no step with a loss in both | | | |"
            continue
        each = [abs(value) for value in _by_step(curves[name], reference) if value is not None]
        largest = max(map(abs, smooth))
        share = "" if not band else f"{largest / band:.2f}"
        yield f"| {title} | {largest:.4f} | {sum(each) / len(each):.4f} | {smooth[-1]:+.4f} | {share} |"


def difference(losses: Curve, reference: Curve) -> list[float]:
    """Running means of the difference, from the first whole window on; over the steps that both have.

    A window without such a step is left out.
    """
    each = _by_step(losses, reference)
    window = min(SMOOTH, len(each))
    windows = ([x for x in each[end - window : end] if x is not None] for end in range(window, len(each) + 1))
    return [sum(there) / len(there) for there in windows if there]


def _by_step(losses: Curve, reference: Curve) -> list[float | None]:
    pairs = zip(losses, reference, strict=True)
    return [None if one is None or other is None else one - other for one, other in pairs]


def seeds_band(curves: Curves) -> float | None:
    """The largest smoothed difference between any two seeds; None with fewer than two, or without a step in common."""
    seeds = [curves[name] for name in (REFERENCE, *OTHER_SEEDS) if name in curves]
    differences = itertools.chain.from_iterable(difference(*pair) for pair in itertools.combinations(seeds, 2))
    return max(map(abs, differences), default=None)


# ---- where the time goes


def profiles(entries: Entries) -> list[str]:
    done = {entry["title"]: entry["profile"] for entry in entries.values() if "profile" in entry}
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
        lines.append(f"| {name} | {attention} | {tflops(work / found['linears_ms'])} | {together} |")
    return lines


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
