"""Where do the milliseconds of a training step go? Kernel time by kind, from one profiled step of a recipe.

    python bench/profile_step.py recipes/llama3_8b.toml --steps 5 --out docs/measured/profile.json
    torchrun --nproc-per-node 2 bench/profile_step.py recipes/llama3_8b.toml

Runs the trainer's own step on synthetic data and prints a table on rank 0. Kernels run on several streams, so the parts
sum to more than the step; `exposed` is NCCL time during which no other kernel ran.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.config.load import load_recipe
from paceline.report.console import make_console, print_table
from paceline.report.table import table
from paceline.runtime.device import choose_device, device_name, versions
from paceline.runtime.process import process_group, process_info
from paceline.training.feed import Feed, open_datasets
from paceline.training.setup import build_parts, rates

KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|cudnn.*sdpa|attention|sm90_xmma.*fprop|cudnn_generated"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|sm90_.*mma"),
    ("optimizer", r"adam|multi_tensor|lpnorm|foreach"),
    ("compiled (triton)", r"triton"),
    ("copies and casts", r"copy|memcpy|memset|cat|split|cast|fill"),
    ("elementwise and reductions", r""),
)
"""Name, and what a kernel's name contains; the first that fits."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=4, help="steps before the profiled one")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, ["data.train=synthetic", *arguments.overrides])
    info = process_info()
    device = choose_device(info, "cuda")
    with process_group(info, device, timeout_seconds=timedelta(minutes=10).total_seconds()):
        parts = build_parts(recipe.config, recipe.registry, info, device)
        samples = (arguments.steps + 2) * recipe.config.train.global_batch_size
        datasets = open_datasets(recipe.config, recipe.registry, train_samples=samples)
        feed = Feed.open(datasets.train, recipe.config, parts.mesh, device, start_sample=0)
        for step in range(1, arguments.steps + 1):
            parts.step.run(step, feed.next_step())
        torch.cuda.synchronize()
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            parts.step.run(arguments.steps + 1, feed.next_step())
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
        feed.close()
        if info.is_main:
            result = summarize(kernels(profiler), wall)
            train = recipe.config.train
            tokens = train.global_batch_size * train.seq_len / info.world_size
            result |= {
                "recipe": arguments.recipe,
                "devices": f"{info.world_size} x {device_name(device)}",
                "versions": versions(),
                "model_tflop_per_step": (rates(recipe.config, device).flops_per_token or 0) * tokens / 1e12,
            }
            show(result)
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def kernels(profiler: profile) -> list[tuple[str, float, float]]:
    """(name, start, end) of every kernel and copy on the GPU, in seconds."""
    found = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.append((event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return found


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def summarize(events: Iterable[tuple[str, float, float]], wall: float) -> dict[str, Any]:
    """Milliseconds by kind, the largest kernels, and what of the communication nothing hides."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name, start, end in events:
        kind = kind_of(name)
        by_kind[kind] += end - start
        by_name[name] += end - start
        spans[kind == "communication"].append((start, end))
    busy, everything = length(spans[False]), length(spans[False] + spans[True])
    return {
        "wall_ms": wall * 1e3,
        "gpu_busy_ms": everything * 1e3,
        "idle_ms": (wall - everything) * 1e3,
        "exposed_communication_ms": (everything - busy) * 1e3,
        "by_kind_ms": {kind: by_kind[kind] * 1e3 for kind, _ in KINDS if kind in by_kind},
        "largest_kernels_ms": {
            name[:110]: seconds * 1e3 for name, seconds in sorted(by_name.items(), key=lambda item: -item[1])[:25]
        },
    }


def length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def show(result: dict[str, Any]) -> None:
    rows = [(kind, f"{ms:.1f}", f"{ms / result['wall_ms']:.1%}") for kind, ms in result["by_kind_ms"].items()]
    rows += [
        (name.replace("_ms", "").replace("_", " "), f"{result[name]:.1f}", f"{result[name] / result['wall_ms']:.1%}")
        for name in ("exposed_communication_ms", "idle_ms", "wall_ms")
    ]
    console = make_console()
    print_table(console, table(("kind", ">ms", ">of the step"), rows))
    print_table(console, table(("kernel", ">ms"), [(n, f"{ms:.1f}") for n, ms in result["largest_kernels_ms"].items()]))


if __name__ == "__main__":
    main()
