"""The command `paceline`: which verb?"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

VERBS = ("train", "plan", "doctor", "explain", "tune", "data", "convert", "generate", "eval", "bench")


def _print_version(asked: bool) -> None:
    if not asked:
        return
    from paceline.cli.version import version_lines

    typer.echo("\n".join(version_lines()))
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Versions and devices, then exit."),
    ] = False,
) -> None:
    """Train GPT and mixture-of-experts models at the speed the hardware allows.

    [bold]A first run[/bold], from a folder of your own text files:

      paceline data train-tokenizer texts/ --out tok.json --vocab-size 4096
      paceline data build texts/ --out my --tokenizer tok.json --valid-share 0.1
      paceline train recipes/demo.toml --set run.name=my \\
        --set data.train=my-train --set data.valid=my-valid
      paceline generate runs/my --prompt "Once upon a time"

    [bold]Will it fit, and how fast?[/bold] Predicted, without a GPU:

      paceline plan llama3_8b --gpus 8 --gpu H100-80

    A recipe is a TOML file; [bold]--set section.key=value[/bold] changes one field of it.
    `paceline train --print-schema` lists every field, with its type and meaning.
    """


def _register(verbs: tuple[str, ...]) -> None:
    # verbs are imported here, not at the top: `paceline data --help` need not wait for torch
    if "train" in verbs:
        from paceline.cli.train import train

        app.command("train")(train)
    if "plan" in verbs:
        from paceline.cli.plan import app as plan_app

        app.add_typer(plan_app, name="plan")
    if "doctor" in verbs:
        from paceline.cli.doctor import app as doctor_app

        app.add_typer(doctor_app, name="doctor")
    if "explain" in verbs:
        from paceline.cli.explain import explain

        app.command("explain")(explain)
    if "tune" in verbs:
        from paceline.cli.tune import tune

        app.command("tune")(tune)
    if "data" in verbs:
        from paceline.cli.data import app as data_app

        app.add_typer(data_app, name="data")
    if "convert" in verbs:
        from paceline.cli.convert import command as convert_command

        app.command("convert")(convert_command)
    if "generate" in verbs:
        from paceline.cli.generate import command

        app.command("generate")(command)
    if "eval" in verbs:
        from paceline.cli.evaluate import command as eval_command

        app.command("eval")(eval_command)
    if "bench" in verbs:
        from paceline.cli.bench import app as bench_app

        app.add_typer(bench_app, name="bench")


def main() -> None:
    """Runs the command line; errors meant for the user are printed without a stack trace."""
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:2] = ["--help"] if not sys.argv[2:] else []
        sys.argv += ["--help"] * ("--help" not in sys.argv)
    asked = next((argument for argument in sys.argv[1:] if argument in VERBS), None)
    _register((asked,) if asked else VERBS)
    try:
        app()
    except PacelineError as error:
        _report(error)
        sys.exit(error.exit_code)


def _report(error: PacelineError) -> None:
    from paceline.report.console import make_console, print_error
    from paceline.runtime.launcher import wait_for_turn

    wait_for_turn(error)

    print_error(make_console(stderr=True), error)
