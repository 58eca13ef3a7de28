"""Run folders as a run on many GPUs would leave them, made by a small simulation instead of GPUs.

Every rank has work of its own in each phase of each step. All meet at the end of a step, and tensor- and data-parallel
groups in between, so a step lasts as long as the slowest rank's work and its communication; the others wait, and their
waiting is written where the recorder would write it. What a fault costs is known exactly: the same random numbers are
played with and without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.load import dump_recipe, resolve
from paceline.observe.events import StepRecord
from paceline.observe.phases import PHASES
from paceline.observe.step_clock import TIMED_EVERY
from paceline.observe.telemetry.columns import COLUMNS, INDEX, UNKNOWN, VERSION
from paceline.observe.telemetry.record import FOLDER

Array = NDArray[np.float64]

BASE = {
    "data": 0.002, "forward": 0.31, "backward": 0.62, "reduce": 0.004, "optimizer": 0.03, "publish": 0.004,
    "log": 0.0, "evaluation": 0.0, "checkpoint": 0.0, "other": 0.002,
}  # fmt: skip
"""Shares of a step that a healthy rank works."""


_FLOPS_PER_TOKEN = 51.47e9
"""Llama-3-8B at 8192, causal."""


@dataclass(kw_only=True)
class Cluster:
    """What is simulated. ``own``: seconds [ranks, steps] by phase; faults change it before the ranks meet."""

    dp: int = 8
    tp: int = 1
    pp: int = 1
    steps: int = 120
    step_seconds: float = 0.0
    """0 = what an H200 takes for the tokens of a rank at 45 % of its peak."""
    seed: int = 0
    noise: float = 0.004
    """Relative, of each rank's phase in each step."""
    device_name: str = "NVIDIA H200"
    gpus_per_host: int = 8
    micro_batches: int = 1
    recipe: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    own: dict[str, Array] = field(init=False)
    columns: dict[str, Array] = field(init=False)
    communication: dict[str, Array] = field(init=False)
    """Exposed seconds by axis [ranks, steps] that nobody's lateness causes."""
    logged: dict[str, Any] = field(default_factory=dict)
    """More keys of each line of metrics, such as the load of experts."""

    def __post_init__(self) -> None:
        chance = np.random.default_rng(self.seed)
        flops = _FLOPS_PER_TOKEN * 8192 * self.micro_batches / (self.tp * self.pp)
        self.step_seconds = self.step_seconds or flops / (0.45 * 989e12)
        shape = (self.ranks, self.steps)
        self.own = {
            phase: self.step_seconds * share * (1 + self.noise * chance.standard_normal(shape))
            for phase, share in BASE.items()
        }
        # now and then all of a step is a little slower: the network, the driver
        self.own["other"] = self.own["other"] + self.step_seconds * 0.01 * (chance.random(shape) < 0.005)
        self.communication = {
            axis: np.full(shape, self.step_seconds * share) * (1 + 0.02 * chance.standard_normal((1, self.steps)))
            for axis, share, size in (("dp", 0.012, self.dp), ("tp", 0.03, self.tp))
            if size > 1
        }
        self.columns = {
            "gpu_clock_mhz": 1755 + 8 * chance.standard_normal(shape),
            "gpu_power_w": 690 + 5 * chance.standard_normal(shape),
            "gpu_temperature_c": 62 + 2 * chance.standard_normal(shape),
            "gpu_throttle_bits": np.full(shape, 4.0),
            "gpu_busy_pct": np.full(shape, 99.0),
            "cpu_busy_pct": 12 + 2 * chance.standard_normal(shape),
            "process_cpu_pct": 105 + 3 * chance.standard_normal(shape),
            "io_wait_pct": np.zeros(shape),
            "disk_read_kbs": 2000 + 200 * chance.standard_normal(shape),
            "disk_write_kbs": 400 + 50 * chance.standard_normal(shape),
            "loader_ready": np.full(shape, 4.0),
            "thread_cpu_us": 0.3e6 * self.step_seconds * np.ones(shape),
            "thread_queue_us": 200 * np.abs(chance.standard_normal(shape)),
            "gc_us": np.zeros(shape),
            "gc_runs": np.zeros(shape),
            "allocated_mb": np.full(shape, 90_000.0),
            "reserved_mb": np.full(shape, 100_000.0),
            "peak_mb": np.full(shape, 98_000.0),
            "alloc_retries": np.zeros(shape),
            "sent_dp_kb": np.full(shape, 32e6 if self.dp > 1 else 0.0),
            "sent_tp_kb": np.full(shape, 20e6 if self.tp > 1 else 0.0),
        }

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def place(self, rank: int) -> dict[str, int]:
        """Innermost tp, then dp, then pp."""
        return {
            "pp": rank // (self.tp * self.dp), "dp": rank // self.tp % self.dp, "cp": 0, "tp": rank % self.tp, "ep": 0
        }  # fmt: skip

    def wall(self) -> Array:
        """[steps]: the slowest rank's work, with the communication of its groups."""
        return (self._work() + sum(self.communication.values(), np.zeros((self.ranks, self.steps)))).max(axis=0)

    def _work(self) -> Array:
        return np.sum(list(self.own.values()), axis=0)


Fault = Callable[[Cluster, np.random.Generator], None]


def write(cluster: Cluster, folder: Path) -> Path:
    """The run folder of a cluster."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    overrides = [
        "run.name=synthetic", f"parallel.tp={cluster.tp}", f"parallel.pp={cluster.pp}", "train.seq_len=8192",
        f"train.global_batch_size={cluster.dp * cluster.micro_batches}", "train.micro_batch_size=1",
        "parallel.compile=true", "parallel.recompute=none",
    ]  # fmt: skip
    config = resolve({"model": {"preset": "llama3_8b"}}, [*overrides, *cluster.recipe]).config
    (folder / "recipe.toml").write_text(dump_recipe(config), encoding="utf-8")
    (folder / "events.jsonl").write_text(json.dumps({"event": "start", "step": 0, "world_size": cluster.ranks}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _metrics(cluster)))
    table = _table(cluster)
    facts = {
        "version": VERSION, "world_size": cluster.ranks, "local_world_size": cluster.gpus_per_host, "device": "cuda",
        "device_name": cluster.device_name, "degrees": {"pp": cluster.pp, "dp": cluster.dp, "cp": 1,
        "tp": cluster.tp, "ep": 1}, "micro_batches": cluster.micro_batches, "gpu_clock_max_mhz": 1980,
        "gpu_power_limit_w": 700, "cpus": 96, "threads": 1, "environment": cluster.environment,
        "tokens_per_step": cluster.dp * cluster.micro_batches * 8192, "flops_per_token": _FLOPS_PER_TOKEN,
        "peak_tflops": 989.0,
    }  # fmt: skip
    for rank in range(cluster.ranks):
        stages = [
            [cluster.place(rank)["pp"] * (32 // cluster.pp), (cluster.place(rank)["pp"] + 1) * (32 // cluster.pp) - 1]
        ]
        own = facts | {
            "rank": rank, "local_rank": rank % cluster.gpus_per_host, "host": f"node{rank // cluster.gpus_per_host}",
            "place": cluster.place(rank), "stages": stages,
        }  # fmt: skip
        with (folder / FOLDER / f"rank-{rank:05d}.0000.csv").open("w", encoding="utf-8") as file:
            file.write(f"# {json.dumps(own)}\n{','.join(COLUMNS)}\n")
            file.write("\n".join(",".join(map(str, line)) for line in table[:, rank].T.tolist()) + "\n")
    return folder


def _metrics(cluster: Cluster) -> list[dict[str, Any]]:
    """A line every ten steps."""
    seconds = float(cluster.wall().mean())
    tokens = 8192 * cluster.micro_batches / (cluster.tp * cluster.pp) / seconds
    tflops = tokens * _FLOPS_PER_TOKEN / 1e12
    return [
        StepRecord(
            step=step, loss=2.0, grad_norm=1.0, lr=1e-4, tokens=step * 8192, tokens_per_second_per_gpu=tokens,
            tflops_per_gpu=tflops, mfu=tflops / 989, step_seconds=seconds, data_wait_seconds=0.0, memory_gib=96.0,
            skipped_steps=0, flops_convention="causal", peak_tflops=989.0, extra=cluster.logged,
        ).as_dict()
        for step in range(10, cluster.steps + 1, 10)
    ]  # fmt: skip


def _table(cluster: Cluster) -> NDArray[np.int64]:
    """[columns, ranks, steps]"""
    shape = (cluster.ranks, cluster.steps)
    table = np.full((len(COLUMNS), *shape), float(UNKNOWN))

    def put(name: str, values: Any) -> None:
        table[INDEX[name]] = values

    steps = np.arange(1, cluster.steps + 1)
    wall = cluster.wall()
    put("step", steps)
    put("steps", 1)
    put("time_ms", 1.79e12 + 1e3 * np.cumsum(wall))
    put("wall_us", 1e6 * wall)
    waits = _waits(cluster, wall)
    device = {phase: np.zeros(shape) for phase in PHASES} | {
        phase: values.copy() for phase, values in cluster.own.items()
    }
    blocked = {phase: np.zeros(shape) for phase in PHASES}
    for axis, phase in (("tp", "backward"), ("dp", "reduce")):
        if axis in waits:
            device[phase] = device[phase] + waits[axis]
            blocked[phase] = blocked[phase] + waits[axis]
    device["sync"] = device["sync"] + waits["rest"]
    if "pipeline" in waits:
        device["pipeline"] = waits["pipeline"]
    blocked["sync"], blocked["pipeline"] = device["sync"], device["pipeline"]
    for phase in PHASES:
        put(f"device_{phase}_us", 1e6 * device[phase])
        put(f"host_{phase}_us", 1e6 * device[phase])
    timed = steps % TIMED_EVERY == 0
    for axis in ("dp", "tp", "cp", "ep", "pp", "rest"):
        values = waits.get(axis, np.zeros(shape))
        put(f"wait_{axis}_us", np.where(timed, 1e6 * values, UNKNOWN))
        put(f"sent_{axis}_kb", 0)
    for phase in PHASES:
        put(f"blocked_{phase}_us", np.where(timed, 1e6 * blocked[phase], UNKNOWN))
    put("timed_steps", timed)
    for name, values in cluster.columns.items():
        put(name, values)
    return np.rint(table).astype(np.int64)


def _waits(cluster: Cluster, wall: Array) -> dict[str, Array]:
    """Where each rank waits: in tensor-parallel groups for their slowest, then in data-parallel ones, then in the
    meeting; in a pipeline for the stage that is slower."""
    work = cluster._work()
    found = {axis: values.copy() for axis, values in cluster.communication.items()}
    late = wall - work - sum(cluster.communication.values(), np.zeros_like(work))
    if cluster.pp > 1:
        stage = np.array([cluster.place(rank)["pp"] for rank in range(cluster.ranks)])
        slowest = np.stack([work[stage == index].max(axis=0) for index in range(cluster.pp)])
        between = slowest.max(axis=0)[None] - slowest
        found["pipeline"] = np.minimum(np.maximum(between[stage], 0), late)
        late = late - found["pipeline"]
    if cluster.tp > 1:
        found["tp"] = found["tp"] + _behind(work, [cluster.place(rank) for rank in range(cluster.ranks)], "tp", late)
        late = late - (found["tp"] - cluster.communication["tp"])
    if cluster.dp > 1:
        found["dp"] = found["dp"] + 0.7 * late
        late = 0.3 * late
    found["rest"] = late
    return found


def _behind(work: Array, places: list[Mapping[str, int]], axis: str, most: Array) -> Array:
    """What each rank waits for the slowest of its group along an axis."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(index for name, index in place.items() if name != axis), []).append(rank)
    waits = np.zeros_like(work)
    for group in groups.values():
        waits[group] = np.minimum(work[group].max(axis=0) - work[group], most[group])
    return waits


def truth(faulty: Cluster, healthy: Cluster) -> float:
    """Share of the faulty step that the fault is, over settled steps."""
    return 1 - float(healthy.wall()[3:].mean()) / float(faulty.wall()[3:].mean())
