"""What `paceline train` says at its end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from paceline.checkpoint.locate import step_folders
from paceline.report.console import make_console
from paceline.training.summary import Summary

MAX_WIDTH = 100
"""Columns of the summary on a terminal; longer lines of prose are hard to read."""


def print_summary(folder: str | Path) -> None:
    """Prints `summary.json` of a run folder; nothing where there is none yet."""
    path = Path(folder) / "summary.json"
    if not path.is_file():
        return
    content = json.loads(path.read_text())
    samples = tuple(tuple(pair) for pair in content.pop("samples", ()))
    summary = Summary(**content, samples=samples)
    rows = [*summary.lines(), *((("next", text),) if (text := next_steps(summary)) else ())]
    console = make_console()
    if console.is_terminal:
        _print_framed(console, summary, rows)
    else:
        _print_plain(console, summary, rows)


def _print_framed(console: Console, summary: Summary, rows: list[tuple[str, str]]) -> None:
    console.width = min(console.width, MAX_WIDTH)
    for prompt, continuation in summary.samples:
        text = Text.assemble((prompt, "bold"), continuation)
        console.print(Panel(text, title="sample (prompt in bold)", title_align="left"))
    grid = RichTable.grid(padding=(0, 2))
    for title, text_line in rows:
        grid.add_row(Text(title, style="bold"), Text(text_line))
    console.print(grid)


def _print_plain(console: Console, summary: Summary, rows: list[tuple[str, str]]) -> None:
    """For files and pipes: no frames, and no blanks at the ends of lines."""
    for prompt, continuation in summary.samples:
        console.print(Text(f"sample for the prompt {prompt!r}:\n{prompt}{continuation}\n"), soft_wrap=True)
    width = max(len(title) for title, _ in rows)
    for title, text_line in rows:
        console.print(Text(f"{title:<{width}}  {text_line}"), soft_wrap=True)


def next_steps(summary: Summary) -> str:
    """What a user may want to do now; the commands can be pasted into a shell. Empty if there is nothing to name."""
    if summary.stopped_by:
        saved = step_folders(Path(summary.run_dir) / "checkpoints")
        if not saved:
            return "the same command starts from the beginning: there is no checkpoint"
        return f"the same command goes on from step {saved[-1][0]}"
    commands = []
    if summary.is_score:
        commands.append(f"paceline convert {shlex.quote(summary.run_dir)} NEW-FOLDER --to hf")
    elif not summary.made_up_tokens:
        chat = " --chat" if summary.is_chat else ""
        commands.append(f'paceline generate {shlex.quote(summary.run_dir)}{chat} --prompt "..."')
    curves = Path(summary.run_dir) / "tensorboard"
    if curves.is_dir():
        commands.append(f"tensorboard --logdir {shlex.quote(str(curves))}")
    return "   |   ".join(commands)


if __name__ == "__main__":
    import sys

    print_summary(sys.argv[1])
