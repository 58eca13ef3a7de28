"""Runs the jobs of a bench: what is to be done, in which order, on which GPUs, and what came out.

Every bench has the same command line; see the docstring of each. An entry is one start in processes of its own, so that
one that fails or hangs takes no other with it. It is written the moment it ends, failed ones with their last lines;
those are tried again, after everything that was never tried.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from cut_off import ending_on_signals, for_a_pipe, saying
from jobs import Job
from ranks import Ranks, sharing_one_gpu
from results import OWN, SHARED, DamagedFileError, OtherMachineError, Results

CACHE = "TORCHINDUCTOR_CACHE_DIR"
VISIBLE = "CUDA_VISIBLE_DEVICES"
FLASH4 = "train.attention_kernel=flash4"
LAST_LINES, LINE = 12, 300
"""Of the log of what failed; characters of each."""
LONGEST = 520
"""Seconds after which a job is stopped, whatever its estimate."""
SHARED_TIMES = 6.0
"""How much longer a job may take whose ranks share a GPU and talk over sockets: 67 to 194 s were seen for 25 (ZeRO-1
and ZeRO-3 on an H200)."""

Found: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]]]
"""What belongs in the entry, and the curve."""


class Place(NamedTuple):
    """Room for a job on a GPU, which may take `--at-once` of those that run side by side."""

    gpu: str
    number: int


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What one bench has of its own. ``Any`` stands for its kind of `Job`."""

    name: str
    parts: tuple[str, ...]
    jobs_of: Callable[[str], Sequence[Any]]
    tiny: Callable[[Any], Any]
    """The same with a model that a CPU trains in seconds."""
    results: Callable[[Path], Results]
    command_of: Callable[[Any, Path], list[str]]
    """Arguments of Python for a job that leaves what it finds in a folder."""
    found_in: Callable[[Any, Path], Found]
    """What it left there; OSError, LookupError, TypeError or ValueError where that is nothing usable."""
    about: Callable[[Any], dict[str, Any]]
    """What an entry says of its job beside title, kind and processes."""
    said: Callable[[Any, dict[str, Any]], str]
    """An entry that did not fail, in a line."""
    side_by_side: Callable[[Any], bool] = lambda job: job.kind == "curve"
    """Whether a job runs beside others; what measures speed has the machine to itself."""
    may_share_gpu: bool = False
    """Whether its page knows of ranks that shared a GPU."""
    runs_on_cpu: bool = False
    """Whether jobs of one process mean something without a GPU."""
    longest: float = LONGEST
    gpus: int = 0
    """Of a machine that has more, how many are used; 0 = all."""
    one_gpu: Bench | None = None
    """What `--one-gpu` runs instead: jobs of one process each, and results of their own."""


class Running:
    """A job that has been started."""

    def __init__(self, bench: Bench, job: Job, options: argparse.Namespace, gpu: str) -> None:
        self.bench, self.job, self.began = bench, job, time.monotonic()
        self.shared = is_shared(job, options)
        self.folder = options.work / job.key
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.at_once = options.at_once if bench.side_by_side(job) else 1
        self.limit = 600 if options.tiny else min(2 * seconds_of(job, options) * self.at_once + 60, bench.longest)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **({VISIBLE: visible(gpu)} if gpu else {})}
        environment.setdefault(CACHE, str((options.work / "compiled").resolve()))
        if options.tiny:
            environment |= {"OMP_NUM_THREADS": "1"}
        self.cache_was_empty = not any(Path(environment[CACHE]).glob("*"))
        self.arguments = bench.command_of(job, self.folder)
        environments = [environment]
        if self.shared:
            self.arguments = [item for item in self.arguments if not item.startswith("--nproc=")]
            environments = sharing_one_gpu(environment, job.processes)
        self.ranks = Ranks(self.arguments, environments, self.folder / "log")

    def poll(self) -> Found | None:
        """The entry and its curve, once it has ended or was out of time."""
        code = self.ranks.poll()
        seconds = time.monotonic() - self.began
        reason = "" if code == 0 else f"exit code {code}"
        if code is None:
            if seconds < self.limit:
                return None
            reason = f"stopped after {seconds:.0f} s"
            self.stop()
        entry: dict[str, Any] = {
            "title": self.job.title,
            "kind": self.job.kind,
            "processes": self.job.processes,
            **self.bench.about(self.job),
            **({SHARED: True} if self.shared else {}),
            **({"at_once": self.at_once} if self.at_once > 1 else {}),
            "command": "python " + shlex.join(self.without_paths()),
            "seconds": round(seconds, 1),
            "compiled_before": not self.cache_was_empty,
        }
        records: list[dict[str, Any]] = []
        try:
            # also of one that did not end well: it may have all it was started for
            found, records = self.bench.found_in(self.job, self.folder)
            entry |= found
            if reason:
                entry["note"] = f"measured, then {reason}"
        except (OSError, LookupError, TypeError, ValueError) as error:
            log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
            lines = [line[:LINE] for line in log.splitlines() if line.strip()]
            entry["failed"] = [reason or f"no result: {error!r}", *lines[-LAST_LINES:]]
        # one of the 8B takes 100 GB
        shutil.rmtree(self.folder / "run" / "checkpoints", ignore_errors=True)
        return entry, records

    def seconds_left(self, options: argparse.Namespace) -> float:
        """Of its GPU's time, if those that may run beside it always did."""
        return max(0.0, seconds_of(self.job, options) - (time.monotonic() - self.began) / self.at_once)

    def without_paths(self) -> list[str]:
        return [item for item in self.arguments if not item.startswith(("--out=", "--set=run.dir="))]

    def stop(self) -> None:
        self.ranks.stop()


def visible(gpus: str) -> str:
    """What CUDA calls these of the GPUs that this process sees, "0,1": two benches may have a GPU of a machine each."""
    given = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return ",".join(given[int(gpu)] for gpu in gpus.split(",")) if given else gpus


def is_shared(job: Job, options: argparse.Namespace) -> bool:
    return bool(options.share_gpu) and job.processes > 1


def gpus_of(job: Job, options: argparse.Namespace) -> int:
    return 1 if is_shared(job, options) else job.processes


def seconds_of(job: Job, options: argparse.Namespace) -> float:
    return job.estimate * (SHARED_TIMES if is_shared(job, options) and not options.tiny else 1.0)


def run(bench: Bench, jobs: Sequence[Job], results: Results, options: argparse.Namespace, gpus: int) -> None:
    """Jobs run side by side where they may, each on GPUs of its own; the others one after the other."""
    end = time.monotonic() + 60 * options.minutes
    waiting = list(jobs)
    running: dict[Running, set[Place]] = {}
    numbers = range(max(gpus, 2 if options.tiny else 1))
    free = {Place(str(gpu), number) for gpu in numbers for number in range(options.at_once)}
    with ending_on_signals():
        try:
            while waiting or running:
                for each in list(running):
                    if (done := each.poll()) is not None:
                        free |= running.pop(each)
                        results.put(each.job, *done)
                        tell(bench, each.job, done[0])
                # first come, first served: a job that needs all GPUs is not overtaken for ever
                while waiting and (wanted := needed(bench, waiting[0], free, options, alone=not running)) is not None:
                    job = waiting.pop(0)
                    seconds = seconds_of(job, options) + sum(
                        each.seconds_left(options) for each, places in running.items() if on_one(places, wanted)
                    )
                    if time.monotonic() + seconds > end:
                        left = f"{job.key}: left for the next call, {seconds:.0f} s would not fit"
                        print(left, flush=True)
                        continue
                    seen = sorted({place.gpu for place in wanted})[: gpus_of(job, options)]
                    gpu = "" if options.tiny else ",".join(seen)
                    free -= wanted
                    running[Running(bench, job, options, gpu)] = wanted
                time.sleep(0.2)
        finally:
            for each in running:
                each.stop()


def needed(bench: Bench, job: Job, free: set[Place], options: argparse.Namespace, *, alone: bool) -> set[Place] | None:
    """The places that a job keeps from others; None if it has to wait. On the emptiest GPUs, one on each."""
    if not bench.side_by_side(job) and not is_shared(job, options):
        return set(free) if alone else None
    by_gpu: dict[str, list[Place]] = {}
    for place in sorted(free):
        by_gpu.setdefault(place.gpu, []).append(place)
    emptiest = sorted(by_gpu.values(), key=lambda places: -len(places))
    number = gpus_of(job, options)
    return {places[0] for places in emptiest[:number]} if number <= len(emptiest) else None


def on_one(places: set[Place], others: set[Place]) -> bool:
    """Whether they share a GPU, and so its time: both end when the work of both is done."""
    return not {place.gpu for place in places}.isdisjoint(place.gpu for place in others)


def tell(bench: Bench, job: Job, entry: dict[str, Any]) -> None:
    if "failed" in entry:
        said = "FAILED: " + " | ".join(entry["failed"][:1] + entry["failed"][-4:])
    else:
        said = bench.said(job, entry)
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


def chosen(bench: Bench, options: argparse.Namespace) -> list[Job]:
    """In the order asked for; an entry that is in two parts comes once."""
    jobs = {job.key: job for part in options.parts if part in bench.parts for job in bench.jobs_of(part)}
    found = [job for job in jobs.values() if not options.only or job.name in options.only]
    return [bench.tiny(job) for job in found] if options.tiny else [job for job in found if may_run(job)]


def may_run(job: Job) -> bool:
    """Whether the kernels that it is about are here; without them it would measure others under its name."""
    if FLASH4 not in job.sets or find_spec("flash_attn") is not None:
        return True
    print(f"{job.key}: left out, flash-attn-4 is not installed (pip install 'flash-attn-4[cu13]')", flush=True)
    return False


def unknown_names(bench: Bench, options: argparse.Namespace) -> str:
    """What is wrong with --only, for the user; "" if nothing is."""
    known = {part: [job.name for job in bench.jobs_of(part)] for part in bench.parts}
    names = list(dict.fromkeys(name for part in options.parts for name in known.get(part, ())))
    said = []
    for name in options.only:
        if name not in names:
            elsewhere = [part for part in bench.parts if name in known[part]]
            near = difflib.get_close_matches(name, names, cutoff=0.4) or names
            said.append(
                f"--only {name}: no such entry in {' '.join(options.parts)}"
                + (f", but in {', '.join(elsewhere)}" if elsewhere else "")
                + (f"; near it: {', '.join(near)}" if near else "")
            )
    return "; ".join(said)


def parser_of(bench: Bench, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=(*bench.parts, "report", "list"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing that would not end by then")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these entries alone")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--tiny", action="store_true", help="tiny models on CPUs; needs --results of its own")
    parser.add_argument("--results", type=Path, help=f"folder of {bench.name}.{{json,md}}, {OWN} without it")
    parser.add_argument("--work", type=Path, default=Path("runs") / bench.name, help="logs and run folders")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="jobs on a GPU at a time, of those that measure no speed"
    )
    parser.set_defaults(share_gpu=False, one_gpu=False)
    if bench.one_gpu:
        parser.add_argument(
            "--one-gpu",
            action="store_true",
            help=f"one GPU, larger models with fewer layers; results in {bench.one_gpu.name}.{{json,md}}",
        )
    if bench.may_share_gpu:
        parser.add_argument(
            "--share-gpu", action="store_true", help="all ranks of a job on one GPU: losses and memory, no speed"
        )
    return parser


def main(bench: Bench, description: str | None) -> None:
    parser = parser_of(bench, description)
    options = parser.parse_args()
    if options.one_gpu and bench.one_gpu:
        bench = bench.one_gpu
    if "list" in options.parts:
        # an entry that is in two parts comes once, as it is measured
        with for_a_pipe():
            for job in {job.key: job for part in bench.parts for job in bench.jobs_of(part)}.values():
                print(f"{job.key:32} {job.processes} GPU {job.estimate:3.0f} s {job.recipe} {' '.join(job.sets)}")
        return
    if options.at_once < 1:
        parser.error(f"--at-once {options.at_once}: at least 1")
    if math.isnan(options.minutes):
        parser.error("--minutes nan: a number of minutes")
    if problem := unknown_names(bench, options):
        parser.error(problem)
    if options.tiny and (options.results is None or options.results.resolve() == OWN.resolve()):
        parser.error(f"--tiny: its figures mean nothing and do not go to {OWN}: add --results with another folder")
    try:
        results = bench.results(options.results or OWN)
        jobs = chosen(bench, options)
        if jobs and results.entries and results.are_tiny != options.tiny:
            held = "of --tiny" if results.are_tiny else "without --tiny"
            parser.error(f"{results.path} holds results {held}: choose another --results, or move it away")
        with saying(lambda: kept(bench, results, options)):
            measure(bench, jobs, results, options)
    except (DamagedFileError, OtherMachineError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def kept(bench: Bench, results: Results, options: argparse.Namespace) -> str:
    """What a call that is cut off leaves, and how it goes on."""
    jobs = chosen(bench, options)
    done = sum(results.is_done(job, shared=options.share_gpu) for job in jobs)
    rest = "the same command goes on with the rest"
    if options.again:
        rest = "the same command without --again goes on with what never was measured"
    return f"{done} of {len(jobs)} entries are in {results.path}; {rest}."


def measure(bench: Bench, jobs: Sequence[Job], results: Results, options: argparse.Namespace) -> None:
    """What is to be done, and the pages; without jobs the pages alone."""
    if jobs:
        found, gpus = machine()
        used = 1 if options.one_gpu else min(bench.gpus, gpus)
        if used and "devices" in found:
            # whatever else is there: no entry uses more
            found["devices"] = f"{used} x " + found["devices"].partition(" x ")[2]
        results.measure_on({"tiny": options.tiny, **found}, mixed=bench.runs_on_cpu)
        todo = [job for job in jobs if options.again or not results.is_done(job, shared=options.share_gpu)]
        # stable; what was never tried first, what failed last
        todo.sort(key=lambda job: (job.key in results.entries, "failed" in results.entries.get(job.key, {})))
        if not options.tiny:
            places = gpus or int(bench.runs_on_cpu)
            left_out = [job.key for job in todo if gpus_of(job, options) > places]
            todo = [job for job in todo if gpus_of(job, options) <= places]
            if left_out:
                print(f"left out on {gpus} GPUs: {', '.join(left_out)}", flush=True)
            too_large = [job.key for job in todo if is_shared(job, options) and not job.fits_shared]
            todo = [job for job in todo if job.key not in too_large]
            if too_large:
                print(f"left out, their ranks do not fit one GPU together: {', '.join(too_large)}", flush=True)
        run(bench, todo, results, options, gpus)
    results.draw()
    results.write()
    print("\n".join(results.page()))
