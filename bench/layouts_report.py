"""The page docs/measured/layouts.md from the numbers of `bench/layouts.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from layouts_jobs import PARTS, jobs_of
from results import SHARED, head, notes_and_failures

Entries: TypeAlias = dict[str, dict[str, Any]]
Curve: TypeAlias = Sequence[float | None]
"""The loss of each step; None of one that was skipped."""

WINDOW = 5
"""Steps of the running mean."""
REFERENCE = {"dense": "one", "moe": "moe_one"}
FIGURES = (
    "step_seconds",
    "step_seconds_min",
    "step_seconds_max",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "fraction_of_gemm",
    "sustained_gemm_tflops",
    "peak_memory_gib",
    "loss",
)
"""Of the record of `paceline bench`, what the page shows."""
SHARED_TEXT = (
    "Entries marked *shared* ran their two ranks on one GPU, each as if on a host of its own, and talked over sockets: "
    "their step times mean nothing and are left out. Only their losses and the memory of each rank count."
)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far a loss curve is from another one, in nats a token; the largest and the mean over steps."""

    raw: float
    raw_at: int
    """Step of the largest difference, from 1."""
    smooth: float
    """Largest difference of the running means over `WINDOW` steps."""
    mean: float
    last: float
    """Difference of the last running means, with its sign."""


def gap(losses: Curve, reference: Curve) -> Gap | None:
    """Over the steps that both have; None without any. A window of the running means without such a step is left out.

    Raises:
        ValueError: one has more steps than the other.
    """
    if len(losses) != len(reference):
        raise ValueError(f"{len(losses)} steps beside {len(reference)}")
    each = [None if a is None or b is None else a - b for a, b in zip(losses, reference, strict=True)]
    there = [abs(value) for value in each if value is not None]
    if not there:
        return None
    smooth = running_mean(each)
    return Gap(
        raw=max(there),
        raw_at=1 + next(step for step, value in enumerate(each) if value is not None and abs(value) == max(there)),
        smooth=max(abs(value) for value in smooth),
        mean=sum(there) / len(there),
        last=smooth[-1],
    )


def running_mean(values: Curve, window: int = WINDOW) -> list[float]:
    """Of whole windows; of what is there in each."""
    window = min(window, len(values))
    ends = range(window, len(values) + 1)
    windows = ([value for value in values[end - window : end] if value is not None] for end in ends)
    return [sum(there) / len(there) for there in windows if there]


def page(data: dict[str, Any]) -> list[str]:
    entries: Entries = data["entries"]
    lines = head("Every parallelism on two GPUs", data)
    if any(entry.get(SHARED) for entry in entries.values()):
        lines += [SHARED_TEXT, ""]
    if missing := not_measured(data):
        lines += [missing, ""]
    lines += [*speed(of_part(entries, "speed")), *curves(of_part(entries, "curves")), *long(of_part(entries, "long"))]
    return lines + notes_and_failures(entries)


def not_measured(data: dict[str, Any]) -> str:
    """What the bench has jobs for and no result of; "" of a dry run, which is asked for some of them."""
    if data.get("tiny"):
        return ""
    done = {key for key, entry in data["entries"].items() if "failed" not in entry}
    found = []
    for part in PARTS:
        jobs = jobs_of(part)
        left = [job.name for job in jobs if job.key not in done]
        if left:
            found.append(f"{part}: {'everything' if len(left) == len(jobs) else ', '.join(left)}")
    return f"**Not measured yet.** {'; '.join(found)}." if found else ""


def of_part(entries: Entries, part: str) -> Entries:
    start = f"{part}/"
    return {key.removeprefix(start): entry for key, entry in entries.items() if key.startswith(start)}


# ---- speed


def speed(entries: Entries) -> list[str]:
    done = {name: entry for name, entry in entries.items() if "bench" in entry}
    if not done:
        return []
    dense = [name for name, entry in done.items() if entry["model"] == "dense"]
    experts = [name for name, entry in done.items() if entry["model"] == "moe"]
    lines = ["## Step time and memory", ""]
    lines += [
        "Llama-3-8B's widths (hidden 4096, 32 heads, 8 KV heads, FFN 14336, vocabulary 128256) with 8 layers, 2.80 B "
        "parameters. The same work everywhere: 8 sequences of 8192 tokens a step, 1 a micro-batch; bf16, gradients "
        "summed in fp32, nothing recomputed, synthetic data. *Scaling*: speed of a GPU beside that of the run on one "
        "GPU, compiled or not alike. *Loss*: of the last step.",
        "",
        *_speed_rows(done, sorted(dense, key=lambda name: (done[name]["processes"], not done[name]["compiled"]))),
    ]
    if experts:
        lines += [
            "",
            "With experts: 4 layers of the same width, 8 experts of FFN 7168, top-2 (as many products a token as the "
            "dense layer), 4.04 B parameters; not compiled.",
            "",
            *_speed_rows(done, sorted(experts, key=lambda name: done[name]["processes"])),
        ]
    return lines


def _speed_rows(done: Entries, names: Sequence[str]) -> Iterator[str]:
    columns = [
        "layout",
        "GPUs",
        "compiled",
        "step s",
        "tokens/s/GPU",
        "TFLOP/s/GPU",
        "of sustained GEMM",
        "scaling",
        "peak GiB",
        "loss",
    ]
    yield f"| {' | '.join(columns)} |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in names:
        entry, bench = done[name], done[name]["bench"]
        times = "| shared |  |  |  |  "
        if not entry.get(SHARED):
            times = (
                f"| {bench['step_seconds']:.3f} "
                f"| {bench['tokens_per_second_per_gpu']:,.0f} | {bench['tflops_per_gpu']:.0f} "
                f"| {bench['fraction_of_gemm']:.3f} of {bench['sustained_gemm_tflops']:.0f} | {_scaling(done, name)} "
            )
        yield (
            f"| {entry['title'].removesuffix(', not compiled')} | {_gpus(entry)} "
            f"| {'yes' if entry['compiled'] else 'no'} {times}| {bench['peak_memory_gib']:.1f} "
            f"| {loss_text(bench['loss'])} |"
        )


def _gpus(entry: dict[str, Any]) -> str:
    return f"{entry['processes']} ranks on 1" if entry.get(SHARED) else str(entry["processes"])


def _scaling(done: Entries, name: str) -> str:
    entry = done[name]
    alone = "moe_one" if entry["model"] == "moe" else "one" if entry["compiled"] else "one_eager"
    if alone not in done or name == alone or done[alone].get(SHARED):
        return ""
    speeds = [done[each]["bench"]["tokens_per_second_per_gpu"] for each in (name, alone)]
    return f"{speeds[0] / speeds[1]:.3f}"


def loss_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


# ---- curves


def curves(entries: Entries) -> list[str]:
    done = {name: entry for name, entry in entries.items() if "losses" in entry}
    models = [model for model, name in REFERENCE.items() if name in done]
    if not models:
        return []
    lines = ["", "## Loss curves in bf16", ""]
    steps = len(done[REFERENCE[models[0]]]["losses"])
    lines += [
        f"{steps} steps of the demo's text (Python's standard library) with the demo's model for GPUs (12 layers of "
        "768, vocabulary 4096; 1024 tokens, 32 sequences a step), AdamW, against one GPU with the same seed. "
        f"Differences of the training loss in nats a token; *smoothed*: of running means over {WINDOW} steps.",
        "",
        "Two bands. *Rounding*: the largest difference from the reference among runs on one GPU with the same weights "
        "and the same data in the same order, which only sum in another order or round in other places. *Seeds*: the "
        "same among runs with other weights and another order of the data. A layout whose difference is within the "
        "rounding band is as near to one GPU as one GPU is to itself.",
    ]
    for model in models:
        lines += ["", *_curve_rows(done, model)]
    return lines


def _curve_rows(done: Entries, model: str) -> Iterator[str]:
    reference = done[REFERENCE[model]]["losses"]
    title = "Dense" if model == "dense" else "With 8 experts, top-2"
    yield f"{title}: loss {loss_text(reference[0])} to {loss_text(reference[-1])}."
    yield ""
    yield "| run | largest | at step | largest, smoothed | mean | last, smoothed | of the rounding band (smoothed) |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    found = {
        kind: {
            name: gap(entry["losses"], reference)
            for name, entry in done.items()
            if entry["model"] == model and entry["kind"] == kind and len(entry["losses"]) == len(reference)
        }
        for kind in ("layout", "rounding", "fp32", "seed")
    }
    band = band_of(found["rounding"].values())
    for kind, title in (("rounding", "rounding"), ("seed", "seeds")):
        if (both := band_of(found[kind].values())) is not None:
            yield f"| **band: {title}** ({len(found[kind])} runs) | **{both[0]:.4f}** | | **{both[1]:.4f}** | | | |"
    for gaps in found.values():
        for name, each in gaps.items():
            title = done[name]["title"] + (" (shared)" if done[name].get(SHARED) else "")
            if each is None:
                yield f"| {title} | no step with a loss in both | | | | | |"
                continue
            share = f"{each.raw / band[0]:.2f} ({each.smooth / band[1]:.2f})" if band and all(band) else ""
            yield (
                f"| {title} | {each.raw:.4f} | {each.raw_at} | {each.smooth:.4f} | {each.mean:.4f} "
                f"| {each.last:+.4f} | {share} |"
            )
    skipped = {name: done[name]["losses"].count(None) for name in done if done[name]["model"] == model}
    if any(skipped.values()):
        said = ", ".join(f"{name} {number}" for name, number in skipped.items() if number)
        yield ""
        yield f"Steps skipped because something was not finite, left out of every difference: {said}."


def band_of(gaps: Iterable[Gap | None]) -> tuple[float, float] | None:
    """The largest difference, raw and smoothed; None without runs."""
    each = [item for item in gaps if item is not None]
    return (max(item.raw for item in each), max(item.smooth for item in each)) if each else None


# ---- long


def long(entries: Entries) -> list[str]:
    done = {name: entry for name, entry in entries.items() if "bench" in entry}
    if not done:
        return []
    lines = [
        "",
        "## 131,072 tokens",
        "",
        "Llama-1B (16 layers, hidden 2048, untied, 1.50 B parameters), one sequence of 131,072 tokens a step, cp 2, "
        "bf16, compiled.",
        "",
        "| attention, recompute | step s | spread | tokens/s/GPU | TFLOP/s/GPU | of sustained GEMM | peak GiB | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in done.values():
        bench = entry["bench"]
        times = "| shared |  |  |  |  "
        if not entry.get(SHARED):
            times = (
                f"| {bench['step_seconds']:.2f} | {bench['step_seconds_min']:.2f} to {bench['step_seconds_max']:.2f} "
                f"| {bench['tokens_per_second_per_gpu']:,.0f} | {bench['tflops_per_gpu']:.0f} "
                f"| {bench['fraction_of_gemm']:.3f} of {bench['sustained_gemm_tflops']:.0f} "
            )
        lines.append(f"| {entry['title']} {times}| {bench['peak_memory_gib']:.1f} | {loss_text(bench['loss'])} |")
    return lines
