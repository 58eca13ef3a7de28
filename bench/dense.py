"""Dense training at the hardware's limit: speed, memory, energy, numerics and overheads, beside the sustained GEMM.

    python bench/dense.py dense                       # the table; what is done is skipped
    python bench/dense.py ladder tune --minutes 8.5   # starts nothing that would not end in time
    python bench/dense.py dense --only 8b_fp8 --again # one entry anew
    python bench/dense.py dense --tiny --results DIR  # on CPUs, tiny: whether it runs at all
    python bench/dense.py list                        # every entry with its estimate
    python bench/dense.py report                      # the pages alone, from what is there

Each entry is one start of `paceline` (or of the profiler) in processes of its own. It is written to dense.json the
moment it ends, failed ones with their last lines; those are tried again, after everything that was never tried.
Compiled kernels are shared between entries. bench/dense.sh calls this.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dense_jobs import CHECKPOINT_STEP, EVALUATION_STEP, PARTS, Job, jobs_of, tiny
from dense_report import FIGURES, loss_text, tflops
from dense_results import OWN, DamagedFileError, Results, rounded
from layouts import LAST_LINES, LINE, machine

CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Running:
    """A job that has been started, in a process group of its own."""

    def __init__(self, job: Job, work: Path, gpu: str, *, is_tiny: bool) -> None:
        self.job, self.began = job, time.monotonic()
        self.folder = work / job.key
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.limit = 600 if is_tiny else min(2 * job.estimate + 60, 520)
        self.log = (self.folder / "log").open("w+", encoding="utf-8")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
        environment.setdefault(CACHE, str((work / "compiled").resolve()))
        if is_tiny:
            environment |= {"OMP_NUM_THREADS": "1"}
        self.cache_was_empty = not any(Path(environment[CACHE]).glob("*"))
        self.arguments = command_of(job, self.folder)
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,
        )

    def poll(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The entry and its curve, once it has ended or was out of time."""
        code = self.process.poll()
        seconds = time.monotonic() - self.began
        reason = "" if code == 0 else f"exit code {code}"
        if code is None:
            if seconds < self.limit:
                return None
            reason = f"stopped after {seconds:.0f} s"
            self.stop()
        entry = {
            "title": self.job.title,
            "kind": self.job.kind,
            "work": self.job.work,
            "processes": self.job.processes,
            "command": "python " + shlex.join(self.without_paths()),
            "seconds": round(seconds, 1),
            "compiled_before": not self.cache_was_empty,
        }
        records: list[dict[str, Any]] = []
        try:
            # also of one that did not end well: it may have all it was started for
            found, records = found_in(self.job, self.folder)
            entry |= found
            if reason:
                entry["note"] = f"measured, then {reason}"
        except (OSError, LookupError, TypeError, ValueError) as error:
            self.log.seek(0)
            lines = [line[:LINE] for line in self.log.read().splitlines() if line.strip()]
            entry["failed"] = [reason or f"no result: {error!r}", *lines[-LAST_LINES:]]
        self.log.close()
        # one of the 8B takes 100 GB
        shutil.rmtree(self.folder / "run" / "checkpoints", ignore_errors=True)
        return entry, records

    def without_paths(self) -> list[str]:
        return [item for item in self.arguments if not item.startswith(("--out=", "--set=run.dir="))]

    def stop(self) -> None:
        """The launcher passes SIGTERM on; what is still there a while after is killed."""
        for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(timeout=patience)
                return
            except subprocess.TimeoutExpired:
                continue
            except ProcessLookupError:
                return


def command_of(job: Job, folder: Path) -> list[str]:
    if job.kind == "ceilings":
        on_cpu = ["--tiny"] * ("cluster.device=cpu" in job.sets)
        return ["bench/dense_ceilings.py", f"--out={folder}/ceilings.json", *on_cpu]
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
    measured = [f"--warm-up={job.warm_up}", f"--steps={job.steps}", f"--gemm-seconds={job.gemm_seconds}"]
    command = ["-m", "paceline", "bench", "train", job.recipe, f"--nproc={job.processes}"]
    return [*command, *measured, f"--out={folder}/line.jsonl", *sets]


def found_in(job: Job, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the run left behind: of the entry, and the curve.

    Raises:
        OSError, LookupError, TypeError, ValueError: it left nothing usable.
    """
    if job.kind == "profile":
        return {"profile": an_object((folder / "p.json").read_text())}, []
    if job.kind == "ceilings":
        return {"ceilings": an_object((folder / "ceilings.json").read_text())}, []
    if job.kind == "bench":
        record = an_object((folder / "line.jsonl").read_text().splitlines()[-1])
        if missing := [name for name in FIGURES if name not in record]:
            raise LookupError(f"no {', '.join(missing)}")
        del record["recipe"]  # recipe and command say it
        return {"bench": record}, []
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    if job.kind == "train":
        return {"train": train_figures(folder / "run", records, wanted=wanted_steps(job))}, []
    if [record["step"] for record in records] != list(range(1, wanted_steps(job) + 1)):
        raise ValueError(f"{len(records)} of {wanted_steps(job)} steps")
    curve = [
        {"step": each["step"], "loss": rounded(each["loss"], 5), "grad_norm": rounded(each["grad_norm"], 4)}
        for each in records
    ]
    speed = statistics.median(record["tokens_per_second_per_gpu"] for record in records[1:])
    return {"curve": {"steps": len(curve), "tokens_per_second_per_gpu": speed}}, curve


def an_object(text: str) -> dict[str, Any]:
    """
    Raises:
        ValueError: other JSON, or none.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"not an object: {text[:40]}")
    return found


def wanted_steps(job: Job) -> int:
    return [int(item.partition("=")[2]) for item in job.sets if item.startswith("train.steps=")][-1]


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


def run(jobs: Sequence[Job], results: Results, options: argparse.Namespace, gpus: int) -> None:
    """Curves run side by side, one a GPU; whatever measures speed has the machine to itself."""
    end = time.monotonic() + 60 * options.minutes
    waiting = list(jobs)
    running: dict[Running, set[str]] = {}
    free = {str(index) for index in range(max(gpus, 2 if options.tiny else 1))}
    with ending_on_signals():
        try:
            while waiting or running:
                for each in list(running):
                    if (done := each.poll()) is not None:
                        free |= running.pop(each)
                        results.put(each.job, *done)
                        tell(each.job, done[0])
                while waiting and (wanted := needed(waiting[0], free, alone=not running)) is not None:
                    job = waiting.pop(0)
                    if time.monotonic() + job.estimate > end:
                        print(f"{job.key}: left for the next call, {job.estimate:.0f} s would not fit", flush=True)
                        continue
                    gpu = "" if options.tiny else ",".join(sorted(wanted)[: job.processes])
                    free -= wanted
                    running[Running(job, options.work, gpu, is_tiny=options.tiny)] = wanted
                time.sleep(0.2)
        finally:
            for each in running:
                each.stop()


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal's SIGHUP end the call by `SystemExit`, so that nothing is left on the GPUs."""

    def end(number: int, frame: object) -> None:
        # a terminal that closes sends more than one: the next must not cut off the stopping of jobs
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for each, handler in before.items():
            if handler != signal.SIG_IGN:  # nohup
                signal.signal(each, end)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def needed(job: Job, free: set[str], *, alone: bool) -> set[str] | None:
    """The GPUs that a job keeps from others; None if it has to wait."""
    if job.kind == "curve":
        return {min(free)} if free else None
    return set(free) if alone else None


def tell(job: Job, entry: dict[str, Any]) -> None:
    if "failed" in entry:
        said = "FAILED: " + " | ".join(entry["failed"][:1] + entry["failed"][-4:])
    elif "bench" in entry:
        bench = entry["bench"]
        said = (
            f"{bench['step_seconds']:.3f} s a step, {bench['tokens_per_second_per_gpu']:,.0f} tokens/s, "
            f"{tflops(bench['tflops_per_gpu'])} TFLOP/s = {bench['fraction_of_gemm']:.3f} of "
            f"{tflops(bench['sustained_gemm_tflops'])}, {bench['peak_memory_gib']:.1f} GiB, "
            f"loss {loss_text(bench['loss'])}"
        )
    elif "train" in entry:
        said = f"{entry['train']['step_seconds']:.3f} s a step, loss {loss_text(entry['train']['loss'])}"
    elif "ceilings" in entry:
        models = entry["ceilings"]["models"]
        said = ", ".join(f"{name} {tflops(found.get('ceiling_tflops', 0))} TFLOP/s" for name, found in models.items())
    elif "profile" in entry:
        said = f"{entry['profile']['wall_ms']:.0f} ms, idle {entry['profile']['idle_ms']:.0f}"
    else:
        said = f"{entry['curve']['steps']} steps, {entry['curve']['tokens_per_second_per_gpu']:,.0f} tokens/s"
    print(f"{job.key}: {said} ({entry['seconds']:.0f} s)", flush=True)


def chosen(options: argparse.Namespace) -> list[Job]:
    """In the order asked for; an entry that is in two parts comes once."""
    jobs = {job.key: job for part in options.parts if part in PARTS for job in jobs_of(part)}
    found = [job for job in jobs.values() if not options.only or job.name in options.only]
    return [tiny(job) for job in found] if options.tiny else found


def unknown_names(options: argparse.Namespace) -> str:
    """What is wrong with --only, for the user; "" if nothing is."""
    known = {part: [job.name for job in jobs_of(part)] for part in PARTS}
    names = list(dict.fromkeys(name for part in options.parts for name in known.get(part, ())))
    said = []
    for name in options.only:
        if name not in names:
            elsewhere = [part for part in PARTS if name in known[part]]
            near = difflib.get_close_matches(name, names, cutoff=0.4) or names
            said.append(
                f"--only {name}: no such entry in {' '.join(options.parts)}"
                + (f", but in {', '.join(elsewhere)}" if elsewhere else "")
                + (f"; near it: {', '.join(near)}" if near else "")
            )
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "report", "list"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing that would not end by then")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these entries alone")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs; needs --results of its own")
    parser.add_argument("--results", type=Path, help=f"folder of dense.{{json,md}}, {OWN} without it")
    parser.add_argument("--work", type=Path, default=Path("runs/dense"), help="logs and run folders")
    options = parser.parse_args()
    if "list" in options.parts:
        for part in PARTS:
            for job in jobs_of(part):
                print(f"{job.key:24} {job.processes} GPU {job.estimate:3.0f} s {job.recipe} {' '.join(job.sets)}")
        return
    if problem := unknown_names(options):
        parser.error(problem)
    if options.tiny and (options.results is None or options.results.resolve() == OWN.resolve()):
        parser.error(f"--tiny: its figures mean nothing and do not go to {OWN}: add --results with another folder")
    try:
        results = Results(options.results or OWN)
        jobs = chosen(options)
        if jobs and results.entries and results.are_tiny != options.tiny:
            held = "of --tiny" if results.are_tiny else "without --tiny"
            parser.error(f"{results.path} holds results {held}: choose another --results, or move it away")
        measure(jobs, results, options)
    except DamagedFileError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def measure(jobs: Sequence[Job], results: Results, options: argparse.Namespace) -> None:
    """What is to be done, and the pages; without jobs the pages alone."""
    if jobs:
        found, gpus = machine()
        results.data |= {"tiny": options.tiny, **found}
        todo = [job for job in jobs if options.again or not results.is_done(job)]
        todo.sort(key=lambda job: job.key in results.entries)  # stable: failed ones last
        if not options.tiny:
            left_out = [job.key for job in todo if job.processes > gpus]
            todo = [job for job in todo if job.processes <= gpus]
            if left_out:
                print(f"left out on {gpus} GPUs: {', '.join(left_out)}", flush=True)
        run(todo, results, options, gpus)
    results.draw()
    results.write()
    print("\n".join(results.page()))


if __name__ == "__main__":
    main()
