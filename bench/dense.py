"""Dense training at the hardware's limit: speed, memory, energy, numerics and overheads, beside the sustained GEMM.

    python bench/dense.py dense                       # the table; what is done is skipped
    python bench/dense.py ladder tune --minutes 8.5   # starts nothing that would not end in time
    python bench/dense.py dense --only 8b_fp8 --again # one entry anew
    python bench/dense.py dense ladder --one-gpu      # larger models with fewer layers; results of their own
    python bench/dense.py dense --tiny --results DIR  # on CPUs, tiny: whether it runs at all
    python bench/dense.py list                        # every entry with its estimate
    python bench/dense.py report                      # the pages alone, from what is there

Each entry is one start of `paceline` (or of the profiler) in processes of its own. It is written to dense.json the
moment it ends, failed ones with their last lines; those are tried again, after everything that was never tried.
Compiled kernels are shared between entries. bench/dense.sh calls this; bench/runner.py runs the jobs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dense_one_gpu
from dense_jobs import CHECKPOINT_STEP, EVALUATION_STEP, PARTS, Job, jobs_of, tiny
from dense_report import FIGURES
from dense_results import DenseResults, OneGpuResults
from dense_table import loss_text, tflops
from found import an_object, bench_record, every_step, metrics, rounded, wanted_steps
from jobs import bench_command
from runner import Bench, Found, main


def command_of(job: Job, folder: Path) -> list[str]:
    if job.kind == "ceilings":
        on_cpu = ["--tiny"] * ("cluster.device=cpu" in job.sets)
        cut = ["--one-gpu"] * bool(job.cut)
        return ["bench/dense_ceilings.py", f"--out={folder}/ceilings.json", *cut, *on_cpu]
    sets = [f"--set={item}" for item in job.sets]
    if job.kind == "profile":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes}"]
        return [
            *launcher,
            "bench/profile_step.py",
            job.recipe,
            f"--steps={job.warm_up}",
            f"--out={folder}/p.json",
            *sets,
        ]
    if job.kind in ("train", "curve"):
        return ["-m", "paceline", "train", job.recipe, f"--nproc={job.processes}", *sets, f"--set=run.dir={folder}/run"]
    return bench_command(job, folder, gemm_seconds=job.gemm_seconds)


def found_in(job: Job, folder: Path) -> Found:
    """What the run left behind: of the entry, and the curve.

    Raises:
        OSError, LookupError, TypeError, ValueError: it left nothing usable.
    """
    if job.kind == "profile":
        return {"profile": an_object((folder / "p.json").read_text())}, []
    if job.kind == "ceilings":
        return {"ceilings": an_object((folder / "ceilings.json").read_text())}, []
    if job.kind == "bench":
        return {"bench": bench_record(folder, FIGURES)}, []
    if job.kind == "train":
        return {"train": train_figures(folder / "run", metrics(folder), wanted=wanted_steps(job))}, []
    records = every_step(job, folder)
    curve = [
        {"step": each["step"], "loss": rounded(each["loss"], 5), "grad_norm": rounded(each["grad_norm"], 4)}
        for each in records
    ]
    speed = statistics.median(record["tokens_per_second_per_gpu"] for record in records[1:])
    return {"curve": {"steps": len(curve), "tokens_per_second_per_gpu": speed}}, curve


def train_figures(run: Path, records: Sequence[dict[str, Any]], *, wanted: int) -> dict[str, Any]:
    """Seconds of the steps of a `paceline train`, each by its number, and what its evaluation and checkpoint cost.

    Raises:
        OSError, LookupError, TypeError, ValueError: the run did not get that far.
    """
    seconds = json.loads((run / "step_seconds.json").read_text())
    if len(seconds) != wanted - 1:
        raise ValueError(f"{len(seconds) + 1} of {wanted} steps")
    by_step = dict(enumerate(seconds, start=2))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    saved = [event for event in events if event["event"] == "checkpoint"]
    special = {event["step"] for event in events if event["event"] == "evaluation"}
    special |= {CHECKPOINT_STEP} if saved else set()
    plain = [value for step, value in by_step.items() if step > 4 and step not in special]
    before = [value for step, value in by_step.items() if 4 < step < CHECKPOINT_STEP and step not in special]
    after = [value for step, value in by_step.items() if step > CHECKPOINT_STEP and step not in special]
    usual = statistics.median(before if saved else plain)
    figures = {
        "step_seconds": usual,
        "step_seconds_min": min(plain),
        "step_seconds_max": max(plain),
        "loss": records[-1]["loss"],
        "data_wait_seconds": max(record["data_wait_seconds"] for record in records[1:]),
        "start_up_seconds": json.loads((run / "summary.json").read_text())["start_up"],
        "steps": [round(value, 4) for value in seconds],
    }
    if saved:
        figures["checkpoint_stall_seconds"] = by_step[CHECKPOINT_STEP] - usual
        figures["while_writing_step_seconds"] = statistics.median(after)
    if EVALUATION_STEP in special:
        figures["evaluation_seconds"] = by_step[EVALUATION_STEP] - usual
    return figures


def said(job: Job, entry: dict[str, Any]) -> str:
    if "bench" in entry:
        bench = entry["bench"]
        return (
            f"{bench['step_seconds']:.3f} s a step, {bench['tokens_per_second_per_gpu']:,.0f} tokens/s, "
            f"{tflops(bench['tflops_per_gpu'])} TFLOP/s = {bench['fraction_of_gemm']:.3f} of "
            f"{tflops(bench['sustained_gemm_tflops'])}, {bench['peak_memory_gib']:.1f} GiB, "
            f"loss {loss_text(bench['loss'])}"
        )
    if "train" in entry:
        return f"{entry['train']['step_seconds']:.3f} s a step, loss {loss_text(entry['train']['loss'])}"
    if "ceilings" in entry:
        models = entry["ceilings"]["models"]
        return ", ".join(f"{name} {tflops(found.get('ceiling_tflops', 0))} TFLOP/s" for name, found in models.items())
    if "profile" in entry:
        return f"{entry['profile']['wall_ms']:.0f} ms, idle {entry['profile']['idle_ms']:.0f}"
    curve = entry["curve"]
    beside = f", {entry['at_once']} at once" if "at_once" in entry else ""
    return f"{curve['steps']} steps, {curve['tokens_per_second_per_gpu']:,.0f} tokens/s{beside}"


def about(job: Job) -> dict[str, Any]:
    return {"work": job.work, **({"cut": job.cut} if job.cut else {})}


TWO_GPUS = Bench(
    name="dense",
    parts=PARTS,
    jobs_of=jobs_of,
    tiny=tiny,
    results=DenseResults,
    command_of=command_of,
    found_in=found_in,
    about=about,
    said=said,
)
BENCH = replace(
    TWO_GPUS, one_gpu=replace(TWO_GPUS, name="dense_one_gpu", jobs_of=dense_one_gpu.jobs_of, results=OneGpuResults)
)

if __name__ == "__main__":
    main(BENCH, __doc__)
