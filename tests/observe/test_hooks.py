from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError, TrainingError
from paceline.observe.hooks import (
    BackwardEnd,
    CheckpointSaved,
    Hook,
    HookError,
    Hooks,
    RunEnd,
    RunStart,
    StepEnd,
    StepStart,
)
from paceline.report.console import make_console
from paceline.runtime.log import logging_to


class Recorder(Hook):
    def __init__(self, name: str, log: list[str], fail_at_end: bool = False) -> None:
        self.name, self.log, self.fail_at_end = name, log, fail_at_end

    def on_start(self, start: RunStart) -> None:
        self.log.append(f"{self.name} start")

    def on_step_end(self, end: StepEnd) -> None:
        self.log.append(f"{self.name} step {end.step}")

    def on_end(self, end: RunEnd) -> None:
        self.log.append(f"{self.name} end")
        if self.fail_at_end:
            raise OSError(self.name)


def test_called_in_order_and_silent_by_default(tmp_path: Path) -> None:
    log: list[str] = []
    hooks = Hooks([Recorder("a", log), Hook(), Recorder("b", log)])
    hooks.on_start(RunStart(run_name="r", run_dir=tmp_path, start_step=0, total_steps=1))
    hooks.on_step_start(StepStart(step=1))
    hooks.on_backward_end(BackwardEnd(step=1))
    hooks.on_step_end(StepEnd(step=1))
    hooks.on_checkpoint(CheckpointSaved(step=1, path=tmp_path))
    hooks.on_end(RunEnd(step=1))
    assert log == ["a start", "b start", "a step 1", "b step 1", "a end", "b end"]


def test_every_hook_hears_of_the_end() -> None:
    log: list[str] = []
    hooks = Hooks([Recorder("a", log, fail_at_end=True), Recorder("b", log)])
    with pytest.raises(HookError, match="on_end at step 3"):
        hooks.on_end(RunEnd(step=3))
    assert log == ["a end", "b end"]
    # the error that ended the run is not hidden behind one that follows from it
    hooks.on_end(RunEnd(step=3, error=ValueError()))
    assert log == ["a end", "b end"] * 2


class OwnHook(Hook):
    """As one of this package."""

    def on_end(self, end: RunEnd) -> None:
        raise RuntimeError("the device does not answer")


OwnHook.__module__ = "paceline.observe.anything"


def test_an_error_of_our_own_at_the_end_does_not_replace_the_one_that_ended_the_run(tmp_path: Path) -> None:
    log: list[str] = []
    hooks, console = Hooks([OwnHook(), Recorder("b", log)]), io.StringIO()
    with pytest.raises(RuntimeError, match="does not answer"):
        hooks.on_end(RunEnd(step=3))
    with logging_to(tmp_path, console=make_console(console)):
        hooks.on_end(RunEnd(step=3, error=ValueError()))
    assert log == ["b end"] * 2
    assert "OwnHook failed at the end of the run" in console.getvalue() and "Traceback" not in console.getvalue()
    assert "Traceback" in (tmp_path / "rank_0.log").read_text()


def test_a_misspelt_moment_is_refused() -> None:
    class Typo(Hook):
        def on_checkpont(self, saved: CheckpointSaved) -> None: ...

    with pytest.raises(ConfigError, match="on_checkpont") as refused:
        Hooks([Hook(), Typo()])
    assert "Did you mean on_checkpoint?" in refused.value.next_step


def deeper() -> None:
    json.loads("{")


class Broken(Hook):
    def on_step_end(self, end: StepEnd) -> None:
        deeper()

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        raise TrainingError("told well")

    def on_step_start(self, start: StepStart) -> None:
        raise KeyboardInterrupt


def test_an_exception_of_a_plugin_is_told_in_a_sentence(tmp_path: Path) -> None:
    hooks, console = Hooks([Broken()]), io.StringIO()
    with logging_to(tmp_path, console=make_console(console)), pytest.raises(HookError) as raised:
        hooks.on_step_end(StepEnd(step=7))
    assert raised.value.subject == "the hook Broken failed in on_step_end at step 7"
    line = deeper.__code__.co_firstlineno + 1
    assert raised.value.evidence.startswith("JSONDecodeError: Expecting property name")
    assert raised.value.evidence.endswith(f"({__file__}:{line})"), "the innermost line of the user's own file"
    assert isinstance(raised.value.__cause__, json.JSONDecodeError)
    assert "Traceback" in (tmp_path / "rank_0.log").read_text() and not console.getvalue()


def test_errors_for_the_user_and_interrupts_pass(tmp_path: Path) -> None:
    hooks = Hooks([Broken()])
    with pytest.raises(TrainingError, match="told well"):
        hooks.on_checkpoint(CheckpointSaved(step=1, path=tmp_path))
    with pytest.raises(KeyboardInterrupt):
        hooks.on_step_start(StepStart(step=1))
