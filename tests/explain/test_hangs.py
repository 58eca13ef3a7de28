"""A step that does not end: named before it times out, with every rank's place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.explain.hang_rules import group_stalls, hang_causes
from paceline.explain.rules import diagnose
from paceline.explain.run_folder import read_run
from paceline.observe.telemetry.record import FOLDER
from tests.distributed import run as run_ranks
from tests.training import runs

ANSWER = "answer.json"

HANG = f"""
import json, time
from pathlib import Path
import torch.distributed as dist
from paceline.observe.hooks import Hook


class Hang(Hook):
    def on_start(self, start):
        self.folder = start.run_dir

    def on_backward_end(self, end):
        if dist.get_rank() == 2 and end.step == 12:
            wait_for_the_others(self.folder)


def wait_for_the_others(folder):
    # does not come to the next collective until all have told where they are, and this one asks explain
    from paceline.explain.rules import diagnose
    from paceline.explain.run_folder import read_run
    until = time.monotonic() + 60
    while len(list((folder / "record").glob("stall-rank-*.json"))) < 4 and time.monotonic() < until:
        time.sleep(0.2)
    told = diagnose(read_run(folder))
    (folder / "{ANSWER}").write_text(json.dumps([finding.as_dict() for finding in told.findings]))


def register(registry):
    registry.hook(lambda config: Hang())
"""


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_while_the_others_wait(tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "data")
    plugin = tmp_path / "hang.py"
    plugin.write_text(HANG)
    folder = tmp_path / "run"
    more = (f"run.plugins={plugin}", "observe.stall_seconds=2", "checkpoint.interval=0", "observe.log_interval=50")
    run_ranks(runs.run, 4, runs.tiny(folder, data, *more, steps=16))
    told = json.loads((folder / ANSWER).read_text())
    first = told[0]
    assert first["id"] == "explain.hang" and first["severity"] == "error"
    assert "step 12" in first["subject"] and "rank 2 keeps the others from going on" in first["subject"]
    assert "wait_for_the_others" in first["evidence"] and "ranks 0, 1, 3" in first["evidence"]
    assert "in dp/" in first["evidence"] or "in phase sync" in first["evidence"] or "world" in first["evidence"]
    # afterwards it is a stall that is over
    after = next(finding for finding in diagnose(read_run(folder)).findings if finding.id == "explain.stall")
    assert after.severity == "note" and "rank 2" in after.subject


def stall(rank: int, **values: Any) -> dict[str, Any]:
    base = {"rank": rank, "step": 7, "seconds": 130.0, "phase": "backward", "in_collective": True, "calls": 40}
    return {
        **base,
        "collective": "dp/gradients/reduce_scatter",
        "collective_bytes": 2**20,
        "stack": ["a/b.py:1 f"],
        **values,
    }


def put(folder: Path, *stalls: dict[str, Any]) -> Path:
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for one in stalls:
        (folder / FOLDER / f"stall-rank-{one['rank']:05d}.json").write_text(json.dumps(one))
    return folder


def test_a_rank_that_skipped_a_collective_stands_at_another_number(tmp_path: Path) -> None:
    put(tmp_path, stall(0), stall(1), stall(2, calls=41, collective="tp/x/all_reduce"), stall(3))
    (cause,) = hang_causes(tmp_path, ranks=range(4), last_step=6, ended=False)
    assert cause.id == "explain.hang" and "rank 2 keeps" in cause.subject
    assert "reduce_scatter (1.00 MiB), number 40" in cause.evidence and "tp/x/all_reduce" in cause.evidence


def test_a_rank_that_says_nothing_is_suspected(tmp_path: Path) -> None:
    put(tmp_path, stall(0), stall(1), stall(3))
    (tmp_path / FOLDER / "stall-rank-00002.json").write_text('{"half')
    (cause,) = hang_causes(tmp_path, ranks=range(4), last_step=6, ended=False)
    assert "rank 2 said nothing" in cause.subject and "dead" in cause.next_step


def test_everybody_in_the_same_collective_is_a_transfer(tmp_path: Path) -> None:
    put(tmp_path, *(stall(rank) for rank in range(4)))
    (cause,) = hang_causes(tmp_path, ranks=range(4), last_step=6, ended=False)
    assert "same place" in cause.subject and "not determined" in cause.next_step


def test_a_stall_of_an_earlier_start_is_not_told(tmp_path: Path) -> None:
    put(tmp_path, stall(0, time=100.0), stall(1, time=100.0))
    put(tmp_path, stall(5, time=100.0, step=9))  # of a rank that the newest start does not have
    assert list(hang_causes(tmp_path, ranks=range(2), last_step=6, ended=False, since=200.0)) == []
    put(tmp_path, stall(0, time=300.0), stall(1, time=300.0))
    (cause,) = hang_causes(tmp_path, ranks=range(2), last_step=6, ended=False, since=200.0)
    assert cause.id == "explain.hang" and "step 7" in cause.subject
    (tmp_path / "events.jsonl").write_text(
        '{"event": "start", "step": 0, "time": 50.0}\n{"event": "resume", "step": 6, "time": 400.0}\n'
    )
    view = read_run(tmp_path)
    assert view.started == 400.0 and not {"explain.hang", "explain.stall"} & {one.id for one in diagnose(view).findings}


def test_thousands_of_ranks_are_grouped() -> None:
    stalls = [stall(rank) for rank in range(4000)]
    stalls[1234] |= {"in_collective": False, "stack": ["loader.py:9 read"]}
    waiting, others = group_stalls(stalls)
    assert len(waiting) == 3999 and others[0]["rank"] == 1234


@pytest.mark.parametrize(("end", "told"), [("error", "explain.hang"), ("end", "explain.stall"), ("", "explain.hang")])
def test_a_hang_that_ended_the_run_in_an_error_stays_one(end: str, told: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    events = [{"event": "start", "step": 0, "time": 1.0}, *([{"event": end, "step": 6, "time": 9.0}] if end else [])]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for rank in (0, 1):
        text = json.dumps(stall(rank, time=5.0))
        (tmp_path / FOLDER / f"stall-rank-{rank:05d}.json").write_text(text)
    assert told in [finding.id for finding in diagnose(read_run(tmp_path)).findings]


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"error": "RuntimeError", "message": "a peer left\nits stack"}, "RuntimeError: a peer left"),
        ({"error": "KeyError", "message": ""}, "KeyError"),
        ({}, "See logs/."),
    ],
)
def test_what_an_error_said_is_told(event: dict[str, str], told: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "error", "step": 6, "time": 9.0, **event}) + "\n")
    failed = next(one for one in diagnose(read_run(tmp_path)).findings if one.id == "explain.run-failed")
    assert failed.evidence == told
