"""A capture that fails costs itself and nothing else: no run, no half a trace, no later capture.

What a whole one holds is tested where it is read (tests/explain/test_capture.py).
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

from paceline.observe.capture import Capture
from paceline.observe.capture_request import TRACES, CaptureRequest, trace_path
from paceline.observe.hooks import RunEnd, RunStart, StepEnd, StepStart

Listener = Callable[[str], None] | None


class Run:
    """A run of a linear, with a capture of steps 2 and 4."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.listener = folder, nn.Linear(4, 4), None  # type: ignore[var-annotated]
        requests = [CaptureRequest(steps=1, at=at, ranks=()) for at in (2, 4)]
        self.capture = Capture({"linear": self.model}, torch.device("cpu"), listen=self._listen, requests=requests)
        self.capture.on_start(RunStart(run_name="r", run_dir=folder, start_step=0, total_steps=5))

    def _listen(self, listener: Listener) -> None:
        self.listener = listener  # type: ignore[assignment]

    def step(self, number: int) -> None:
        self.capture.on_step_start(StepStart(step=number))
        self.model(torch.ones(4))
        self.capture.on_step_end(StepEnd(step=number))

    def traces(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "record").glob("*") if path.name != "capture.json")


def whole(path: Path) -> bool:
    with gzip.open(path, "rt") as file:
        return bool(json.load(file)["traceEvents"])


def breaks(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, *, writes: str = "") -> None:
    """The first call of a profiler's method fails, perhaps after a part of a file."""
    real, failed = getattr(profile, method), []

    def broken(self: Any, *arguments: Any) -> Any:
        if failed:
            return real(self, *arguments)
        failed.append(True)
        if method == "stop":
            real(self)
        if writes:
            Path(arguments[0]).write_text(writes)
        raise error

    monkeypatch.setattr(profile, method, broken)


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("start", RuntimeError("profiler is already enabled"), "steps 2 to 2 does not begin: profiler is already"),
        ("stop", RuntimeError("CUPTI"), "steps 2 to 2 is lost: CUPTI"),
        ("export_chrome_trace", OSError(28, "No space left on device"), "steps 2 to 2 is lost: [Errno 28]"),
    ],
)
def test_a_failure_costs_the_capture_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    error: Exception,
    said: str,
) -> None:
    breaks(monkeypatch, method, error, writes="{" if method == "export_chrome_trace" else "")
    run = Run(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 6):
            run.step(number)
    assert [said in record.getMessage() for record in caplog.records] == [True], "told once"
    assert run.listener is None and not run.model._forward_hooks
    assert run.traces() == [trace_path(tmp_path, 0, 4).name], "no half of the first; the second is there"
    assert whole(trace_path(tmp_path, 0, 4))


def test_a_trace_has_its_name_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []
    real = profile.export_chrome_trace

    def slow(self: Any, path: str) -> Any:
        found = real(self, path)
        seen.append(list((tmp_path / "record").glob(TRACES)))
        return found

    monkeypatch.setattr(profile, "export_chrome_trace", slow)
    run = Run(tmp_path)
    run.step(2)
    assert seen == [[]] and whole(trace_path(tmp_path, 0, 2))


def test_a_run_that_ends_in_a_capture_keeps_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.capture.on_step_start(StepStart(step=2))
    run.model(torch.ones(4))
    run.capture.on_end(RunEnd(step=2, error=ValueError("elsewhere")))
    assert whole(trace_path(tmp_path, 0, 2)) and run.listener is None
