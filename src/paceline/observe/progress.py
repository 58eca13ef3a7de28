"""What does a person see while a run goes on? A live display on a terminal, a plain line a logged step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table as RichTable
from rich.text import Text

from paceline.observe.events import StepRecord
from paceline.observe.hooks import CheckpointSaved, Hook, RunEnd, RunStart, StepEnd
from paceline.report import units


class ProgressHook(Hook):
    """Shows how the run goes; rank 0 alone has one.

    Args:
        live: None decides by the console: live where it is a terminal.
    """

    def __init__(
        self, console: Console, *, live: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self.is_live = console.is_terminal if live is None else live
        self._clock = clock
        self._eta = _Eta(clock)
        self._total = 0
        self._record: StepRecord | None = None
        self._evaluation: Mapping[str, float] = {}
        self._checkpoint = ""
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.percentage:>3.0f} %")
        )
        self._task: TaskID | None = None

    def on_start(self, start: RunStart) -> None:
        self._total = start.total_steps
        self._eta.start(start.start_step)
        for name, value in start.facts.items():
            self.console.print(Text.assemble((f"{name}: ", "bold"), str(value)), soft_wrap=True)
        if self.is_live:
            self._task = self._bar.add_task(start.run_name, total=start.total_steps, completed=start.start_step)
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.start()

    def on_step_end(self, end: StepEnd) -> None:
        if end.record is not None:
            self._record = end.record
        if end.evaluation is not None:
            self._evaluation = end.evaluation
        if self._live is None:
            self._print_lines(end)
            return
        assert self._task is not None
        self._bar.update(self._task, completed=end.step)
        # drawing is left to Live's own thread; a step only hands over what to draw
        self._live.update(self._render())

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._checkpoint = f"step {saved.step}"
        if self._live is None:
            self.console.print(Text(f"checkpoint of step {saved.step}: {saved.path}"), soft_wrap=True)

    def on_end(self, end: RunEnd) -> None:
        if self._live is not None:
            self._live.update(self._render())
            self._live.stop()
            self._live = None
        if end.reason:
            self.console.print(Text(f"stopped after step {end.step}: {end.reason}"), soft_wrap=True)

    def _print_lines(self, end: StepEnd) -> None:
        if end.record is not None:
            left = self._eta.left(end.step, self._total)
            self.console.print(Text(step_line(end.record, self._total, left)), soft_wrap=True)
        if end.evaluation is not None:
            values = "  ".join(f"{name} {text}" for name, text in evaluation_cells(end.evaluation).items())
            self.console.print(Text(f"evaluation at step {end.step}: {values}"), soft_wrap=True)

    def _render(self) -> RichTable:
        screen = RichTable.grid(expand=True)
        screen.add_row(self._bar)
        if self._record is None:
            screen.add_row(Text("first steps ...", style="dim"))
            return screen
        numbers = RichTable.grid(padding=(0, 3))
        cells = step_cells(self._record)
        cells["left"] = _time_left(self._eta.left(self._record.step, self._total))
        cells |= evaluation_cells(self._evaluation)
        if self._checkpoint:
            cells["checkpoint"] = self._checkpoint
        texts = [Text.assemble((f"{name} ", "dim"), value) for name, value in cells.items()]
        for first in range(0, len(texts), 4):
            row = texts[first : first + 4]
            numbers.add_row(*row, *([""] * (4 - len(row))))
        screen.add_row(Text(f"step {self._record.step} of {self._total}"))
        screen.add_row(numbers)
        return screen


def step_cells(record: StepRecord) -> dict[str, str]:
    """The numbers of a step that a person watches, by name; unknown ones (FLOP/s, MFU) are left out."""
    cells = {
        "loss": "not finite" if record.loss is None else f"{record.loss:.4f}",
        "grad norm": "not finite" if record.grad_norm is None else f"{record.grad_norm:.3f}",
        "lr": f"{record.lr:.2e}",
        "speed": units.rate(record.tokens_per_second_per_gpu, "tokens") + " per device",
    }
    if record.tflops_per_gpu is not None:
        cells["compute"] = units.tflops(record.tflops_per_gpu)
    if record.mfu is not None:
        cells["MFU"] = f"{units.percent(record.mfu)} of {units.tflops(record.peak_tflops or 0)}"
    cells["memory"] = f"{record.memory_gib:.2f} GiB"
    if record.data_wait_seconds > 0.02 * record.step_seconds:
        cells["waiting for data"] = units.percent(record.data_wait_seconds / record.step_seconds)
    if record.skipped_steps:
        cells["skipped steps"] = str(record.skipped_steps)
    return cells


def evaluation_cells(values: Mapping[str, float]) -> dict[str, str]:
    """The results of an evaluation that a person watches; the number of tokens and the unigram model are left out."""
    hidden = ("tokens", "unigram_loss", "unigram_bits_per_byte")
    return {name: f"{value:.4g}" for name, value in values.items() if not name.endswith(hidden)}


def step_line(record: StepRecord, total_steps: int, seconds_left: float | None) -> str:
    """One line for logs and pipes."""
    numbers = "  ".join(f"{name} {value}" for name, value in step_cells(record).items())
    return f"step {record.step}/{total_steps}  {numbers}  left {_time_left(seconds_left)}"


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return units.duration(seconds) if seconds else "nothing"


class _Eta:
    """Time left, from the wall clock since the start: evaluations and checkpoints will come again, so they count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_step = 0
        self._start = clock()

    def start(self, step: int) -> None:
        self._start_step, self._start = step, self._clock()

    def left(self, step: int, total: int) -> float | None:
        done = step - self._start_step
        return None if done <= 0 else (self._clock() - self._start) / done * max(total - step, 0)
