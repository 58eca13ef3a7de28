"""What `paceline train` says at its end."""

from __future__ import annotations

import json
from pathlib import Path

from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from paceline.report.console import make_console
from paceline.training.summary import Summary


def print_summary(folder: str | Path) -> None:
    """Prints `summary.json` of a run folder; nothing where there is none yet."""
    path = Path(folder) / "summary.json"
    if not path.is_file():
        return
    content = json.loads(path.read_text())
    samples = tuple(tuple(pair) for pair in content.pop("samples", ()))
    summary = Summary(**content, samples=samples)
    console = make_console()
    for prompt, continuation in summary.samples:
        text = Text.assemble((prompt, "bold"), continuation)
        console.print(Panel(text, title="sample (prompt in bold)", title_align="left"))
    grid = RichTable.grid(padding=(0, 2))
    for title, text_line in summary.lines():
        grid.add_row(Text(title, style="bold"), Text(text_line))
    grid.add_row(Text("next", style="bold"), Text(next_steps(summary)))
    console.print(grid)


def next_steps(summary: Summary) -> str:
    """What a user may want to do now."""
    folder = summary.run_dir
    if summary.stopped_by:
        return f"the same command goes on from step {summary.steps}"
    return f'paceline generate {folder} --prompt "..."   |   tensorboard --logdir {folder}/tensorboard'


if __name__ == "__main__":
    import sys

    print_summary(sys.argv[1])
