"""The part of docs/accuracy.md about runs of Paceline itself, which docs/measured holds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

from paceline.config.load import load_recipe, resolve
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.layers import Documents
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
FILES = ("fused_one_gpu.jsonl", "bench_llama3_1b.jsonl")
LATER = ("dense.json", "dense_one_gpu.json", "moe_one_gpu.json", "post_training_one_gpu.json")
"""Records of benches that ran after the profile's numbers were set."""

Settings: TypeAlias = dict[str, dict[str, Any]]

_TEXT = """\
{rows} steps on one H200: time {time} off in the mean, memory {memory} and never below. **They were in sight when the
profile was made**, so this says how well they can be explained, not how good a prediction is. Cards differ too: one
recipe took 1.400 and 1.361 s on two of them.

| recipe | measured s | predicted | measured GiB | predicted | sustained GEMM, TFLOP/s |
| --- | ---: | ---: | ---: | ---: | ---: |"""

KERNELS = ("table/qwen3", "table/deepseek", "tune/deepseek_bf16_sums", "tune/qwen3_triton", "imbalance/")
"""Runs, by how their names begin, of the two steps whose kernels' times gave the numbers of experts."""

_LATER = """
**Measured after the numbers of dense models were set**: all whole runs on one and two H200s that `docs/measured` holds,
predicted by the profile as it is. *In sight* are recipes that were measured before, on another card; *kernels*, those
of two steps from whose kernels the numbers of experts were taken (`profile/qwen3`, `profile/deepseek`). Neither
counts. {rows} others: time {time} off in the mean, {median} in the median; memory {memory} in the mean. Time of dense
models {dense}, of adapters {adapters}, of mixtures of experts {experts}; of the kernels' own runs {kernels}.

**All of them were seen** before the arithmetic was last mended. Before that, time of the same rows was 7.0 % off in the
mean, of the kernels' own runs 8.3 %. What was looked for is what these rows missed, and dense products' efficiency was
set anew (0.93 to 0.91, by the rows further above) when their short inner dimensions came to cost less. So they say how
well the arithmetic explains; [measured/plan.md](measured/plan.md) holds recipes that are predicted and written down
before any of them is measured.

What was mended last, and by what:

- *Launches*: a forward pass was taken to wait for its own launches. In two whole steps the gaps between kernels sum to
  5 and 9 ms of 380 and 560: the host runs ahead while the device is busy backward, so only both passes together can be
  short of launches.
- *Experts*: rows are copied, activated and summed at 3.8 to 4.3 TB/s, in fewer passes than were counted; gradients of
  weights come at about 480 TFLOP/s whatever the rows of an expert, and reading and writing their sums is added.
- *Products with a short inner dimension* lose half of what they were taken to: cuBLAS writes a tile while it computes
  the next.
- *Adapters*: no gradient of the frozen head; attention within documents (how long they are is given here:
  `data.document_tokens` = {documents}, of the conversations that the bench makes; without it `plan` counts whole rows
  and says so); the narrow products' traffic, which was not counted.
- *Delayed fp8 scales*: one reading less of inputs, gradients and logits.

What still misses most, and what is known of it:

- `ladder/naive`, scores in memory and whole logits, not compiled: the passes of torch's operators are counted roughly.
- `tune/qwen3_fp8_head`: a head in fp8 whose casts are operators of torch takes longer than one in bf16; `plan` counts
  the passes of the fused cast (`train.fp8_cast_kernel`), whichever is chosen. (Before, experts that were counted too
  high hid it.)
- Switch (`table/switch_*`): its dense twin of width 768 is faster than predicted, by about as much, and no kernels of
  it were measured; with experts, rows beyond an expert's capacity are dropped, which `plan` does not count on.
- Full recomputation of compiled layers on the flat engine: `one/8b_14l_full` of [measured/plan.md](measured/plan.md)
  first took 1.416 s and 101.7 GiB (predicted: 1.748 and 71.3). It was the run that was wrong: torch 2.11 stored results
  that it was told to compute again, where products add to their gradients themselves. Each operation is marked since,
  and it was measured again: that is the row there. `one/8b_10l_rowwise` likewise.
- Layers that are not compiled (`one/1b_eager`, `one/qwen3_4l_plain`): 13 and 16 % slower than predicted.

| run | GPUs | measured s | predicted | measured GiB | predicted | |
| --- | ---: | ---: | ---: | ---: | ---: | --- |"""

_WRITTEN = """
**Written down before, measured by another bench since**: recipes of [measured/plan.md](measured/plan.md) whose settings
are those of a run above. Predictions are as they were written then, before the last change. (1): the recipe's file was
edited since; the settings compared are those of today.

| written down | run | predicted s | measured s | error | predicted GiB | measured GiB | error |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A measured run, predicted."""

    name: str
    work: Workload
    gpus: int
    step_seconds: float
    peak_gib: float
    found: StepEstimate
    settings: Settings

    @property
    def is_of_kernels(self) -> bool:
        return self.name.startswith(KERNELS) and "fp8" not in self.name

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
        settings=_settings(config),
        found=predict(config, Cluster(gpu=gpu, gpus=gpus)),
    )


def _settings(config: RunConfig) -> Settings:
    """What decides what a step does, without names, data, length of the run and rates of learning."""
    found = {name: getattr(config, name).model_dump() for name in ("model", "parallel", "lora")}
    train = config.train.model_dump()
    found["train"] = {name: value for name, value in train.items() if not name.startswith(("steps", "eval"))}
    found["rest"] = {"task": config.task.kind, "optim": config.optim.name, "fused": config.optim.fused_update}
    return found


def _later(known: set[tuple[int, Workload]]) -> list[str]:
    runs = [run for name in LATER for run in _entries(MEASURED / name)]
    marks = {
        run.name: "in sight" if (run.gpus, run.work) in known else "kernels" if run.is_of_kernels else ""
        for run in runs
    }
    unseen = [run for run in runs if not marks[run.name]]
    rows = [
        f"| {run.name} | {run.gpus} | {run.step_seconds:.3f} | {_percent(run.time_error)} | {run.peak_gib:.1f} | "
        f"{_percent(run.memory_error)} | {marks[run.name]} |"
        for run in runs
    ]
    kinds = {
        "dense": [run for run in unseen if not run.work.model.is_moe and not run.work.adapters],
        "adapters": [run for run in unseen if run.work.adapters],
        "experts": [run for run in unseen if run.work.model.is_moe],
        "kernels": [run for run in runs if marks[run.name] == "kernels"],
    }
    said = {kind: _percent(_off(run.time_error for run in found), sign=False) for kind, found in kinds.items()}
    said["median"] = _percent(median(abs(run.time_error) for run in unseen), sign=False)
    text = _LATER.format(rows=len(unseen), documents=f"{_conversation_tokens():.0f}", **said, **_means(unseen))
    return [text, *rows, *_written(runs)]


def _written(runs: list[_Run]) -> list[str]:
    """Predictions that stand in docs/measured/plan.json, beside runs of the same settings."""
    rows = []
    for name, said in json.loads((MEASURED / "plan.json").read_text())["predictions"].items():
        path = ROOT / said["recipe"]
        edited = hashlib.sha256(path.read_bytes()).hexdigest()[:16] != said["recipe_text"]
        asked, gpus = _settings(load_recipe(path, said["sets"]).config), int(said["gpu"].split()[0])
        for run in runs:
            if (run.gpus, run.settings) == (gpus, asked):
                time, memory = said["step_seconds"], said["memory_gib"]
                rows.append(
                    f"| `{name}`{' (1)' * edited} | {run.name} | {time:.3f} | {run.step_seconds:.3f} | "
                    f"{_percent(time / run.step_seconds - 1)} | {memory:.1f} | {run.peak_gib:.1f} | "
                    f"{_percent(memory / run.peak_gib - 1)} |"
                )
    return [_WRITTEN, *rows] if rows else []


@lru_cache(maxsize=1)
def _conversation_tokens() -> float:
    """Length of the conversation that a token lies in, in the mean, of those that bench/post_training.py trains on."""
    spec = importlib.util.spec_from_file_location("post_training_data", ROOT / "bench" / "post_training_data.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    counts = Counter(
        sum(len(said["content"].split()) for said in row["messages"]) + made.MARKS * len(row["messages"]) // 2
        for row in made.conversations(vocab=128256, seq_len=8192, rows=128, whole=False)
    )
    return Documents(counts=counts, tokens=128 * 8192).tokens_around


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
        if "task.kind=sft" in settings:
            settings.append(f"data.document_tokens={_conversation_tokens():.0f}")
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
