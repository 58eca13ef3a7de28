"""`paceline explain`: where does the step time go, and what would change it?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder; traces of one program; a log; or two of a kind to compare.", metavar="SOURCE..."
        ),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Two traces are before and after, not two ranks of one program.")
    ] = False,
    capture: Annotated[
        int,
        typer.Option(
            "--capture", metavar="N", min=0, help="Ask a running job for a capture of N steps, and explain it."
        ),
    ] = 0,
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="0,1", help="Ranks of the capture; `all` takes every one.")
    ] = "0",
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="NAME", help="The card behind a log, for its MFU: `H100 SXM`.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write one page that opens without a network.")
    ] = None,
) -> None:
    """Say where a step's time goes, which rank holds the others back, and what to change.

    A run folder is read while the run is at work, after it, or after a crash; nothing
    needs to be switched on. Traces are those of torch.profiler from any program, logs
    those of Megatron-LM, torchtitan and the Hugging Face Trainer.

      paceline explain runs/my
      paceline explain runs/my --capture 3
      paceline explain runs/before runs/after
      paceline explain trace_rank*.json.gz --html trace.html
      paceline explain megatron.log --gpu "H100 SXM"

    The exit code is 1 if there is an error among the findings, 2 for bad use, else 0.
    """
    import json

    from paceline.explain.sources import explain as answer
    from paceline.report.console import make_console, print_findings, print_table
    from paceline.report.finding import exit_code, tally

    if capture:
        sources = _capture(sources, capture, ranks)
    found = answer(sources, gpu=gpu, compare=compare)
    if html is not None:
        _write(html, found.page())
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2, default=str))
    else:
        console = make_console()
        console.print(found.title, style="bold")
        for table in found.tables:
            console.print()
            print_table(console, table)
        console.print()
        print_findings(console, found.findings)
        console.print(tally(found.findings))
    raise typer.Exit(exit_code(found.findings))


def _capture(sources: list[Path], steps: int, ranks: str) -> list[Path]:
    from paceline.cli.explain_capture import capture
    from paceline.errors import ConfigError

    if len(sources) != 1:
        raise ConfigError("--capture takes one run folder", next_step="Give the folder of a run that is at work.")
    try:
        chosen = () if ranks == "all" else tuple(int(rank) for rank in ranks.split(","))
    except ValueError as error:
        raise ConfigError(f"--ranks {ranks} is no list of ranks", next_step="For example: --ranks 0,1") from error
    return capture(sources[0], steps, chosen)


def _write(path: Path, text: str) -> None:
    from paceline.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written", evidence=f"{error.strerror}.", next_step="Give another path."
        ) from error
