"""Mixtures of experts: speed and memory beside Transformers, fp8, imbalance, where a step goes, loss curves.

    python bench/moe.py table                        # on two GPUs; what is done is skipped
    python bench/moe.py table baseline --one-gpu     # models cut in depth until they fit one card
    python bench/moe.py tune --minutes 8.5           # starts nothing that would not end in time
    python bench/moe.py curves --at-once 4           # small runs, four to a GPU
    python bench/moe.py table --only qwen3 --again   # one entry anew
    python bench/moe.py table --tiny --results DIR   # on CPUs, tiny: whether it runs at all
    python bench/moe.py list                         # every entry with its estimate
    python bench/moe.py report                       # the page alone, from what is there

With --one-gpu everything goes to moe_one_gpu.json and moe_one_gpu.md, without it to moe.json and moe.md: the models
differ, and so do the rows. Each entry is one start of `paceline`, or of bench/moe_baseline.py, in processes of its own.
It is written the moment it ends, failed ones with their last lines; those are tried again, after everything that was
never tried. bench/moe.sh calls this; bench/runner.py runs the jobs.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from found import an_object, bench_record, every_step, metrics, rounded, wanted_steps
from jobs import bench_command
from moe_jobs import PARTS, Job, jobs_of, tiny
from moe_report import FIGURES, page
from results import Results
from runner import Bench, Found, main

ONE_GPU = "--one-gpu"
KINDS = {"bench": dict, "baseline": dict, "train": dict, "losses": list, "profile": dict}
WARM_UP = 4
"""Steps of a `paceline train` that are not looked at."""


class MoEResults(Results):
    """The results on two GPUs, or those on one."""

    def __init__(self, folder: Path, *, one_gpu: bool) -> None:
        self.one_gpu = one_gpu
        super().__init__(folder, name_of(one_gpu=one_gpu), KINDS)
        self.data["command"] = f"bench/moe.sh {ONE_GPU}" if one_gpu else "bench/moe.sh"

    def page(self) -> list[str]:
        return page(self.data, one_gpu=self.one_gpu)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data, one_gpu=self.one_gpu)


def name_of(*, one_gpu: bool) -> str:
    return "moe_one_gpu" if one_gpu else "moe"


def command_of(job: Job, folder: Path) -> list[str]:
    sets = [f"--set={item}" for item in job.sets]
    if job.kind in ("train", "curve"):
        return ["-m", "paceline", "train", job.recipe, f"--nproc={job.processes}", *sets, f"--set=run.dir={folder}/run"]
    if job.kind == "bench":
        return bench_command(job, folder, gemm_seconds=job.gemm_seconds)
    # one process without a launcher, whose own last lines would hide those of what failed
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes}"]
    launcher = several if job.processes > 1 else []
    if job.kind == "profile":
        script = ["bench/profile_step.py", job.recipe, "--mark-head", f"--steps={job.warm_up}"]
        return [*launcher, *script, f"--out={folder}/p.json", *sets]
    measured = [f"--warm-up={job.warm_up}", f"--steps={job.steps}", f"--gemm-seconds={job.gemm_seconds}"]
    return [*launcher, "bench/moe_baseline.py", job.recipe, *measured, f"--out={folder}/line.jsonl", *sets]


def found_in(job: Job, folder: Path) -> Found:
    """What the run left behind.

    Raises:
        OSError, LookupError, TypeError, ValueError: it left nothing usable.
    """
    if job.kind == "profile":
        return {"profile": an_object((folder / "p.json").read_text())}, []
    if job.kind in ("bench", "baseline"):
        return {job.kind: bench_record(folder, FIGURES)}, []
    if job.kind == "train":
        return {"train": train_figures(job, folder)}, []
    return {"losses": [rounded(record["loss"], 5) for record in every_step(job, folder)]}, []


def train_figures(job: Job, folder: Path) -> dict[str, Any]:
    """Step time, memory, and how the experts of every layer were used, at the last line of metrics.

    Raises:
        OSError, LookupError, TypeError, ValueError: the run did not get that far.
    """
    seconds = json.loads((folder / "run" / "step_seconds.json").read_text())
    if len(seconds) != wanted_steps(job) - 1:
        raise ValueError(f"{len(seconds) + 1} of {wanted_steps(job)} steps")
    last = metrics(folder)[-1]
    measured = seconds[WARM_UP:]
    return {
        "step_seconds": statistics.median(measured),
        "step_seconds_min": min(measured),
        "step_seconds_max": max(measured),
        "peak_memory_gib": last["memory_gib"],
        "loss": last["loss"],
        "load_max_over_mean": last["moe/load_max_over_mean"],
        "drop_share": last["moe/drop_share"],
        "router_entropy": last["moe/router_entropy"],
    }


def said(job: Job, entry: dict[str, Any]) -> str:
    record = entry.get("bench") or entry.get("baseline")
    if record:
        return (
            f"{record['step_seconds']:.3f} s a step, {record['tokens_per_second_per_gpu']:,.0f} tokens/s, "
            f"{record['tflops_per_gpu']:.3g} TFLOP/s = {record['fraction_of_gemm']:.3f} of "
            f"{record['sustained_gemm_tflops']:.3g}, {record['peak_memory_gib']:.1f} GiB, loss {record['loss']}"
        )
    if "train" in entry:
        train = entry["train"]
        return f"{train['step_seconds']:.3f} s a step, load {max(train['load_max_over_mean']):.2f} of the mean"
    if "profile" in entry:
        return f"{entry['profile']['wall_ms']:.0f} ms, idle {entry['profile']['idle_ms']:.0f}"
    return f"loss {entry['losses'][0]} to {entry['losses'][-1]}"


def bench_of(*, one_gpu: bool) -> Bench:
    return Bench(
        name=name_of(one_gpu=one_gpu),
        parts=PARTS,
        jobs_of=functools.partial(jobs_of, one_gpu=one_gpu),
        tiny=tiny,
        results=functools.partial(MoEResults, one_gpu=one_gpu),
        command_of=command_of,
        found_in=found_in,
        about=lambda job: {"work": job.work, "layers": job.layers},
        said=said,
    )


if __name__ == "__main__":
    asked_for_one = ONE_GPU in sys.argv
    sys.argv = [item for item in sys.argv if item != ONE_GPU]
    main(bench_of(one_gpu=asked_for_one), __doc__)
