"""Eight GPUs of one host: ceilings, a 13B from its first attempt to its best, layouts, weak scaling, larger models.

    python bench/eight_gpus.py ceilings thirteen           # in the order of importance; what is done is skipped
    python bench/eight_gpus.py layouts --minutes 8         # starts nothing that would not end in time
    python bench/eight_gpus.py layouts --only tp8 --again  # one entry anew
    python bench/eight_gpus.py thirteen --gpus 4           # on four GPUs, or on two: results of their own
    python bench/eight_gpus.py thirteen --tiny --results DIR  # on CPUs, tiny: whether it runs at all
    python bench/eight_gpus.py list                        # every entry with its estimate
    python bench/eight_gpus.py report                      # the page and its pictures alone, from what is there

Nothing is measured that bench/eight_gpus_predict.py has not predicted. Each entry is one start of `paceline` in
processes of its own: `doctor --measure`, `bench train`, or `train` with a capture that `explain` reads. It is written
to eight_gpus.json the moment it ends, failed ones with their last lines; those are tried again, after everything that
was never tried. Results of another kind of device, or of fewer GPUs, are refused. NVLink multicast stays off.
bench/eight_gpus.sh calls this; bench/runner.py runs the jobs.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from typing import Any

from dense_table import tflops
from eight_gpus_found import found_by
from eight_gpus_jobs import COUNTS, PARTS, Job, jobs_of, tiny
from eight_gpus_results import EightResults, name_of
from eight_gpus_targets import figures
from jobs import bench_command
from runner import Bench, Found, main

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""A program that ends while it uses NVLink multicast can leave a host's GPUs unusable for everybody on it."""


def command_of(job: Job, folder: Path) -> list[str]:
    sets = [f"--set={item}" for item in job.sets]
    if job.kind == "doctor":
        return ["bench/eight_gpus_doctor.py", job.recipe, f"--nproc={job.processes}", f"--folder={folder}", *sets]
    if job.kind == "run":
        return ["-m", "paceline", "train", job.recipe, f"--nproc={job.processes}", *sets, f"--set=run.dir={folder}/run"]
    return bench_command(job, folder, gemm_seconds=job.gemm_seconds)


def found_in(job: Job, folder: Path) -> Found:
    return found_by(job, folder), []


def said(job: Job, entry: dict[str, Any]) -> str:
    if "ran_out" in entry:
        return "ran out of memory"
    if "doctor" in entry:
        found = entry["doctor"]
        return f"{len(found['ranks'])} ranks, {len(found['pairs'])} pairs, {len(found['collectives'])} collectives"
    made = figures(entry)
    assert made is not None
    return (
        f"{made['step_seconds']:.3f} s a step, {made['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"{tflops(made['tflops_per_gpu'])} TFLOP/s, {made['peak_memory_gib']:.1f} GiB"
    )


def bench_of(gpus: int) -> Bench:
    return Bench(
        name=name_of(gpus),
        parts=PARTS,
        jobs_of=functools.partial(jobs_of, gpus=gpus),
        tiny=tiny,
        results=functools.partial(EightResults, gpus=gpus),
        command_of=command_of,
        found_in=found_in,
        about=lambda job: {"recipe": job.recipe, "work": job.work},
        said=said,
        side_by_side=lambda job: False,
        gpus=gpus,
    )


def gpus_asked_for(arguments: list[str]) -> tuple[int, list[str]]:
    """`--gpus N`, and the arguments that are left: those of every bench."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--gpus", type=int, choices=COUNTS, default=COUNTS[0])
    found, left = parser.parse_known_args(arguments)
    return found.gpus, left


if __name__ == "__main__":
    os.environ.update(NO_MULTICAST)  # every job inherits it
    gpus, left = gpus_asked_for(sys.argv[1:])
    sys.argv[1:] = left
    main(bench_of(gpus), __doc__)
