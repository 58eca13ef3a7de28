"""A mini-replication of the Switch Transformer: experts at equal FLOPs a token, the router's precision, capacities.

    python bench/switch.py small                   # 0.8M tokens a run: 3 to 5 minutes each on a core of a CPU
    python bench/switch.py large --at-once 4       # 12.3M tokens a run, four runs at a time on a GPU
    python bench/switch.py small --only dense_0    # one run
    python bench/switch.py small --tiny --results DIR --work DIR
    python bench/switch.py list                    # every run
    python bench/switch.py report                  # the page alone: docs/switch.md and its pictures

Each entry is one `paceline train` of recipes/moe/switch_mini.toml, by three seeds: other weights, another order of the
text, other noise. Every run reads as many tokens, spends as many FLOPs on each (a router's aside), and is evaluated on
the same held-out text. It is written to switch.json the moment it ends; what is done is skipped. bench/switch.sh calls
this, bench/runner.py runs the jobs, docs/make_switch.py writes the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jobs
from found import every_step, rounded
from results import OWN, Results, head, notes_and_failures
from runner import Bench, Found, main

PARTS = ("small", "large")
RECIPE = "recipes/moe/switch_mini.toml"
SEEDS = (0, 1, 2)
EVERY = 10
"""Steps of a point of a kept curve."""


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One run. ``variant``: what is compared; its three seeds share it."""

    kind: str = "curve"
    variant: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Variant:
    title: str
    sets: tuple[str, ...]


VARIANTS = {
    "dense": Variant(title="dense", sets=("model.num_experts=0", "model.top_k=0")),
    "experts2": Variant(title="2 experts", sets=("model.num_experts=2",)),
    "experts4": Variant(title="4 experts", sets=("model.num_experts=4",)),
    "experts8": Variant(title="8 experts", sets=("model.num_experts=8",)),
    "bf16_router": Variant(
        title="8 experts, router in bf16", sets=("model.num_experts=8", "model.moe.router_precision=model")
    ),
    "capacity1": Variant(
        title="8 experts, capacity 1.0", sets=("model.num_experts=8", "model.moe.capacity_factor=1.0")
    ),
    "capacity2": Variant(
        title="8 experts, capacity 2.0", sets=("model.num_experts=8", "model.moe.capacity_factor=2.0")
    ),
}
"""In the order of their importance. `experts8` has an fp32 router and a capacity of 1.25."""
SIZES: dict[str, tuple[str, ...]] = {
    "small": ("train.steps=400",),
    "large": (
        "model.hidden_size=256",
        "model.num_heads=8",
        "model.num_kv_heads=8",
        "model.ffn_size=1024",
        "train.steps=1500",
        "train.micro_batch_size=32",
        "train.global_batch_size=32",
        "optim.warmup_steps=150",
    ),
}
_QUIET = (
    "observe.log_interval=1",
    "observe.progress=none",
    "observe.tensorboard=false",
    "observe.sample_prompts=[]",
    "checkpoint.interval=0",
    "checkpoint.save_last=false",
)


def jobs_of(part: str) -> list[Job]:
    """Seed by seed: a bench that is cut off has whole comparisons of fewer seeds."""
    return [
        Job(
            part=part,
            name=f"{name}_{seed}",
            title=variant.title,
            variant=name,
            seed=seed,
            recipe=RECIPE,
            processes=1,
            sets=(*SIZES[part], *variant.sets, *_QUIET, f"run.seed={seed}"),
            estimate=300.0 if part == "small" else 70.0,
        )
        for names in (list(VARIANTS)[:4], list(VARIANTS)[4:])
        for seed in SEEDS
        for name, variant in VARIANTS.items()
        if name in names
    ]


def tiny(job: Job) -> Job:
    """The same with a model that a CPU trains in seconds: whether it runs at all."""
    small = (
        "cluster.device=cpu",
        "model.hidden_size=32",
        "model.num_heads=2",
        "model.num_kv_heads=2",
        "model.head_dim=16",
        "model.ffn_size=64",
        "train.seq_len=32",
        "train.steps=12",
        "train.micro_batch_size=2",
        "train.global_batch_size=2",
        "train.eval_steps=1",
        "optim.warmup_steps=2",
        "data.num_workers=0",
    )
    return replace(job, sets=(*job.sets, *small), estimate=20.0)


class SwitchResults(Results):
    """switch.json; switch.md beside it is short, the page for people is docs/switch.md."""

    def __init__(self, folder: Path) -> None:
        self.own = folder.resolve() == OWN.resolve()
        super().__init__(folder, "switch", {"run": dict})

    def page(self) -> list[str]:
        return page(self.data, own=self.own)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data, own=self.own)

    def draw(self) -> None:
        """The page for people, of the project's own results."""
        if self.own and self.path.is_file():
            subprocess.run([sys.executable, "docs/make_switch.py"], check=True)


def page(data: dict[str, Any], *, own: bool) -> list[str]:
    """Every run in a line."""
    done = {key: entry["run"] for key, entry in data["entries"].items() if "run" in entry}
    lines = head("Mini-replication of the Switch Transformer, run by run", data)
    lines += ["What it means: [switch.md](../switch.md).", ""] if own else []
    lines += ["| run | held-out loss | training loss, last tenth | dropped, last half | load, last half | tokens/s |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for key, run in done.items():
        drop = "" if run["drop_share"] is None else f"{run['drop_share']:.2%}"
        load = "" if run["load_max_over_mean"] is None else f"{run['load_max_over_mean']:.2f}"
        lines.append(
            f"| `{key}` | {run['valid_loss']:.4f} | {run['train_loss']:.4f} | {drop} | {load} "
            f"| {run['tokens_per_second']:,.0f} |"
        )
    return lines + notes_and_failures(data["entries"])


def command_of(job: Job, folder: Path) -> list[str]:
    sets = [f"--set={item}" for item in job.sets]
    return ["-m", "paceline", "train", job.recipe, "--nproc=1", *sets, f"--set=run.dir={folder}/run"]


def found_in(job: Job, folder: Path) -> Found:
    """Held-out loss at the end, and what the metrics say of the way there.

    Raises:
        OSError, LookupError, TypeError, ValueError: the run did not end.
    """
    records = every_step(job, folder)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    half, tenth = records[len(records) // 2 :], records[-max(1, len(records) // 10) :]
    losses = [record["loss"] for record in records]
    run = {
        "valid_loss": summary["evaluation"]["loss"],
        "valid_tokens": summary["evaluation"]["tokens"],
        "unigram_loss": summary["evaluation"]["unigram_loss"],
        "train_loss": mean([record["loss"] for record in tenth]),
        "curve": [rounded(mean(losses[at : at + EVERY]), 4) for at in range(0, len(losses) - EVERY + 1, EVERY)],
        "tokens": summary["tokens"],
        "tokens_per_second": summary["tokens_per_second"],
        "parameters": summary["parameters"],
        "flops_per_token": summary["flops_per_token"],
        "skipped_steps": summary["skipped_steps"],
        "drop_share": mean_of_layers(half, "moe/drop_share"),
        "drop_share_first_tenth": mean_of_layers(records[: len(tenth)], "moe/drop_share"),
        "load_max_over_mean": mean_of_layers(half, "moe/load_max_over_mean"),
        "router_entropy": mean_of_layers(half, "moe/router_entropy"),
    }
    return {"run": run}, []


def mean(values: Sequence[float | None]) -> float:
    """
    Raises:
        ValueError: there is none.
    """
    there = [value for value in values if value is not None]
    if not there:
        raise ValueError("no step has a loss")
    return sum(there) / len(there)


def mean_of_layers(records: Sequence[dict[str, Any]], name: str) -> float | None:
    """Over steps and layers; None of a dense model."""
    values = [value for record in records for value in record.get(name, ())]
    return sum(values) / len(values) if values else None


BENCH = Bench(
    name="switch",
    parts=PARTS,
    jobs_of=jobs_of,
    tiny=tiny,
    results=SwitchResults,
    command_of=command_of,
    found_in=found_in,
    about=lambda job: {"variant": job.variant, "seed": job.seed},
    said=lambda job, entry: f"held-out loss {entry['run']['valid_loss']:.4f}",
    side_by_side=lambda job: True,
    runs_on_cpu=True,
    longest=1800.0,
)

if __name__ == "__main__":
    main(BENCH, __doc__)
