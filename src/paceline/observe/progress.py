"""What does a person see while a run goes on? A live display on a terminal, a plain line a logged step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
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
        self._step = self._total = 0
        self._record: StepRecord | None = None
        self._evaluation: Mapping[str, float] = {}
        self._checkpoint = ""
        self._live: Live | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.percentage:.0f} %"),
            expand=True,
        )
        self._task: TaskID | None = None

    def on_start(self, start: RunStart) -> None:
        self._step, self._total = start.start_step, start.total_steps
        self._eta.start(start.start_step)
        for name, value in start.facts.items():
            self.console.print(Text.assemble((f"{name}: ", "bold"), str(value)), soft_wrap=True)
        if self.is_live:
            self._task = self._bar.add_task(start.run_name, total=start.total_steps, completed=start.start_step)
            # drawn by Live's own thread, a few times a second; a step only hands over what to draw
            self._live = Live(_Screen(self._render), console=self.console, refresh_per_second=4)
            self._live.start(refresh=True)

    def on_step_end(self, end: StepEnd) -> None:
        self._step = end.step
        self._eta.step_done(end.step)
        if end.record is not None:
            self._record = end.record
        if end.evaluation is not None:
            self._evaluation = end.evaluation
        if self._live is None:
            self._print_lines(end)
            return
        assert self._task is not None
        self._bar.update(self._task, completed=end.step)

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._checkpoint = f"step {saved.step}"
        if self._live is None:
            self.console.print(Text(f"checkpoint of step {saved.step}: {saved.path}"), soft_wrap=True)

    def on_end(self, end: RunEnd) -> None:
        if self._live is not None:
            # draws once more
            self._live.stop()
            self._live = None
        if end.reason:
            self.console.print(Text(f"stopped after step {end.step}: {end.reason}"), soft_wrap=True)

    def _print_lines(self, end: StepEnd) -> None:
        if end.record is not None:
            left = self._eta.left(self._total)
            self.console.print(Text(step_line(end.record, self._total, left)), soft_wrap=True)
        if end.evaluation is not None:
            values = "  ".join(f"{name} {text}" for name, text in evaluation_cells(end.evaluation).items())
            self.console.print(Text(f"evaluation at step {end.step}: {values}"), soft_wrap=True)

    def _render(self) -> RichTable:
        """The bar and the step are of now, the numbers of the newest logged step, which is named."""
        screen = RichTable.grid(expand=True)
        screen.add_row(self._bar)
        step, record = self._step, self._record
        heading = Text(f"step {step} of {self._total}")
        if step < self._total:
            left = self._eta.left(self._total)
            heading.append("   left ", style="dim").append("..." if left is None else units.duration(left))
        if record is None:
            screen.add_row(heading.append("   first steps ...", style="dim"))
            return screen
        if record.step != step:
            heading.append(f"   (numbers of step {record.step})", style="dim")
        screen.add_row(heading)
        cells = step_cells(record) | evaluation_cells(self._evaluation)
        if self._checkpoint:
            cells["checkpoint"] = self._checkpoint
        screen.add_row(_in_columns(cells, self.console.width))
        return screen


class _Screen:
    """Built whenever it is drawn, also when a log line moves it: bar and text are then of the same step."""

    def __init__(self, render: Callable[[], RichTable]) -> None:
        self._render = render

    def __rich__(self) -> RichTable:
        return self._render()


def _in_columns(cells: Mapping[str, str], width: int) -> RichTable:
    """As many cells a row, four at most, as stand side by side without a line break."""
    gap = 2
    texts = [Text.assemble((f"{name} ", "dim"), value) for name, value in cells.items()]
    widest = max(text.cell_len for text in texts)
    columns = min(max((width + gap) // (widest + gap), 1), 4)
    grid = RichTable.grid(padding=(0, gap))
    for _ in range(columns):
        grid.add_column(min_width=min(widest, width), no_wrap=True)
    for first in range(0, len(texts), columns):
        row = texts[first : first + columns]
        grid.add_row(*row, *([""] * (columns - len(row))))
    return grid


def step_cells(record: StepRecord) -> dict[str, str]:
    """The numbers of a step that a person watches, by name; unknown ones (FLOP/s, MFU) are left out."""
    cells = {
        "loss": "not finite" if record.loss is None else f"{record.loss:.4f}",
        "grad norm": "not finite" if record.grad_norm is None else f"{record.grad_norm:.3f}",
        "lr": f"{record.lr:.2e}",
        "tokens/s": units.count(record.tokens_per_second_per_gpu) + " per device",
    }
    for name in ("reward_accuracy", "reward_margin", "kl"):
        value = record.extra.get(name)
        if isinstance(value, float):
            cells[name.replace("_", " ")] = f"{value:.3f}"
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
    hidden = ("tokens", "pairs", "examples", "unigram_loss", "unigram_bits_per_byte")
    return {name: f"{value:.4g}" for name, value in values.items() if not name.endswith(hidden)}


def step_line(record: StepRecord, total_steps: int, seconds_left: float | None) -> str:
    """One line for logs and pipes. The time left stands there once it is known, and not at the end."""
    numbers = "  ".join(f"{name} {value}" for name, value in step_cells(record).items())
    line = f"step {record.step}/{total_steps}  {numbers}"
    if seconds_left is None or record.step >= total_steps:
        return line
    return f"{line}  left {units.duration(seconds_left)}"


class _Eta:
    """Time left, from the wall clock: evaluations and checkpoints will come again, so they count.

    The first step of a start is left out: it compiles, warms up and allocates. Unknown until there are a few steps and
    some seconds to judge by.
    """

    MIN_STEPS, MIN_SECONDS = 3, 10.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start(0)

    def start(self, step: int) -> None:
        now = self._clock()
        self._start_step, self._start = step, now
        # (step, time) in one object: the drawing thread reads it while the training thread sets it
        self._first: tuple[int, float] | None = None
        self._last = (step, now)

    def step_done(self, step: int) -> None:
        self._last = (step, self._clock())
        if self._first is None:
            self._first = self._last

    def left(self, total: int) -> float | None:
        """Seconds, as of the last step."""
        first, (step, now) = self._first, self._last
        known = step - self._start_step >= self.MIN_STEPS and now - self._start >= self.MIN_SECONDS
        if first is None or not known or step == first[0]:
            return None
        return (now - first[1]) / (step - first[0]) * max(total - step, 0)
