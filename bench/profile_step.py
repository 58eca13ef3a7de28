"""Where do the milliseconds of a training step go? Kernel time by kind, from one profiled step of a recipe.

    python bench/profile_step.py recipes/llama3_8b.toml --steps 5 --out docs/measured/profile.json
    torchrun --nproc-per-node 2 bench/profile_step.py recipes/llama3_8b.toml

Runs the trainer's own step on synthetic data and prints on rank 0: milliseconds by kind, the largest kernels of each
kind, and the gaps in which no kernel ran, with what ran before and after them. Kernels run on several streams, so the
parts sum to more than the step; `exposed` is NCCL time during which no other kernel ran. With --mark-head what head and
loss launch, both ways, is a kind of its own: a kernel that nothing else launches marks where they begin and end.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import cut_off
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from paceline.config.load import load_recipe
from paceline.kernels.cross_entropy import HeadLoss
from paceline.report.console import make_console, print_table
from paceline.report.table import table
from paceline.runtime.device import choose_device, device_name, synchronize, versions
from paceline.runtime.process import process_group, process_info
from paceline.training.feed import Feed, open_datasets
from paceline.training.setup import build_parts, rates

KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl"),
    ("head and loss", r"^head: "),
    ("products of experts", r"expert_(product|weight)|GroupProblemShape|grouped_mm|grouped_gemm"),
    ("routing", r"_expert_(rank|place)|topk|radix|bitonic|sort|fused\w*softmax"),
    ("rows of experts", r"_expert_"),
    ("attention", r"flash|fmha|cudnn.*sdpa|attention|sm90_xmma.*fprop|cudnn_generated"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|sm90_.*mma"),
    ("optimizer", r"adam|multi_tensor|lpnorm|foreach"),
    ("compiled (triton)", r"triton"),
    ("copies and casts", r"copy|memcpy|memset|cat|split|cast|fill"),
    ("elementwise and reductions", r""),
)
"""Name, and what a kernel's name contains; the first that fits."""
MARK, HEAD = "erfinv", "head: "
"""Of the kernel that marks the head, what its name contains; how kernels of the head are named then."""
LARGEST, NAME = 6, 110
"""Kernels of a kind that are listed; characters of a name."""
LAUNCH = 20e-6
"""Seconds: a gap up to this is one that a launch leaves, a longer one is a wait for the host or for another rank."""

Event: TypeAlias = tuple[str, float, float]
"""Name, start and end in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=4, help="steps before the profiled one")
    parser.add_argument("--mark-head", action="store_true", help="head and loss are a kind of their own")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, ["data.train=synthetic", *arguments.overrides])
    info = process_info()
    device = choose_device(info, recipe.config.cluster.device)
    with process_group(info, device, timeout_seconds=timedelta(minutes=10).total_seconds()):
        parts = build_parts(recipe.config, recipe.registry, info, device)
        for stage in parts.stages if arguments.mark_head else ():
            stage.head_loss = MarkedHeadLoss(stage.head_loss, device)
        samples = (arguments.steps + 2) * recipe.config.train.global_batch_size
        datasets = open_datasets(recipe.config, recipe.registry, train_samples=samples)
        feed = Feed.open(datasets.train, recipe.config, parts.mesh, device, start_sample=0)
        for step in range(1, arguments.steps + 1):
            parts.step.run(step, feed.next_step())
        synchronize(device)
        began = time.perf_counter()
        # on a CPU, to try it out: operations in the place of kernels, each within the one that called it
        on_gpu = device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            parts.step.run(arguments.steps + 1, feed.next_step())
            synchronize(device)
        wall = time.perf_counter() - began
        feed.close()
        if info.is_main:
            result = summarize(name_head(kernels(profiler, device)), wall)
            train = recipe.config.train
            tokens = train.global_batch_size * train.seq_len / info.world_size
            flops = rates(recipe.config, device, parts.documents).flops_per_token or 0
            result |= {
                "recipe": arguments.recipe,
                "devices": f"{info.world_size} x {device_name(device)}",
                "versions": versions(),
                "model_tflop_per_step": flops * tokens / 1e12,
            }
            show(result)
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")


class MarkedHeadLoss:
    """A head's loss between two marks. Its gradients are computed with it, so both ways lie between them."""

    def __init__(self, plain: HeadLoss, device: torch.device) -> None:
        self._plain, self._zero = plain, torch.zeros((), device=device)

    def __call__(
        self, hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        self._zero.erfinv_()  # of 0: 0
        found = self._plain(hidden_NC, weight_VC, labels_N, logit_softcap=logit_softcap)
        self._zero.erfinv_()
        return found


def name_head(events: Iterable[Event]) -> list[Event]:
    """Kernels between two marks get `HEAD` before their names, communication aside; the marks are left out."""
    found: list[Event] = []
    inside = False
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if MARK in name:
            inside = not inside
        else:
            found.append((HEAD + name if inside and kind_of(name) != "communication" else name, start, end))
    return found


def kernels(profiler: profile, device: torch.device) -> list[Event]:
    """Every kernel and copy on the GPU."""
    wanted = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    found = []
    for event in profiler.events():
        if event.device_type == wanted:
            found.append((event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
    return found


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def summarize(events: Iterable[Event], wall: float) -> dict[str, Any]:
    """Milliseconds by kind, the largest kernels of each, what of the communication nothing hides, and the gaps."""
    events = list(events)
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name, start, end in events:
        kind = kind_of(name)
        by_kind[kind] += end - start
        by_name[kind][name].append(end - start)
        spans[kind == "communication"].append((start, end))
    busy, everything = length(spans[False]), length(spans[False] + spans[True])
    return {
        "wall_ms": wall * 1e3,
        "gpu_busy_ms": everything * 1e3,
        "idle_ms": (wall - everything) * 1e3,
        "exposed_communication_ms": (everything - busy) * 1e3,
        "by_kind_ms": {kind: by_kind[kind] * 1e3 for kind, _ in KINDS if kind in by_kind},
        "largest_kernels": {kind: largest(by_name[kind]) for kind, _ in KINDS if kind in by_name},
        "gaps": gaps(events),
    }


def largest(seconds: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """The kernels that take most, with how often they ran."""
    first = sorted(seconds.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    return [{"name": name[:NAME], "ms": sum(each) * 1e3, "calls": len(each)} for name, each in first]


def gaps(events: Sequence[Event]) -> dict[str, Any]:
    """Times between the first and the last kernel in which none ran, and the longest of them with their neighbours."""
    found: list[tuple[float, float, str, str]] = []
    reached, last = float("inf"), ""
    for name, start, end in sorted(events, key=lambda event: event[1]):
        if start > reached:
            found.append((start - reached, reached, last, name))
        if not last or end > reached:
            reached, last = end, name
    began = min((start for _, start, _ in events), default=0.0)
    short = [seconds for seconds, *_ in found if seconds <= LAUNCH]
    return {
        "number": len(found),
        "ms": sum(seconds for seconds, *_ in found) * 1e3,
        "of_launches": len(short),
        "of_launches_ms": sum(short) * 1e3,
        "longest": [
            {"ms": seconds * 1e3, "at_ms": (at - began) * 1e3, "after": after[:NAME], "before": before[:NAME]}
            for seconds, at, after, before in sorted(found, reverse=True)[:LARGEST]
        ],
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
    kernels = [
        (kind, each["name"], f"{each['ms']:.1f}", str(each["calls"]))
        for kind, found in result["largest_kernels"].items()
        for each in found
    ]
    print_table(console, table(("kind", "kernel", ">ms", ">calls"), kernels))
    idle = result["gaps"]
    console.print(
        f"{idle['number']} gaps between kernels, {idle['ms']:.1f} ms; {idle['of_launches']} of them of at most "
        f"{LAUNCH * 1e6:.0f} us, {idle['of_launches_ms']:.1f} ms"
    )
    longest = [(f"{gap['ms']:.2f}", f"{gap['at_ms']:.1f}", gap["after"], gap["before"]) for gap in idle["longest"]]
    print_table(console, table((">gap, ms", ">at", "after", "before"), longest))


if __name__ == "__main__":
    cut_off.run(main)
