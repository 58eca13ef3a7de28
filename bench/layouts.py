"""Every parallelism on two GPUs beside one: step time and memory, loss curves on real text, a long context.

    python bench/layouts.py speed                       # in the order of importance; what is done is skipped
    python bench/layouts.py curves long --minutes 9     # starts nothing that would not end in time
    python bench/layouts.py speed --only tp2 --again    # one entry anew
    python bench/layouts.py speed --tiny                # on CPUs, tiny: whether it runs at all
    python bench/layouts.py report                      # the page alone, from what is there

Each entry is one `paceline bench train` or `paceline train` in processes of its own, so that one that fails or hangs
takes no other with it. It is written to layouts.json the moment it ends, failed ones with their last lines; those are
tried again, after everything that was never tried. bench/layouts.sh calls this.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layouts_jobs import PARTS, Job, jobs_of, tiny
from layouts_report import page

STEPS = {"speed": (3, 6), "long": (2, 4)}
"""Of `paceline bench`: not measured, measured."""
LAST_LINES, LINE = 12, 300
"""Of the log of what failed; characters of each."""


class Results:
    """layouts.json: written anew, in one piece, after every entry."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "layouts.json"
        folder.mkdir(parents=True, exist_ok=True)
        empty: dict[str, Any] = {"command": "bench/layouts.sh", "entries": {}}
        self.data = json.loads(self.path.read_text()) if self.path.is_file() else empty

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.data["entries"]
        return found

    def is_done(self, job: Job) -> bool:
        return job.key in self.entries and "failed" not in self.entries[job.key]

    def put(self, job: Job, entry: dict[str, Any]) -> None:
        self.entries[job.key] = entry
        self.write()

    def write(self) -> None:
        text = json.dumps(self.data, indent=1)
        # a list of numbers takes a line, not one for each number
        text = re.sub(r"\[[-\d.,e\s]+\]", lambda match: " ".join(match.group().split()), text)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(self.path)
        (self.folder / "layouts.md").write_text("\n".join(page(self.data)) + "\n")


class Running:
    """A job that has been started, in a process group of its own."""

    def __init__(self, job: Job, work: Path, gpu: str, *, is_tiny: bool) -> None:
        self.job, self.began = job, time.monotonic()
        self.folder = work / job.key
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.limit = 600 if is_tiny else 3 * job.estimate + 60
        self.log = (self.folder / "log").open("w+", encoding="utf-8")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
        if is_tiny:
            environment |= {"OMP_NUM_THREADS": "1"}
        self.arguments = command_of(job, self.folder, is_tiny=is_tiny)
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            process_group=0,
        )

    def poll(self) -> dict[str, Any] | None:
        """The entry, once it has ended or was out of time."""
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
            "model": self.job.model,
            "processes": self.job.processes,
            "compiled": self.job.compiled,
            "command": "python " + shlex.join(self.without_paths()),
            "seconds": round(seconds, 1),
        }
        try:
            # also of one that did not end well: it may have all it was started for
            entry |= found_in(self.job, self.folder)
            if reason:
                entry["note"] = f"measured, then {reason}"
        except (OSError, LookupError, ValueError) as error:
            self.log.seek(0)
            lines = [line[:LINE] for line in self.log.read().splitlines() if line.strip()]
            entry["failed"] = [reason or f"no result: {error!r}", *lines[-LAST_LINES:]]
        self.log.close()
        return entry

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


def command_of(job: Job, folder: Path, *, is_tiny: bool) -> list[str]:
    sets = [f"--set={item}" for item in job.sets]
    if job.part == "curves":
        return ["-m", "paceline", "train", job.recipe, f"--nproc={job.processes}", *sets, f"--set=run.dir={folder}/run"]
    warm_up, steps = (1, 1) if is_tiny else STEPS[job.part]
    measured = [f"--warm-up={warm_up}", f"--steps={steps}", f"--out={folder}/line.jsonl"]
    return ["-m", "paceline", "bench", "train", job.recipe, f"--nproc={job.processes}", *measured, *sets]


def found_in(job: Job, folder: Path) -> dict[str, Any]:
    """What the run left behind.

    Raises:
        OSError, LookupError, ValueError: it left nothing usable.
    """
    if job.part == "curves":
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in records]
        wanted = [int(item.partition("=")[2]) for item in job.sets if item.startswith("train.steps=")][-1]
        if steps != list(range(1, wanted + 1)):
            raise ValueError(f"{len(steps)} of {wanted} steps")
        return {
            "losses": [round(record["loss"], 5) for record in records],
            "gradient_norms": [round(record["grad_norm"], 4) for record in records],
        }
    record = json.loads((folder / "line.jsonl").read_text().splitlines()[-1])
    del record["recipe"]  # recipe and command say it
    return {"bench": record}


def run(jobs: Sequence[Job], results: Results, options: argparse.Namespace, gpus: int) -> None:
    """Jobs of one process run side by side, one a GPU, where their speed is not what is asked for."""
    end = time.monotonic() + 60 * options.minutes
    waiting = list(jobs)
    running: dict[Running, set[str]] = {}
    free = {str(index) for index in range(max(gpus, 2 if options.tiny else 1))}
    # a call that is asked to end leaves nothing on the GPUs
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        work_through(waiting, running, free, end, results, options)
    finally:
        for each in running:
            each.stop()


def work_through(
    waiting: list[Job],
    running: dict[Running, set[str]],
    free: set[str],
    end: float,
    results: Results,
    options: argparse.Namespace,
) -> None:
    while waiting or running:
        for each in list(running):
            if (entry := each.poll()) is not None:
                free |= running.pop(each)
                results.put(each.job, entry)
                tell(each.job, entry)
        # first come, first served: a job that needs all GPUs is not overtaken for ever
        while waiting and (wanted := needed(waiting[0], free)) is not None:
            job = waiting.pop(0)
            if time.monotonic() + job.estimate > end:
                print(f"{job.key}: left for the next call, {job.estimate:.0f} s would not fit", flush=True)
                continue
            gpu = "" if options.tiny else ",".join(sorted(wanted))
            free -= wanted
            running[Running(job, options.work, gpu, is_tiny=options.tiny)] = wanted
        time.sleep(0.2)


def needed(job: Job, free: set[str]) -> set[str] | None:
    """The GPUs that a job takes now; None if it has to wait."""
    number = job.processes if job.part == "curves" else 2
    if number <= len(free):
        return set(sorted(free)[:number])
    # a machine of one GPU can still measure what needs one
    return set(free) if job.processes == 1 and free and job.part != "curves" else None


def tell(job: Job, entry: dict[str, Any]) -> None:
    if "failed" in entry:
        said = "FAILED: " + " | ".join(entry["failed"][:1] + entry["failed"][-4:])
    elif "bench" in entry:
        bench = entry["bench"]
        said = f"{bench['step_seconds']:.3f} s a step, {bench['tflops_per_gpu']:.0f} TFLOP/s, " + (
            f"{bench['peak_memory_gib']:.1f} GiB, loss {bench['loss']}"
        )
    else:
        said = f"loss {entry['losses'][0]:.3f} to {entry['losses'][-1]:.3f}"
    print(f"{job.key}: {said} ({entry['seconds']:.0f} s)", flush=True)


def machine() -> tuple[dict[str, Any], int]:
    """What it runs on, and how many GPUs there are; asked in a process of its own, which leaves nothing on a GPU."""
    code = (
        "import json, torch; from paceline.runtime.device import device_name, versions; n = torch.cuda.device_count();"
        "d = torch.device('cuda', 0) if n else torch.device('cpu');"
        "print(json.dumps([{'devices': f'{n or 2} x {device_name(d)}', 'versions': versions()}, n]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    found, gpus = json.loads(printed.splitlines()[-1])
    return {**found, "host": platform.platform(terse=True)}, gpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "report", "list"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing that would not end by then")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these entries alone")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs")
    parser.add_argument("--results", type=Path, default=Path("docs/measured"), help="folder of layouts.{json,md}")
    parser.add_argument("--work", type=Path, default=Path("runs/layouts"), help="logs and run folders")
    options = parser.parse_args()
    jobs = [job for part in options.parts if part in PARTS for job in jobs_of(part)]
    jobs = [tiny(job) if options.tiny else job for job in jobs if not options.only or job.name in options.only]
    results = Results(options.results)
    if "list" in options.parts:
        for job in (job for part in PARTS for job in jobs_of(part)):
            print(f"{job.key:28} {job.processes} GPU {job.estimate:3.0f} s {' '.join(job.sets)}")
        return
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
    results.write()
    print("\n".join(page(results.data)))


if __name__ == "__main__":
    main()
