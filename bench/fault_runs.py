"""Faults in real runs of this CPU, put in from outside: a dataset that sleeps, a hook, other programs, the recipe.

The injected time is written down by who injects it, in a file beside the run folder that `explain` never sees; it is
the truth that a price is held against. Where it cannot be (other programs), the ranking alone is judged.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fault_judge import above_note, judge, summarize

from paceline.explain.rules import diagnose
from paceline.explain.run_folder import RunView, read_run

STEPS = 40
SIZES = (
    *("model.num_layers=6", "model.hidden_size=128", "model.num_heads=4", "model.ffn_size=512"),
    *("model.vocab_size=512", "model.max_seq_len=128", "train.seq_len=128", "train.micro_batch_size=2"),
    *("train.global_batch_size=4", "train.precision=fp32", "cluster.device=cpu", f"train.steps={STEPS}"),
    *("observe.progress=none", "observe.tensorboard=false", "observe.log_interval=20", "checkpoint.interval=0"),
    *("checkpoint.save_last=false", "train.gc_interval=1000", "data.train=synthetic"),
)

PLUGIN = """
import gc, json, time
from pathlib import Path
import torch.distributed as dist
from paceline.observe.hooks import Hook

KIND, SECONDS, SHARE, BESIDE = {kind!r}, {seconds!r}, {share!r}, Path({beside!r})


class Inject(Hook):
    def __init__(self):
        self.spent = {{}}
        self.seed = 1

    def on_step_start(self, start):
        due = (start.step * 2654435761 >> 7) % 1000 < 1000 * SHARE
        if not due or (KIND == "delay" and dist.get_rank() != 1):
            return
        began = time.perf_counter()
        if KIND == "delay":
            time.sleep(SECONDS)
        else:
            circles = []
            until = time.perf_counter() + SECONDS / 2
            while time.perf_counter() < until:
                for _ in range(1000):
                    one = []
                    one.append(one)
                    circles.append(one)
            began = time.perf_counter()
            del circles, one
            gc.collect()
        self.spent[start.step] = time.perf_counter() - began

    def on_end(self, end):
        BESIDE.with_suffix(f".{{dist.get_rank()}}").write_text(json.dumps(self.spent))


class Sleeping:
    def __init__(self, rest, context):
        from paceline.data.sources import SyntheticDataset
        self.source = SyntheticDataset(
            vocab_size=context.vocab_size, seq_len=context.seq_len, seed=context.seed, num_samples=context.num_samples
        )

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return self.source[index]


def register(registry):
    if KIND == "sleep":
        registry.data_source("sleeping", Sleeping)
    else:
        registry.hook(lambda config: Inject())
"""


@dataclass(frozen=True, kw_only=True)
class RealFault:
    name: str
    expected: str
    kind: str = ""
    """Of the plugin; empty = none."""
    ranks: int = 1
    overrides: tuple[str, ...] = ()
    hogs: int = 0
    """Programs that do nothing but take a processor."""
    seconds: tuple[float, float] = (0.0, 0.0)
    share: tuple[float, float] = (1.0, 1.0)


REAL = (
    RealFault(
        name="slow loader", expected="explain.data-loading", kind="sleep", seconds=(0.02, 0.2),
        overrides=("data.train=sleeping:x", "data.num_workers=0"),
    ),
    RealFault(name="delayed rank", expected="explain.slow-rank", kind="delay", ranks=2, seconds=(0.2, 0.5)),
    RealFault(
        name="garbage collection", expected="explain.garbage-collection", kind="collect", seconds=(0.3, 0.8),
        share=(0.3, 0.6),
    ),
    RealFault(name="frequent checkpoints", expected="explain.checkpoints", overrides=("checkpoint.interval=2",)),
    RealFault(name="CPU hog", expected="explain.cpu-contention", hogs=3),
    RealFault(name="full recompute", expected="explain.full-recompute", overrides=("parallel.recompute=full",)),
)  # fmt: skip


def real_trials(trials: int, seed: int, only: str) -> Iterator[dict[str, Any]]:
    """Trials of each fault."""
    for fault in REAL:
        if only not in fault.name:
            continue
        outcomes = []
        for trial in range(trials):
            chance = np.random.default_rng((seed, trial, *fault.name.encode()))
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder)
                values = {
                    "seconds": float(chance.uniform(*fault.seconds)),
                    "share": float(chance.uniform(*fault.share)),
                }
                run(home, fault, values, seed=int(chance.integers(2**31)))
                found = diagnose(read_run(home / "run"))
                outcomes.append(judge(found, fault.expected, true_share(found.view, fault, values, home)))
        yield summarize(fault.name, fault.expected, outcomes)


def healthy_runs(runs: int, seed: int) -> Iterator[list[str]]:
    """Ids above a note, of each run without a fault."""
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            fault = RealFault(name="none", expected="", ranks=1 + number % 2)
            run(Path(folder), fault, {"seconds": 0.0, "share": 0.0}, seed=seed * 1000 + number)
            yield above_note(diagnose(read_run(Path(folder) / "run")))


def run(home: Path, fault: RealFault, values: dict[str, float], *, seed: int) -> None:
    """One run, with what disturbs it."""
    overrides = prepare(home, fault, values, seed=seed)
    recipe = home / "recipe.toml"
    recipe.write_text("")
    command = [sys.executable, "-m", "paceline", "train", str(recipe), *(f"--set={each}" for each in overrides)]
    if fault.ranks > 1:
        command += ["--nproc", str(fault.ranks)]
    with hogs(fault.hogs):
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def prepare(home: Path, fault: RealFault, values: dict[str, float], *, seed: int) -> list[str]:
    """Writes the plugin that disturbs the run; the recipe as overrides."""
    overrides = [*SIZES, f"run.dir={home / 'run'}", f"run.seed={seed}", *fault.overrides]
    if fault.kind:
        plugin = home / "inject.py"
        plugin.write_text(PLUGIN.format(kind=fault.kind, beside=str(home / "spent"), **values))
        overrides.append(f"run.plugins={plugin}")
    return overrides


@contextlib.contextmanager
def hogs(number: int) -> Iterator[None]:
    """So many programs beside it that do nothing but take a processor."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def true_share(view: RunView, fault: RealFault, values: dict[str, float], home: Path) -> float | None:
    """Injected share of the settled steps; None where nobody knows it."""
    wall = float(view.column("wall_us")[0].sum()) * 1e-6
    steps = view.shown_steps
    if fault.kind == "sleep":
        return 4 / fault.ranks * values["seconds"] * len(steps) / wall
    if fault.kind:
        spent: Sequence[dict[str, float]] = [json.loads(path.read_text()) for path in sorted(home.glob("spent.*"))]
        return sum(max(each.get(str(step), 0.0) for each in spent) for step in steps.tolist()) / wall
    return None
