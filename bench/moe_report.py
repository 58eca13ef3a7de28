"""The pages docs/measured/moe.md and moe_one_gpu.md from the numbers of `bench/moe.py`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from curve_report import SAID, ends, gap_rows, skipped_lines
from moe_jobs import PARTS, REFERENCE, SEEDS, SWITCH_EXPERTS, jobs_of
from results import head, notes_and_failures

Entries: TypeAlias = dict[str, dict[str, Any]]
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
)
"""Of the record of `paceline bench` and of the baseline, what the pages show."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row of the table, and what it is aimed at on two GPUs; the fractions are aimed at on one too."""

    title: str
    target: str


WORKS = {
    "qwen3": Work(
        title="Qwen3-30B-A3B widths, seq 4096, micro-batch 2, 4 accumulation steps",
        target=">= 300 TFLOP/s, 0.45; <= 75 GiB",
    ),
    "qwen3_ep2": Work(title="the same, expert parallelism 2", target=">= 240 TFLOP/s"),
    "qwen3_fp8": Work(title="the same, fp8 experts and linears", target=">= 360 TFLOP/s"),
    "mixtral": Work(title="Mixtral-8x7B widths, seq 4096, the same batch", target=">= 450 TFLOP/s"),
    "deepseek": Work(
        title="DeepSeek-V2-Lite widths (latent attention, 64 experts top-6, 2 shared), seq 4096, the same batch",
        target=">= 2 x Transformers",
    ),
    "switch_dense": Work(title="Switch-Base, dense twin, seq 2048, 262,144 tokens a step, one GPU", target=""),
    **{
        f"switch_{experts}": Work(title=f"Switch-Base, {experts} experts top-1", target="<= 1.25 x the dense twin")
        for experts in SWITCH_EXPERTS
    },
}
PEERS = (
    "On another machine of the kind (two H200s, bf16, 12 layers of Qwen3-30B-A3B's widths, micro-batch 2, 4 "
    "accumulation steps, about 660 TFLOP/s of sustained GEMM): Megatron-LM with expert parallelism 2 reached 106 "
    "TFLOP/s a GPU in 85 GiB, Transformers 5.17 with FSDP2 and grouped experts 155 in 95 GiB (0.23 of the GEMM rate)."
)


def page(data: dict[str, Any], *, one_gpu: bool) -> list[str]:
    entries: Entries = data["entries"]
    lines = head(f"Mixtures of experts on {'one GPU' if one_gpu else 'two GPUs'}, measured", data)
    if missing := not_measured(data, one_gpu=one_gpu):
        lines += [missing, ""]
    lines += table(entries)
    for section in (tuned, imbalance, profiles, numerics):
        lines += section(entries)
    return lines + notes_and_failures(entries)


def not_measured(data: dict[str, Any], *, one_gpu: bool) -> str:
    """What there are jobs for and no result of, tuning aside; "" of a dry run, which is asked for some of them."""
    if data.get("tiny"):
        return ""
    done = {key for key, entry in data["entries"].items() if "failed" not in entry}
    found = []
    for part in PARTS:
        jobs = jobs_of(part, one_gpu=one_gpu)
        left = [job.name for job in jobs if job.key not in done]
        if left and part != "tune":
            found.append(f"{part}: {'everything' if len(left) == len(jobs) else ', '.join(left)}")
    return f"**Not measured yet.** {'; '.join(found)}." if found else ""


# ---- the table


def fastest(entries: Entries, work: str) -> tuple[str, dict[str, Any]] | None:
    """Key and entry of the fastest that does this work."""
    found = [(key, entry) for key, entry in entries.items() if entry.get("work") == work and "bench" in entry]
    return max(found, key=lambda item: item[1]["bench"]["tokens_per_second_per_gpu"], default=None)


def baseline_of(entries: Entries, work: str) -> dict[str, Any] | None:
    """The fastest of theirs. Of fp8 and expert parallelism it is that of bf16 in whatever layout."""
    name = work.removesuffix("_fp8").removesuffix("_ep2")
    theirs = [entry["baseline"] for entry in entries.values() if entry.get("work") == name and "baseline" in entry]
    return max(theirs, key=lambda found: found["tokens_per_second_per_gpu"], default=None)


def table(entries: Entries) -> list[str]:
    rows = [(work, best) for work in WORKS if (best := fastest(entries, work))]
    lines = [
        "Medians of the steps after the warm-up, made-up tokens, routing as it comes from a random start, no "
        "assignment dropped but in Switch (capacity 1.25). TFLOP/s are model FLOPs of the experts a token takes: "
        "causal attention, recomputation not counted; the sustained GEMM is of the same run and of the run's "
        "precision. fp32 masters and moments, clipping at 1.0, the whole vocabulary. *Transformers*: the same work by "
        "that library's own model of these widths with grouped experts (`bench/moe_baseline.py`), in bf16 also beside "
        "fp8, without a balance loss.",
        "",
        PEERS,
        "",
    ]
    if not rows:
        return [*lines, "Nothing measured yet."]
    lines += [
        "| work | layers | GPUs | system | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | step s (spread) "
        "| loss | beside | target (two GPUs) |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for name, (key, entry) in rows:
        work, baseline = WORKS[name], baseline_of(entries, name)
        beside = _beside(entries, name, entry["bench"], baseline)
        start = f"| {work.title} | {entry['layers']} | {entry['processes']} | Paceline (`{key}`) "
        lines.append(f"{start}| {_figures(entry['bench'])} | {beside} | {work.target} |")
        if baseline and name == name.removesuffix("_fp8").removesuffix("_ep2"):
            version = baseline["versions"].get("transformers", "")
            lines.append(f"| | | | Transformers {version} | {_figures(baseline)} | | |")
    return lines


def _figures(record: Mapping[str, Any]) -> str:
    loss = "none" if record["loss"] is None else f"{record['loss']:.3f}"
    return (
        f"{record['tokens_per_second_per_gpu']:,.0f} | {tflops(record['tflops_per_gpu'])} "
        f"| {record['fraction_of_gemm']:.3f} of {tflops(record['sustained_gemm_tflops'])} "
        f"| {record['peak_memory_gib']:.1f} "
        f"| {record['step_seconds']:.3f} ({record['step_seconds_min']:.3f} to {record['step_seconds_max']:.3f}; "
        f"{record['steps']} steps) | {loss}"
    )


def _beside(entries: Entries, name: str, bench: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> str:
    """What the row is to be read against."""
    if name.startswith("switch_") and name != "switch_dense":
        dense = fastest(entries, "switch_dense")
        if dense is None:
            return ""
        factor = dense[1]["bench"]["tokens_per_second_per_gpu"] / bench["tokens_per_second_per_gpu"]
        return f"{factor:.2f} x the time of the dense twin"
    if baseline is None:
        return ""
    factor = bench["tokens_per_second_per_gpu"] / baseline["tokens_per_second_per_gpu"]
    return f"**{factor:.2f} x** Transformers"


def tflops(value: float) -> str:
    """Whole TFLOP/s of a GPU; of a tiny model on a CPU what there is."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def tuned(entries: Entries) -> list[str]:
    """Every way that was tried to do a work, the fastest first."""
    done = {key: entry for key, entry in entries.items() if entry.get("work") in WORKS and "bench" in entry}
    if not any(key.startswith("tune/") for key in done):
        return []
    lines = ["", "## All ways that were tried", ""]
    lines += ["| work | entry | how | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for work in WORKS:
        rows = [(key, entry) for key, entry in done.items() if entry["work"] == work]
        for key, entry in sorted(rows, key=lambda row: -row[1]["bench"]["tokens_per_second_per_gpu"]):
            bench = entry["bench"]
            lines.append(
                f"| {work} | `{key}` | {entry['title']} | {bench['tokens_per_second_per_gpu']:,.0f} "
                f"| {tflops(bench['tflops_per_gpu'])} | {bench['fraction_of_gemm']:.3f} "
                f"| {bench['peak_memory_gib']:.1f} |"
            )
    return lines


# ---- imbalance


def imbalance(entries: Entries) -> list[str]:
    done = {
        name: entry for name in ("natural", "even", "busy") if "train" in (entry := _of(entries, "imbalance", name))
    }
    if not done:
        return []
    lines = ["", "## Uneven loads", ""]
    lines += [
        "The first row's model and work, by `paceline train`, dropless. *Load*: tokens of the busiest expert over the "
        "mean, in the layer where it is largest.",
        "",
        "| routing | step s (spread) | speed | load | dropped | peak GiB | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    even = done.get("even", {}).get("train")
    for entry in done.values():
        train = entry["train"]
        speed = f"{even['step_seconds'] / train['step_seconds']:.1%} of even" if even else ""
        spread = f"{train['step_seconds_min']:.3f} to {train['step_seconds_max']:.3f}"
        loss = "none" if train["loss"] is None else f"{train['loss']:.3f}"
        lines.append(
            f"| {entry['title']} | {train['step_seconds']:.3f} ({spread}) | {speed} "
            f"| {max(train['load_max_over_mean']):.2f} | {max(train['drop_share']):.1%} "
            f"| {train['peak_memory_gib']:.1f} | {loss} |"
        )
    return lines


def _of(entries: Entries, part: str, name: str) -> dict[str, Any]:
    return entries.get(f"{part}/{name}", {})


# ---- where the time goes


def profiles(entries: Entries) -> list[str]:
    done = {entry["title"]: entry["profile"] for entry in entries.values() if "profile" in entry}
    if not done:
        return []
    kinds = list(dict.fromkeys(itertools.chain.from_iterable(profile["by_kind_ms"] for profile in done.values())))
    lines = ["", "## Where a step goes, milliseconds", ""]
    lines += ["Kernels of several streams overlap, so the parts may sum to more than the step.", ""]
    lines += [f"| kind | {' | '.join(done)} |", "| --- |" + " ---: |" * len(done)]
    for kind in kinds:
        lines.append(f"| {kind} | {' | '.join(_ms(profile['by_kind_ms'].get(kind)) for profile in done.values())} |")
    for name in ("exposed_communication_ms", "idle_ms", "wall_ms"):
        title = name.removesuffix("_ms").replace("_", " ")
        lines.append(f"| *{title}* | {' | '.join(_ms(profile[name]) for profile in done.values())} |")
    launches = " | ".join(_ms(profile["gaps"]["of_launches_ms"]) for profile in done.values())
    lines.append(f"| *of idle: gaps of at most 20 us* | {launches} |")
    return lines


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


# ---- numerics


def numerics(entries: Entries) -> list[str]:
    curves = {
        key.removeprefix("curves/"): entry["losses"]
        for key, entry in entries.items()
        if key.startswith("curves/") and "losses" in entry
    }
    if REFERENCE not in curves:
        return []
    reference = curves[REFERENCE]
    seeds = (REFERENCE, *(f"seed{seed}" for seed in SEEDS))
    titles = {name: _of(entries, "curves", name)["title"] for name in curves if name not in seeds}
    return [
        "",
        "## Loss curves",
        "",
        f"{len(reference)} steps of the demo's text: 6 layers of width 512, 16 experts, top-4, 8,192 tokens a step, "
        "bf16, the same seed and data unless the row says otherwise; differences of the training loss from plain "
        f"experts with nothing fused {ends(reference)}, {SAID}",
        "",
        *gap_rows(curves, seeds, titles),
        *skipped_lines(curves),
    ]
