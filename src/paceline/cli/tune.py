"""`paceline tune`: short trials until the recipe is as fast as this machine lets it be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.tuner.ask import Ask


def tune(
    recipe: Annotated[str, typer.Argument(help="Recipe file (TOML).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one field of the recipe. May be repeated."),
    ] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes of each trial, one a GPU.")] = 1,
    budget: Annotated[
        str, typer.Option("--budget", help="Time for trials, in all calls together: 20m, 1h30m.")
    ] = "20m",
    objective: Annotated[
        str, typer.Option("--objective", help="tokens: most tokens/s. memory: least peak memory at --speed.")
    ] = "tokens",
    speed: Annotated[
        float, typer.Option("--speed", min=0.01, max=10.0, help="With memory: share of the recipe's tokens/s to keep.")
    ] = 0.9,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            help="precision: also changes that alter numerics (fp8, bf16 sums, ...). batch: also more sequences a "
            "step. May be repeated.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="SECTION.KEY=A,B", help="Only these settings, to these values. May be repeated."
        ),
    ] = None,
    hold: Annotated[
        list[str] | None, typer.Option("--hold", metavar="SECTION.KEY", help="Never change this one. May be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the trials; default runs/tune-NAME.")
    ] = None,
    pause_after: Annotated[
        str, typer.Option("--pause-after", metavar="TIME", help="Start no trial that would end later in this call.")
    ] = "",
    trials: Annotated[int, typer.Option("--trials", min=1, help="Most trials, in all calls together.")] = 200,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="Measured steps of a trial; 0 = 8, fewer where steps are long.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write one page that opens without a network.")
    ] = None,
) -> None:
    """Make a recipe faster by short trials on this machine; write the best one.

    Measures the recipe as it is, then changes of settings that `plan` and
    `explain` expect to help: kernels, compilation, recomputation, layout,
    micro-batch. Model, data, sequence length and the optimizer's mathematics
    stay as they are. What alters numerics is tried with [bold]--allow precision[/bold]
    alone, more sequences a step with [bold]--allow batch[/bold]. No gain is told that was not measured, or that
    is within noise.

      paceline tune recipes/llama3_8b.toml --nproc 2
      paceline tune recipes/llama3_8b.toml --nproc 2 --allow precision --allow batch
      paceline tune recipes/llama3_1b.toml --objective memory
      paceline tune recipes/tiny.toml --vary train.micro_batch_size=1,2,4

    Each trial is written down as it ends: the same command goes on where it was
    cut off. DIR gets best.toml, the trials with their logs, and a calibration
    for `plan`.
    """
    from paceline.errors import ConfigError
    from paceline.tuner.ask import make_ask

    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(
            f"--html {html}: there is no folder {html.parent}", next_step="Make it, or give another path."
        )
    ask = make_ask(
        recipe,
        overrides or (),
        ranks=nproc,
        budget=budget,
        objective=objective,
        speed=speed,
        allow=allow or (),
        vary=vary or (),
        hold=hold or (),
        out=out,
        pause_after=pause_after,
        trials=trials,
        steps=steps,
    )
    raise typer.Exit(_run(ask, as_json=as_json, html=html))


def _run(ask: Ask, *, as_json: bool, html: Path | None) -> int:
    import json

    from paceline.report.console import make_console, print_findings, print_table
    from paceline.report.finding import exit_code
    from paceline.runtime.compile_cache import keep_compiled
    from paceline.tuner import page, show
    from paceline.tuner.run import ending_on_signals, run_ask

    keep_compiled()
    told = make_console(stderr=True)
    with ending_on_signals(lambda: told.print("cut off; the same command goes on after the last whole trial")):
        answer = run_ask(ask, tell=lambda text: told.print(text, markup=False, soft_wrap=True))
    if html is not None:
        _write(html, page.page(answer.result, answer.space, answer.findings, f"Tuning of {ask.source}"))
    if as_json:
        typer.echo(json.dumps(answer.data, indent=2, default=str))
        return exit_code(answer.findings)
    console = make_console()
    for table in show.tables(answer.result, answer.space):
        print_table(console, table)
        console.print()
    print_findings(console, answer.findings)
    return exit_code(answer.findings)


def _write(path: Path, text: str) -> None:
    from paceline.errors import ConfigError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written", evidence=f"{error.strerror}.", next_step="Give another path."
        ) from error
