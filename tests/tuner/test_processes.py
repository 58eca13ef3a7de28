"""A trial's processes end together: at its end, at its limit, and when the call that started it is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.config.load import resolve
from paceline.tuner import processes
from paceline.tuner.journal import Journal
from paceline.tuner.processes import Family, ProcessRunner, end_left_over

# a parent with a child in a session of its own, as torch's launcher starts ranks; neither minds SIGTERM
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                          "time.sleep(300)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(300)
"""


def stubborn() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_family_ends_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    process, child = stubborn()
    family = Family(process.pid)
    family.look()
    family.end()
    process.wait(timeout=5)
    assert is_gone(child)


def test_a_child_that_lost_its_parent_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    process, child = stubborn()
    family = Family(process.pid)
    family.look()
    process.kill()
    process.wait(timeout=5)
    family.end()
    assert is_gone(child)


def test_what_a_killed_call_left_is_ended_and_strangers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    process, child = stubborn()
    left = json.loads(json.dumps(Family(process.pid).known_again))
    assert not end_left_over({**left, "process_started": left["process_started"] - 100}), "another one with that id"
    assert process.poll() is None
    assert end_left_over(left)
    process.wait(timeout=5)
    assert is_gone(child)
    for nonsense in ({}, {"pid": "x", "process_started": 1}, {"pid": 2**30, "process_started": 1.0}, left):
        assert not end_left_over(nonsense)


def test_a_trial_that_lasts_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    journal = Journal(tmp_path)
    runner = ProcessRunner(journal=journal, ranks=1, warm_up=1, steps=1)
    monkeypatch.setattr(ProcessRunner, "_command", lambda self, folder, recipe: [sys.executable, "-c", STUBBORN])
    began = time.monotonic()
    ended = runner.run(3, resolve({}, []).config, limit_seconds=1.0)
    assert ended.failure == "timeout" and ended.measured is None and time.monotonic() - began < 8
    child = int((tmp_path / "trials" / "003" / "log").read_text())
    assert is_gone(child) and journal.left_over is None


def test_a_call_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    runner = ProcessRunner(journal=Journal(tmp_path), ranks=1, warm_up=1, steps=1)
    monkeypatch.setattr(ProcessRunner, "_command", lambda self, folder, recipe: [sys.executable, "-c", STUBBORN])

    def interrupt(self: Family) -> None:
        if (tmp_path / "trials" / "000" / "log").read_text():
            raise SystemExit(143)

    monkeypatch.setattr(Family, "look", interrupt)
    with pytest.raises(SystemExit):
        runner.run(0, resolve({}, []).config, limit_seconds=30.0)
    assert is_gone(int((tmp_path / "trials" / "000" / "log").read_text()))
