"""The part of docs/accuracy.md about runs of Paceline itself, which docs/measured holds."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.step import predict
from paceline.costs.workload import Cluster

MEASURED = Path(__file__).parent / "measured"
FILES = ("fused_one_gpu.jsonl", "bench_llama3_1b.jsonl")

_TEXT = """\
{rows} steps on one H200: time {time} off in the mean, memory {memory} and never below. **They were in sight when the
profile was made**, so this says how well they can be explained, not how good a prediction is. Cards differ too: one
recipe took 1.400 and 1.361 s on two of them. [measured/plan.md](measured/plan.md) is the test: 26 recipes, dense and
with experts, on one and two H200s, predicted and written down before any of them is measured.

| recipe | measured s | predicted | measured GiB | predicted | sustained GEMM, TFLOP/s |
| --- | ---: | ---: | ---: | ---: | ---: |"""


def own_runs() -> str:
    runs = [json.loads(line) for name in FILES for line in (MEASURED / name).read_text().splitlines()]
    gpu = find_hardware("H200 SXM")
    assert gpu is not None
    rows, times, sizes = [], [], []
    for run in runs:
        config = resolve(run["recipe"]).config
        found = predict(config, Cluster(gpu=gpu, gpus=1))
        time = found.seconds / run["step_seconds"] - 1
        size = found.memory_gib / run["peak_memory_gib"] - 1
        times.append(time)
        sizes.append(size)
        rows.append(
            f"| {_said(config)} | {run['step_seconds']:.3f} | {_percent(time)} | {run['peak_memory_gib']:.1f} | "
            f"{_percent(size)} | {_gemm(run):.0f} |"
        )
    in_the_mean = {"time": fmean(map(abs, times)), "memory": fmean(map(abs, sizes))}
    said = {name: _percent(error, sign=False) for name, error in in_the_mean.items()}
    return "\n".join([_TEXT.format(rows=len(rows), **said), *rows])


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
