"""The part of docs/accuracy.md about runs of Paceline itself, which docs/measured holds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.config.load import load_recipe, resolve
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
FILES = ("fused_one_gpu.jsonl", "bench_llama3_1b.jsonl")
LATER = ("dense.json", "dense_one_gpu.json", "moe_one_gpu.json", "post_training_one_gpu.json")
"""Records of benches that ran after the profile's numbers were set."""

_TEXT = """\
{rows} steps on one H200: time {time} off in the mean, memory {memory} and never below. **They were in sight when the
profile was made**, so this says how well they can be explained, not how good a prediction is. Cards differ too: one
recipe took 1.400 and 1.361 s on two of them.

| recipe | measured s | predicted | measured GiB | predicted | sustained GEMM, TFLOP/s |
| --- | ---: | ---: | ---: | ---: | ---: |"""

_LATER = """
**Measured after the numbers of the profile were set**: all whole runs on one and two H200s that `docs/measured` holds,
predicted by the profile as it is. Recipes that were in sight already (above, on another card) are marked, not counted.
{rows} others: time {time} off in the mean, {median} in the median; memory {memory} in the mean. Time of dense models
{dense}, of adapters {adapters}, of mixtures of experts {experts}. None that is predicted to fit ran out of memory.
(When first compared, time was 9.6 % off in the mean, 7.9 % in the median: heads in fp8 were counted in bf16, and
weights as cast once a step where each use casts them. Both are arithmetic; no number was fitted.)
Adapters were trained on packed conversations, where attention ends with a document; `plan` counts it over whole rows.
[measured/plan.md](measured/plan.md) holds 26 recipes, predicted and written down before any of them is measured.

| run | GPUs | measured s | predicted | measured GiB | predicted | |
| --- | ---: | ---: | ---: | ---: | ---: | --- |"""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A measured run, predicted."""

    name: str
    work: Workload
    gpus: int
    step_seconds: float
    peak_gib: float
    found: StepEstimate

    @property
    def time_error(self) -> float:
        return self.found.seconds / self.step_seconds - 1

    @property
    def memory_error(self) -> float:
        return self.found.memory_gib / self.peak_gib - 1


def own_runs() -> str:
    in_sight, rows = [], []
    for line in (line for name in FILES for line in (MEASURED / name).read_text().splitlines()):
        record = json.loads(line)
        config = resolve(record["recipe"]).config
        run = _run("", config, 1, record)
        in_sight.append(run)
        rows.append(
            f"| {_said(config)} | {run.step_seconds:.3f} | {_percent(run.time_error)} | {run.peak_gib:.1f} | "
            f"{_percent(run.memory_error)} | {_gemm(record):.0f} |"
        )
    known = {(run.gpus, run.work) for run in in_sight}
    return "\n".join([_TEXT.format(rows=len(rows), **_means(in_sight)), *rows, *_later(known)])


def _run(name: str, config: RunConfig, gpus: int, measured: dict[str, Any]) -> _Run:
    gpu = find_hardware("H200 SXM")
    assert gpu is not None
    return _Run(
        name=name,
        work=Workload.of(config),
        gpus=gpus,
        step_seconds=measured["step_seconds"],
        peak_gib=measured["peak_memory_gib"],
        found=predict(config, Cluster(gpu=gpu, gpus=gpus)),
    )


def _later(known: set[tuple[int, Workload]]) -> list[str]:
    runs = [run for name in LATER for run in _entries(MEASURED / name)]
    unseen = [run for run in runs if (run.gpus, run.work) not in known]
    rows = [
        f"| {run.name} | {run.gpus} | {run.step_seconds:.3f} | {_percent(run.time_error)} | {run.peak_gib:.1f} | "
        f"{_percent(run.memory_error)} | {'' if run in unseen else 'in sight'} |"
        for run in runs
    ]
    kinds = {
        "dense": [run for run in unseen if not run.work.model.is_moe and not run.work.adapters],
        "adapters": [run for run in unseen if run.work.adapters],
        "experts": [run for run in unseen if run.work.model.is_moe],
    }
    said = {kind: _percent(_off(run.time_error for run in found), sign=False) for kind, found in kinds.items()}
    middle = _percent(median(abs(run.time_error) for run in unseen), sign=False)
    return [_LATER.format(rows=len(unseen), median=middle, **said, **_means(unseen)), *rows]


def _entries(path: Path) -> Iterator[_Run]:
    """Whole runs of a bench's record with a time and a peak, by the recipe and the settings of their command."""
    for name, entry in json.loads(path.read_text())["entries"].items():
        measured = entry.get("bench") or entry.get("train") or {}
        if not measured.get("step_seconds") or not measured.get("peak_memory_gib"):
            continue
        words = shlex.split(entry["command"])
        recipe = next(word for word in words if word.endswith(".toml"))
        settings = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
        # data and plug-ins are the machine's
        settings = [setting for setting in settings if not setting.startswith(("data.", "run.plugins"))]
        cut = f" ({entry['cut'].removeprefix('one GPU, ')})" if entry.get("cut") else ""
        yield _run(name + cut, load_recipe(ROOT / recipe, settings).config, entry["processes"], measured)


def _means(runs: list[_Run]) -> dict[str, str]:
    errors = {"time": [run.time_error for run in runs], "memory": [run.memory_error for run in runs]}
    return {name: _percent(_off(found), sign=False) for name, found in errors.items()}


def _off(errors: Iterable[float]) -> float:
    return fmean(map(abs, errors))


def _said(config: RunConfig) -> str:
    train, parallel = config.train, config.parallel
    said = [
        f"{config.model.preset}, {config.model.num_layers} layers",
        f"{train.seq_len} tokens x {train.micro_batch_size} x {train.global_batch_size // train.micro_batch_size}",
        train.precision,
        f"recompute {parallel.recompute}",
        f"{parallel.accumulate_dtype} sums",
        "fused" if parallel.fused_weight_gradients else "not fused",
        *(["FlashAttention-4"] if train.attention_kernel == "flash4" else []),
    ]
    return ", ".join(said)


def _gemm(run: dict[str, Any]) -> float:
    return float(run.get("sustained_bf16_gemm_tflops") or run["sustained_gemm_tflops"])


def _percent(share: float, *, sign: bool = True) -> str:
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"
