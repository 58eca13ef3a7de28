"""Every parallelism on two GPUs beside one: step time and memory, loss curves on real text, a long context.

    python bench/layouts.py speed                       # in the order of importance; what is done is skipped
    python bench/layouts.py curves long --minutes 9     # starts nothing that would not end in time
    python bench/layouts.py speed --only tp2 --again    # one entry anew
    python bench/layouts.py curves --share-gpu          # with one GPU: all ranks of a job on it
    python bench/layouts.py speed --tiny --results DIR  # on CPUs, tiny: whether it runs at all
    python bench/layouts.py list                        # every entry with its estimate
    python bench/layouts.py report                      # the page alone, from what is there

Each entry is one `paceline bench train` or `paceline train` in processes of its own. It is written to layouts.json the
moment it ends, failed ones with their last lines; those are tried again, after everything that was never tried.

With --share-gpu the ranks of a job share one GPU and talk over sockets: losses and the memory of each rank are those of
two GPUs, step times mean nothing and are not shown. A later call without it measures such entries anew.
bench/layouts.sh calls this; bench/runner.py runs the jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from found import bench_record, every_step, rounded
from layouts_jobs import PARTS, Job, jobs_of, tiny
from layouts_report import FIGURES, loss_text, page
from results import SHARED, Results
from runner import Bench, Found, main


class LayoutResults(Results):
    """layouts.json and layouts.md."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "layouts", {"bench": dict, "losses": list})

    def page(self) -> list[str]:
        return page(self.data)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data)


def command_of(job: Job, folder: Path) -> list[str]:
    sets = [f"--set={item}" for item in job.sets]
    if job.part == "curves":
        return ["-m", "paceline", "train", job.recipe, f"--nproc={job.processes}", *sets, f"--set=run.dir={folder}/run"]
    measured = [f"--warm-up={job.warm_up}", f"--steps={job.steps}", f"--out={folder}/line.jsonl"]
    return ["-m", "paceline", "bench", "train", job.recipe, f"--nproc={job.processes}", *measured, *sets]


def found_in(job: Job, folder: Path) -> Found:
    """What the run left behind.

    Raises:
        OSError, LookupError, TypeError, ValueError: it left nothing usable.
    """
    if job.part != "curves":
        return {"bench": bench_record(folder, FIGURES)}, []
    records = every_step(job, folder)
    found = {
        "losses": [rounded(record["loss"], 5) for record in records],
        "gradient_norms": [rounded(record["grad_norm"], 4) for record in records],
    }
    return found, []


def said(job: Job, entry: dict[str, Any]) -> str:
    if "bench" not in entry:
        return f"loss {loss_text(entry['losses'][0])} to {loss_text(entry['losses'][-1])}"
    bench = entry["bench"]
    memory = f"{bench['peak_memory_gib']:.1f} GiB, loss {loss_text(bench['loss'])}"
    if entry.get(SHARED):
        return f"{memory}, on a shared GPU"
    return f"{bench['step_seconds']:.3f} s a step, {bench['tflops_per_gpu']:.0f} TFLOP/s, {memory}"


BENCH = Bench(
    name="layouts",
    parts=PARTS,
    jobs_of=jobs_of,
    tiny=tiny,
    results=LayoutResults,
    command_of=command_of,
    found_in=found_in,
    about=lambda job: {"model": job.model, "compiled": job.compiled},
    said=said,
    side_by_side=lambda job: job.part == "curves",
    may_share_gpu=True,
)

if __name__ == "__main__":
    main(BENCH, __doc__)
