"""The page docs/measured/post_training.md from the numbers of `bench/post_training.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dense_table import loss_text
from post_training_jobs import PARTS, jobs_of, works
from results import head, notes_and_failures

FIGURES = (
    "step_seconds",
    "step_seconds_min",
    "step_seconds_max",
    "tokens_per_second_per_gpu",
    "peak_memory_gib",
    "loss",
)
"""Of every record, what the page shows."""
TARGETS = {
    ("lora", "bf16"): 1.35,
    ("lora", "fp8"): 1.7,
    ("lora_2", "bf16"): 1.35,
    ("lora_2", "fp8"): 1.7,
    ("lora_whole", "bf16"): 1.35,
    ("lora_whole", "fp8"): 1.7,
    ("full", "bf16"): 1.4,
    ("full", "fp8"): 1.6,
    ("moe_full", "bf16"): 1.5,
}
"""Times the tokens a second of the best baseline, by work and precision, with no more memory than that baseline has."""
CONVERT_SHARE, CONVERT_GIB = 0.7, 4.0
CONVERSIONS = ("hf_to_paceline", "paceline_to_hf", "hf_to_megatron")


def page(data: Mapping[str, Any], *, one_gpu: bool) -> list[str]:
    where = "one GPU, larger models cut in depth" if one_gpu else "one and two GPUs"
    lines = [
        *head(f"Fine-tuning on {where}, beside Transformers, PEFT and Liger kernels", dict(data)),
        "Both sides read the same packed rows in the same order, with the same batch; documents of a row do not see",
        "each other; answers alone have a loss. Full fine-tuning: fp32 masters and moments on both sides. The baseline",
        "is the faster of its settings of recomputation that fit. Weights are random, conversations made up with the",
        "lengths of real ones (bench/post_training_data.py).",
        "",
    ]
    entries = data["entries"]
    if missing := not_measured(data, one_gpu=one_gpu):
        lines += [missing, ""]
    for name, work in works(one_gpu=one_gpu).items():
        lines += list(_table(entries, name, work.title, work.processes))
    return [*lines, *_conversion(entries), *notes_and_failures(entries)]


def not_measured(data: Mapping[str, Any], *, one_gpu: bool) -> str:
    """ "" of a dry run, which is asked for some of it."""
    if data.get("tiny"):
        return ""
    done = {key for key, entry in data["entries"].items() if "failed" not in entry}
    left = [job.key for part in PARTS for job in jobs_of(part, one_gpu=one_gpu) if job.key not in done]
    return f"**Not measured yet:** {', '.join(left)}." if left else ""


def figures(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = entry.get("train") or entry.get("baseline")
    return found


def best_baseline(entries: Mapping[str, Any], work: str) -> Mapping[str, Any] | None:
    """The fastest of its settings."""
    found = [entry["baseline"] for entry in entries.values() if entry.get("work") == work and entry.get("baseline")]
    return max(found, key=lambda each: each["tokens_per_second_per_gpu"], default=None)


def verdict(ours: Mapping[str, Any], theirs: Mapping[str, Any], target: float | None) -> str:
    """Speed and memory, each beside the baseline's: both must hold."""
    times = ours["tokens_per_second_per_gpu"] / theirs["tokens_per_second_per_gpu"]
    more = ours["peak_memory_gib"] - theirs["peak_memory_gib"]
    memory = "no more memory" if more <= 0 else f"{more:.1f} GiB more"
    if target is None:
        return f"{times:.2f} x, {memory}"
    word = "met" if times >= target and more <= 0 else "**missed**"
    return f"{times:.2f} x of {target} x, {memory}: {word}"


def _table(entries: Mapping[str, Any], work: str, title: str, processes: int) -> Iterator[str]:
    rows = {key: entry for key, entry in entries.items() if entry.get("work") == work and "failed" not in entry}
    if not rows:
        return
    theirs = best_baseline(entries, work)
    layers = next((entry["layers"] for entry in rows.values() if entry.get("layers")), 0)
    cut = f", {layers} layers" if layers else ""
    yield from (f"## {title}{cut}, {processes} GPU{'s' * (processes > 1)}", "")
    yield "| system | tokens/s/GPU | step s (spread) | peak GiB | loss | beside the best baseline |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for key, entry in rows.items():
        if (made := figures(entry)) is None:
            yield f"| {_system(entry)} (`{key}`) | ran out of memory | | | | |"
            continue
        beside = ""
        if theirs is not None and "train" in entry:
            beside = verdict(made, theirs, TARGETS.get((work, entry["precision"])))
        spread = f"{made['step_seconds']:.3f} ({made['step_seconds_min']:.3f} to {made['step_seconds_max']:.3f})"
        yield (
            f"| {_system(entry)} (`{key}`) | {made['tokens_per_second_per_gpu']:,.0f} | {spread} "
            f"| {made['peak_memory_gib']:.1f} | {loss_text(made['loss'])} | {beside} |"
        )
    yield ""
    if theirs is not None:
        used = ", ".join(f"{name} {value or 'not installed'}" for name, value in theirs["used"].items())
        yield from (f"Baseline: {used}.", "")


def _system(entry: Mapping[str, Any]) -> str:
    return f"Paceline, {entry['title']}" if entry["kind"] == "train" else str(entry["title"])


def _conversion(entries: Mapping[str, Any]) -> Iterator[str]:
    found = next((entry["convert"] for entry in entries.values() if entry.get("convert")), None)
    if found is None:
        return
    yield from (f"## Conversion of {found['gb']:g} GB", "")
    same = "yes" if found["same_bits"] else "**no**"
    yield f"Beside {found['disk_gb_per_second']:.2f} GB/s of a plain copy; the same bits there and back: {same}."
    yield from ("", "| from, to | GB/s | of the copy | peak GiB | |", "| --- | ---: | ---: | ---: | --- |")
    for name in CONVERSIONS:
        share, gib = found[f"{name}_share_of_disk"], found[f"{name}_peak_rss_gib"]
        word = "met" if share >= CONVERT_SHARE and gib < CONVERT_GIB else "**missed**"
        yield f"| {name.replace('_', ' ')} | {found[f'{name}_gb_per_second']:.2f} | {share:.2f} | {gib:.2f} | {word} |"
    yield ""
