"""Does `paceline tune` find what is fast, in few trials? Tunings of the naive recipe, and a sweep of all answers.

    python bench/tune.py ladder hand                   # on two GPUs; what is done is skipped
    python bench/tune.py sweep                         # on one GPU: 60 points, about half an hour
    python bench/tune.py ladder sweep --minutes 8.5    # starts nothing that would not end in time
    python bench/tune.py ladder hand --one-gpu         # on one GPU, with 8 of 40 layers: tune_one_gpu.{json,md}
    python bench/tune.py ladder sweep --tiny --results DIR   # on CPUs, tiny: whether it runs at all
    python bench/tune.py list                          # every entry with its estimate
    python bench/tune.py report                        # the page alone, from what is there

A tuning is one `paceline tune` of at most 20 minutes of trials, in as many calls as it takes: its journal is kept
beside the results. A point of the sweep, or a hand-made recipe, is one `paceline bench train`; bench/runner.py runs
those.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import runner
import tune_jobs
from cut_off import ending_on_signals, saying
from found import an_object, bench_or_ran_out
from jobs import bench_command
from results import OWN, DamagedFileError, OtherMachineError
from runner import Bench, Found
from tune_jobs import PARTS, Job
from tune_results import FIGURES, TuneResults

_LEAST_SECONDS = 100.0
"""Left in a call, below which no tuning is taken up: a trial of the naive recipe takes about a minute."""
_PATIENCE = 30.0
"""Seconds in which a tuning ends its trial."""


def command_of(job: Job, folder: Path) -> list[str]:
    return bench_command(job, folder, gemm_seconds=job.gemm_seconds)


def found_in(job: Job, folder: Path) -> Found:
    return bench_or_ran_out(folder, FIGURES), []


def said(job: Job, entry: dict[str, Any]) -> str:
    if "ran_out" in entry:
        return "ran out of memory"
    if "tune" in entry:
        return f"gain {entry['tune']['gain'] or 'none'} after {len(entry['tune']['trials'])} trials"
    bench = entry["bench"]
    return f"{bench['step_seconds']:.3f} s a step, {bench['peak_memory_gib']:.1f} GiB"


def _bench(*, one_gpu: bool) -> Bench:
    return Bench(
        name="tune_one_gpu" if one_gpu else "tune",
        parts=PARTS,
        jobs_of=tune_jobs.on_one_gpu if one_gpu else tune_jobs.jobs_of,
        tiny=tune_jobs.tiny,
        results=lambda folder: TuneResults(folder, one_gpu=one_gpu),
        command_of=command_of,
        found_in=found_in,
        about=lambda job: {"recipe": job.recipe},
        said=said,
        side_by_side=lambda job: False,
    )


BENCH = replace(_bench(one_gpu=False), one_gpu=_bench(one_gpu=True))


# ---- tunings


def tune(bench: Bench, job: Job, results: TuneResults, options: Namespace, seconds: float) -> bool:
    """One call of `paceline tune`. False where it has to go on in the next call."""
    work = options.work / job.key
    results.restore(job, work)
    command = [
        sys.executable, "-m", "paceline", "tune", job.recipe, f"--nproc={job.processes}", f"--budget={job.budget}",
        f"--out={work}", "--json", f"--trials={job.trials}", *(f"--set={item}" for item in job.sets),
        *(f"--vary={item}" for item in job.vary), *(f"--allow={word}" for word in job.allow if not job.vary),
    ]  # fmt: skip
    command += [f"--steps={job.steps}"] if job.vary else []
    command += [f"--pause-after={seconds:.0f}s"] if seconds < 86400 else []
    began = time.monotonic()
    try:
        code, printed = _answer(command)
    finally:
        results.keep(job, work)
    entry: dict[str, Any] = {
        "title": job.title, "kind": job.kind, "processes": job.processes, "recipe": job.recipe,
        "command": "python " + shlex.join(item for item in command[1:] if not item.startswith(("--out=", "--pause"))),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    try:
        found = an_object(printed)
    except ValueError:
        entry["failed"] = [f"exit code {code}", *printed.splitlines()[-runner.LAST_LINES :]]
        if not _paused_early(work):
            results.put(job, entry)
            runner.tell(bench, job, entry)
        return False
    if found["stopped"] == "pause":
        print(f"{job.key}: {len(found['trials'])} trials so far, goes on in the next call", flush=True)
        return False
    results.put(job, entry | {"tune": found})
    runner.tell(bench, job, entry | {"tune": found})
    return True


def _answer(command: list[str]) -> tuple[int, str]:
    """Exit code and what was printed. Where this call is cut off, the tuning ends as a whole before it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return process.returncode, printed


def _paused_early(work: Path) -> bool:
    """Whether the call had no time for a first trial: it has failed in nothing."""
    journal = work / "trials.jsonl"
    return not journal.exists() or not journal.read_text().strip()


def main() -> None:
    parser = runner.parser_of(BENCH, __doc__)
    options = parser.parse_args()
    if "ladder" not in options.parts or "list" in options.parts or options.parts == ["report"]:
        runner.main(BENCH, __doc__)
        return
    if options.tiny and (options.results is None or options.results.resolve() == OWN.resolve()):
        parser.error(f"--tiny: its figures mean nothing and do not go to {OWN}: add --results with another folder")
    bench = BENCH.one_gpu if options.one_gpu and BENCH.one_gpu else BENCH
    began = time.monotonic()
    try:
        with saying(lambda: runner.kept(bench, bench.results(options.results or OWN), options)), ending_on_signals():
            _tunings(bench, options, began)
    except (DamagedFileError, OtherMachineError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    rest = [part for part in options.parts if part != "ladder"]
    options.parts = rest or ["report"]
    options.minutes = max(0.0, options.minutes - (time.monotonic() - began) / 60)
    results = bench.results(options.results or OWN)
    with saying(lambda: runner.kept(bench, results, options)):
        runner.measure(bench, runner.chosen(bench, options), results, options)


def _tunings(bench: Bench, options: Namespace, began: float) -> None:
    results = bench.results(options.results or OWN)
    assert isinstance(results, TuneResults)
    found, gpus = runner.machine()
    if options.one_gpu and "devices" in found:
        found["devices"] = "1 x " + found["devices"].partition(" x ")[2]
    results.measure_on({"tiny": options.tiny, **found})
    wanted = runner.chosen(bench, Namespace(**{**vars(options), "parts": ["ladder"]}))
    for job in wanted:
        if results.is_done(job) and not options.again:
            continue
        if not options.tiny and job.processes > gpus:
            print(f"left out on {gpus} GPUs: {job.key}", flush=True)
            continue
        left = 60 * options.minutes - (time.monotonic() - began)
        if left < _LEAST_SECONDS:
            print(f"{job.key}: left for the next call", flush=True)
            continue
        tune(bench, job, results, options, left - 15)


if __name__ == "__main__":
    main()
