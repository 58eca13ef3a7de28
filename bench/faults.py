"""Does `explain` find what is wrong, and is its price right? Faults of random size, put into runs from outside.

    python bench/faults.py --trials 40 --healthy 100 --out docs/measured/explain_faults.json
    python bench/faults.py --real --trials 5 --healthy 5

`explain` sees the run folder alone. A fault counts as found where its finding comes first; its price is held against
the truth, which is the same run without the fault. Without --real the runs are simulated ones on GPUs
(`synthetic_run.py`: the recorder's files, written by a simulation); with --real they are runs of two ranks on this
CPU, with a dataset that sleeps, a hook that delays a rank, pauses of the collector, and checkpoints that come often.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cut_off
import numpy as np
from fault_judge import above_note, judge, summarize
from fault_kinds import SHAPES, SIMULATED, FaultKind
from synthetic_run import Cluster, truth, write

from paceline.explain.rules import diagnose
from paceline.explain.run_folder import read_run
from paceline.report.console import make_console, print_table
from paceline.report.table import Table, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="of each fault")
    parser.add_argument("--healthy", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--real", action="store_true", help="runs on this CPU instead of simulated ones")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.real:
        from fault_runs import healthy_runs, real_trials

        results = list(real_trials(arguments.trials, arguments.seed, arguments.only))
        noisy = list(healthy_runs(arguments.healthy, arguments.seed))
    else:
        results = [
            simulate(kind, arguments.trials, arguments.seed) for kind in SIMULATED if arguments.only in kind.name
        ]
        noisy = list(simulated_healthy(arguments.healthy, arguments.seed))
    console = make_console()
    print_table(console, results_table(results, noisy))
    if arguments.out:
        above = [found for found in noisy if found]
        answer = {"faults": results, "healthy_runs": len(noisy), "healthy_runs_with_more_than_notes": above}
        arguments.out.write_text(json.dumps(answer, indent=2) + "\n")


def simulate(kind: FaultKind, trials: int, seed: int) -> dict[str, Any]:
    """Trials of one fault."""
    outcomes = []
    for trial in range(trials):
        chance = np.random.default_rng((seed, trial, *kind.name.encode()))
        number = int(chance.integers(2**31))
        healthy, faulty = Cluster(**kind.shape, seed=number), Cluster(**kind.shape, seed=number)
        kind.play(faulty, chance)
        with tempfile.TemporaryDirectory() as folder:
            found = diagnose(read_run(write(faulty, Path(folder) / "run")))
        # where work is moved, the healthy run is the same work spread evenly
        outcomes.append(judge(found, kind.expected, truth(faulty, healthy) if kind.priced else None))
    return summarize(kind.name, kind.expected, outcomes)


def simulated_healthy(runs: int, seed: int) -> Iterator[list[str]]:
    """Ids above a note, of each healthy run."""
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(**SHAPES[number % len(SHAPES)], seed=seed * 10_000 + number)
            yield above_note(diagnose(read_run(write(cluster, Path(folder) / "run"))))


def results_table(results: list[dict[str, Any]], noisy: list[list[str]]) -> Table:
    rows = [
        (
            one["fault"],
            str(one["trials"]),
            f"{one['found_first']:.0%}",
            "-" if one["median_error"] is None else f"{one['median_error']:.1%}",
            "-" if one["within_10_percent"] is None else f"{one['within_10_percent']:.0%}",
            ", ".join(one["instead"]),
        )
        for one in results
    ]
    above = sum(bool(found) for found in noisy)
    return table(
        ("fault", ">trials", ">named first", ">price error, median", ">within 10 %", "named instead"),
        rows,
        title="Faults",
        notes=(
            f"{len(noisy)} healthy runs, {above} with a finding above note"
            + (f": {sorted({name for found in noisy for name in found})}." if above else "."),
        ),
    )


if __name__ == "__main__":
    cut_off.run(main)
