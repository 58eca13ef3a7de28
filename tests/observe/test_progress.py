from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from paceline.observe.events import StepRecord
from paceline.observe.hooks import CheckpointSaved, RunEnd, RunStart, StepEnd
from paceline.observe.progress import ProgressHook, step_line
from paceline.report.console import make_console

RECORD = StepRecord(
    step=5, loss=2.5, grad_norm=0.5, lr=1e-3, tokens=64, tokens_per_second_per_gpu=12345.0, tflops_per_gpu=420.0,
    mfu=0.425, step_seconds=0.1, data_wait_seconds=0.05, memory_gib=0.25, skipped_steps=0, flops_convention="causal",
    peak_tflops=989.0,
)  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(hook: ProgressHook, clock: Clock) -> None:
    hook.on_start(
        RunStart(run_name="demo", run_dir=Path("runs/demo"), start_step=0, total_steps=20, facts={"layout": "dp 2"})
    )
    hook.on_step_end(StepEnd(step=4))
    clock.now = 10.0
    hook.on_step_end(StepEnd(step=5, record=RECORD, evaluation={"valid/loss": 2.25, "valid/tokens": 64.0}))
    hook.on_checkpoint(CheckpointSaved(step=5, path=Path("runs/demo/checkpoints/5")))
    hook.on_end(RunEnd(step=5, reason="SIGTERM"))


def test_lines_without_a_terminal() -> None:
    shown, clock = io.StringIO(), Clock()
    play(ProgressHook(make_console(shown), clock=clock), clock)
    lines = shown.getvalue().splitlines()
    assert lines[0] == "layout: dp 2"
    assert lines[1] == (
        "step 5/20  loss 2.5000  grad norm 0.500  lr 1.00e-03  speed 12.3K tokens/s per device  compute 420 TFLOP/s  "
        "MFU 42.5 % of 989 TFLOP/s  memory 0.25 GiB  waiting for data 50.0 %  left 30.0 s"
    )
    assert lines[2:] == [
        "evaluation at step 5: valid/loss 2.25",
        "checkpoint of step 5: runs/demo/checkpoints/5",
        "stopped after step 5: SIGTERM",
    ]


def test_live_on_a_terminal() -> None:
    shown, clock = io.StringIO(), Clock()
    console = Console(file=shown, force_terminal=True, width=120, color_system=None)
    hook = ProgressHook(console, clock=clock)
    assert hook.is_live
    play(hook, clock)
    for text in (
        "step 5 of 20",
        "loss 2.5000",
        "MFU 42.5 %",
        "valid/loss 2.25",
        "left 30.0 s",
        "stopped after step 5",
    ):
        assert text in shown.getvalue(), text


def test_what_is_unknown_is_left_out() -> None:
    line = step_line(replace(RECORD, loss=None, mfu=None, tflops_per_gpu=None, skipped_steps=2), 20, None)
    assert "MFU" not in line and "TFLOP" not in line and "loss not finite" in line and "skipped steps 2" in line
