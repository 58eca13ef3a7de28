"""Is `paceline plan` right about Paceline? Recipes predicted by bench/plan_predict.py, measured here.

    python bench/plan.py one                       # on one GPU; what is done is skipped
    python bench/plan.py one two --minutes 8.5     # starts nothing that would not end in time
    python bench/plan.py one --only 1b_2k --again  # one entry anew
    python bench/plan.py one --tiny --results DIR  # on CPUs, tiny: whether it runs at all
    python bench/plan.py list                      # every entry with its estimate
    python bench/plan.py report                    # the page alone, from what is there

Each entry is one `paceline bench train` of 3 + 10 steps in processes of its own. It is written to plan.json the moment
it ends, beside the prediction that was there before; one that ran out of memory is an entry too. Nothing is measured
that was not predicted. bench/plan.sh calls both; bench/runner.py runs the jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from found import bench_or_ran_out
from jobs import bench_command
from plan_jobs import PARTS, Job, jobs_of, tiny
from plan_results import FIGURES, PlanResults
from results import DamagedFileError
from runner import Bench, Found, main


class PredictedResults(PlanResults):
    """Those of an existing plan.json, which holds a prediction of every job.

    Raises:
        DamagedFileError: some job has none.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        missing = [job.key for part in PARTS for job in jobs_of(part) if job.key not in self.predictions]
        if missing:
            why = f"no prediction of {', '.join(missing[:3])}" + (" ..." if len(missing) > 3 else "")
            raise DamagedFileError(self.path, why, "Run `python bench/plan_predict.py` first (bench/plan.sh does)")


def command_of(job: Job, folder: Path) -> list[str]:
    return bench_command(job, folder, gemm_seconds=job.gemm_seconds)


def found_in(job: Job, folder: Path) -> Found:
    return bench_or_ran_out(folder, FIGURES), []


def said(job: Job, entry: dict[str, Any]) -> str:
    if "ran_out" in entry:
        return "ran out of memory"
    bench = entry["bench"]
    return f"{bench['step_seconds']:.3f} s a step, {bench['peak_memory_gib']:.1f} GiB"


BENCH = Bench(
    name="plan",
    parts=PARTS,
    jobs_of=jobs_of,
    tiny=tiny,
    results=PredictedResults,
    command_of=command_of,
    found_in=found_in,
    about=lambda job: {"recipe": job.recipe},
    said=said,
    side_by_side=lambda job: False,
)

if __name__ == "__main__":
    main(BENCH, __doc__)
