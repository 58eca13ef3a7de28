"""Faults put into real runs of two ranks from outside; `explain` sees the run folder alone.

`bench/faults.py --real` runs many of random size. Here each has one size, well above what other programs on a shared
machine do to a run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.explain.rules import diagnose
from paceline.explain.run_folder import read_run
from tests.distributed import run as run_ranks
from tests.training import runs

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from fault_judge import judge
from fault_runs import REAL, RealFault, hogs, prepare, true_share

FAULTS = {fault.name: replace(fault, ranks=2) for fault in REAL}
SMALL = ("model.num_layers=3", "model.vocab_size=128", "train.steps=10")
"""Ten short steps show each as well as the bench's longer ones do, in about half of the time."""
# large enough to stand out in a few steps
often = (*FAULTS["frequent checkpoints"].overrides, "checkpoint.interval=1", "checkpoint.async_save=false")
FAULTS["frequent checkpoints"] = replace(FAULTS["frequent checkpoints"], overrides=often)
SIZE = {
    "slow loader": {"seconds": 0.1, "share": 1.0},
    "delayed rank": {"seconds": 0.3, "share": 1.0},
    "garbage collection": {"seconds": 0.6, "share": 0.5},
    "frequent checkpoints": {"seconds": 0.0, "share": 0.0},
    "CPU hog": {"seconds": 0.0, "share": 0.0},
}


BUSY = "explain.cpu-contention"
"""True of any run on a machine where other programs are at work, as where tests run side by side."""
PRICE = {"delayed rank": 0.25}
"""Error of a price, where it is more than 0.1: what other programs do to the peers hides a part of a delay."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", [FAULTS[name] for name in SIZE], ids=lambda fault: fault.name)
def test_a_real_fault_comes_first_and_has_its_price(fault: RealFault, tmp_path: Path) -> None:
    overrides = prepare(tmp_path, fault, SIZE[fault.name], seed=1)
    with hogs(fault.hogs):
        run_ranks(runs.run, fault.ranks, [*overrides, *SMALL])
    found = diagnose(read_run(tmp_path / "run"))
    told = [(one.id, one.gain) for one in found.findings if one.id != BUSY or fault.expected == BUSY]
    assert told and told[0][0] == fault.expected, told
    outcome = judge(found, fault.expected, true_share(found.view, fault, SIZE[fault.name], tmp_path))
    assert outcome["error"] is None or outcome["error"] < PRICE.get(fault.name, 0.1), outcome
