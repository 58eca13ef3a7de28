"""What does the always-on record cost? Steps with and without it, interleaved in one process.

    python bench/record_overhead.py recipes/llama3_8b.toml --set model.num_layers=16 --set train.global_batch_size=1 \\
      --steps 200 --out overhead.json

Blocks of steps alternate: off, on, on, off, off, on, ... so that slow drifts of the clock fall on both alike. A block
is timed from a finished device to a finished device; everything that the trainer does in a step is in it. Under
torchrun all ranks take part, and rank 0 speaks. The result is the ratio of the medians with a 95 % interval from
resampling blocks.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import cut_off

from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.ranks import Ranks
from paceline.config.load import load_recipe
from paceline.observe.hooks import Hooks, RunEnd, RunStart
from paceline.observe.phases import NO_PHASES
from paceline.observe.recorder import Recorder
from paceline.report.console import make_console
from paceline.runtime.device import choose_device, device_name, synchronize, versions
from paceline.runtime.process import any_rank, process_group, process_info
from paceline.training.feed import Feed, open_datasets
from paceline.training.recording import build_recorder
from paceline.training.setup import Parts, build_expert_meter, build_meter, build_parts
from paceline.training.trainer import Progress, Trainer

RESAMPLED = 2000


class NoSaver:
    def save(self, progress: Progress) -> None:
        """Nothing is kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=200, help="of each kind")
    parser.add_argument("--block", type=int, default=10, help="steps that are timed together")
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    blocks = 2 * -(-arguments.steps // arguments.block)
    fixed = [f"train.steps={arguments.warm_up + blocks * arguments.block + 1}", "checkpoint.interval=0"]
    changes = ["data.train=synthetic", *arguments.overrides, *fixed, "observe.record=true", "train.eval_interval=0"]
    recipe = load_recipe(arguments.recipe, changes)
    info = process_info()
    device = choose_device(info, recipe.config.cluster.device)
    with process_group(info, device, timeout_seconds=600), tempfile.TemporaryDirectory() as folder:
        parts = build_parts(recipe.config, recipe.registry, info, device)
        samples = recipe.config.train.steps * recipe.config.train.global_batch_size
        datasets = open_datasets(recipe.config, recipe.registry, train_samples=samples)
        trainer = build_trainer(parts, Feed.open(datasets.train, recipe.config, parts.mesh, device, start_sample=0))
        run_block(trainer, parts, None, arguments.warm_up)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        lines_bytes = 0
        for index in range(blocks):
            on = index % 4 in (1, 2)
            recorder = build_recorder(parts) if on else None
            parts.mesh.traffic.timer = recorder.clock if recorder else None
            home = Path(folder) / f"{info.rank}-{index}"
            seconds[on].append(run_block(trainer, parts, recorder, arguments.block, home) / arguments.block)
            if recorder is not None:
                lines_bytes += sum(path.stat().st_size for path in home.rglob("rank-*.csv"))
        trainer.feed.close()
        if info.is_main:
            result = summarize(seconds)
            recorded = arguments.block * len(seconds[True])
            result |= {
                "bytes_per_step_and_rank": lines_bytes / recorded,
                "recipe": arguments.recipe,
                "overrides": arguments.overrides,
                "devices": f"{info.world_size} x {device_name(device)}",
                "versions": versions(),
            }
            show(result)
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def build_trainer(parts: Parts, feed: Feed) -> Trainer:
    config = parts.config
    ranks = Ranks.create(timedelta(seconds=config.cluster.timeout_seconds))
    trainer = Trainer(
        config,
        step=parts.step,
        feed=feed,
        meter=build_meter(parts),
        saver=NoSaver(),
        manager=CheckpointManager(Path("none"), config.checkpoint, ranks=ranks),
        hooks=Hooks(),
        evaluator=None,
        progress=Progress(),
        device=parts.device,
        experts=build_expert_meter(config, parts.device),
    )
    trainer.step.train()
    trainer.meter.start()
    return trainer


def run_block(
    trainer: Trainer, parts: Parts, recorder: Recorder | None, steps: int, folder: Path = Path("none")
) -> float:
    """Seconds of so many steps, from a device at rest to a device at rest."""
    trainer.phases = recorder.clock if recorder else NO_PHASES
    trainer.step.announce_to(trainer.phases)
    trainer.hooks = Hooks([recorder] if recorder else [])
    start = trainer.progress.step
    if recorder is not None:
        config, info = parts.config, parts.info
        recorder.on_start(
            RunStart(run_name="", run_dir=folder, start_step=start, total_steps=config.train.steps, rank=info.rank)
        )
    synchronize(parts.device)
    any_rank(False)
    began = time.perf_counter()
    for _ in range(steps):
        # the trainer's own step, so that nothing of it is left out
        trainer._one_step()
        trainer.phases.mark("sync")
        any_rank(False)
    synchronize(parts.device)
    ended = time.perf_counter()
    if recorder is not None:
        recorder.on_end(RunEnd(step=trainer.progress.step))
    return ended - began


def summarize(seconds: dict[bool, list[float]]) -> dict[str, Any]:
    """Medians over blocks, their ratio, and the interval of the ratio."""
    chance = random.Random(0)

    def ratio(off: list[float], on: list[float]) -> float:
        return median(on) / median(off) - 1

    drawn = sorted(
        ratio(
            chance.choices(seconds[False], k=len(seconds[False])), chance.choices(seconds[True], k=len(seconds[True]))
        )
        for _ in range(RESAMPLED)
    )
    return {
        "step_seconds_off": median(seconds[False]),
        "step_seconds_on": median(seconds[True]),
        "overhead": ratio(seconds[False], seconds[True]),
        "interval_95": [drawn[round(0.025 * RESAMPLED)], drawn[round(0.975 * RESAMPLED)]],
        "blocks": {"off": seconds[False], "on": seconds[True]},
    }


def show(result: dict[str, Any]) -> None:
    low, high = result["interval_95"]
    make_console().print(
        f"off {result['step_seconds_off'] * 1e3:.3f} ms a step, on {result['step_seconds_on'] * 1e3:.3f} ms: "
        f"{result['overhead']:+.3%} (95 %: {low:+.3%} to {high:+.3%}); "
        f"{result['bytes_per_step_and_rank']:.0f} bytes a step and rank"
    )


if __name__ == "__main__":
    cut_off.run(main)
