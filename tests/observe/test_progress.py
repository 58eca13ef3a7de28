from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.observe.events import StepRecord
from paceline.observe.hooks import CheckpointSaved, RunEnd, RunStart, StepEnd
from paceline.observe.progress import ProgressHook, _Eta, step_line
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
    clock.now = 100.0  # the first step compiles
    hook.on_step_end(StepEnd(step=1))
    clock.now = 108.0
    hook.on_step_end(StepEnd(step=5, record=RECORD, evaluation={"valid/loss": 2.25, "valid/tokens": 64.0}))
    hook.on_checkpoint(CheckpointSaved(step=5, path=Path("runs/demo/checkpoints/5")))
    hook.on_end(RunEnd(step=5, reason="SIGTERM"))


def test_lines_without_a_terminal() -> None:
    shown, clock = io.StringIO(), Clock()
    play(ProgressHook(make_console(shown), clock=clock), clock)
    lines = shown.getvalue().splitlines()
    assert lines[0] == "layout: dp 2"
    assert lines[1] == (
        "step 5/20  loss 2.5000  grad norm 0.500  lr 1.00e-03  tokens/s 12.3K per device  compute 420 TFLOP/s  "
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
        "first steps ...",
        "stopped after step 5",
    ):
        assert text in shown.getvalue(), text


def screen(hook: ProgressHook, width: int) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=width).print(hook._render())
    return [line.rstrip() for line in shown.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "columns"), [(80, 3), (120, 4), (40, 1)])
def test_the_screen_agrees_with_itself_and_does_not_wrap(width: int, columns: int) -> None:
    clock = Clock()
    hook = ProgressHook(Console(file=io.StringIO(), force_terminal=True, width=width), clock=clock)
    hook.on_start(RunStart(run_name="demo", run_dir=Path("runs/demo"), start_step=0, total_steps=60))
    values = {"valid/loss": 2.25, "valid/bits_per_byte": 1.234567}
    for step in range(1, 17):
        clock.now += 2.0
        hook.on_step_end(StepEnd(step=step, record=RECORD if step == 5 else None, evaluation=values))
    bar, heading, *cells = screen(hook, width)
    hook.on_end(RunEnd(step=16))
    assert bar.startswith("demo") and bar.endswith("27 %")
    if width > 40:
        assert heading == "step 16 of 60   left 1 min 28 s   (numbers of step 5)"
        assert len(cells) == -(-10 // columns)
    text = "\n".join(cells)
    for cell in ("MFU 42.5 % of 989 TFLOP/s", "tokens/s 12.3K per device", "valid/bits_per_byte 1.235"):
        assert cell in text, cell


def test_time_left_waits_for_a_few_steps_and_leaves_out_the_first() -> None:
    clock = Clock()
    eta = _Eta(clock)
    eta.start(100)
    seen = []
    for step, now in ((101, 60.0), (102, 61.0), (103, 62.0), (110, 69.0)):
        clock.now = now
        eta.step_done(step)
        seen.append(eta.left(110))
    assert seen == [None, None, pytest.approx(7.0), 0.0]
    quick = _Eta(clock)
    for step in range(1, 6):
        clock.now += 1.0
        quick.step_done(step)
    assert quick.left(10) is None, "five seconds say little"


def test_no_time_left_at_the_end() -> None:
    assert "left" not in step_line(RECORD, 5, 0.0)
    assert "left" not in step_line(RECORD, 20, None)
    assert step_line(RECORD, 20, 30.0).endswith("  left 30.0 s")


def test_what_is_unknown_is_left_out() -> None:
    line = step_line(replace(RECORD, loss=None, mfu=None, tflops_per_gpu=None, skipped_steps=2), 20, None)
    assert "MFU" not in line and "TFLOP" not in line and "loss not finite" in line and "skipped steps 2" in line
