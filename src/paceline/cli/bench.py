"""`paceline bench`: how fast is it, comparably?"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.train import BenchRecord
    from paceline.config.load import Recipe
    from paceline.runtime.launcher import ProcessInfo


class _Verbs(TyperGroup):
    """Knows that a recipe in the place of a verb most likely misses its `train`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0].endswith(".toml"):
            raise ConfigError(
                f"`paceline bench` has no verb {args[0]}",
                next_step=f"To measure a recipe: paceline bench train {shlex.join(args)}",
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Verbs, no_args_is_help=True, help="Measure speed and memory, beside what this device sustains.")


@app.callback()
def _root() -> None:
    """Measure speed and memory, beside what this device sustains."""


@app.command("train")
def bench_train(
    recipe: Annotated[str, typer.Argument(help="Recipe file (TOML).")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are measured.")] = 20,
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Steps before, not measured.")] = 5,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one field of the recipe. May be repeated."),
    ] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Start so many processes here.")] = None,
    gemm_seconds: Annotated[
        float | None, typer.Option("--gemm-seconds", min=0.01, help="How long the matrix product is measured.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Append the JSON line to this file too.")] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Keep the run folder there, for `paceline explain`.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON line alone. In a file or a pipe it is always printed.")
    ] = False,
) -> None:
    """Train a recipe on synthetic data and report the median step.

    Runs the loop of `paceline train` itself, with its metrics, then measures
    what a large matrix product sustains on the same device. Prints a table
    (stderr) and, in a pipe or with --json, one JSON line (stdout).

      paceline bench train recipes/llama3_1b.toml --steps 20
      paceline bench train recipes/llama3_8b.toml --nproc 2 --out results.jsonl
    """
    from paceline.cli.start import start

    changes = overrides or []
    arguments = ["bench", "train", recipe, f"--steps={steps}", f"--warm-up={warm_up}"]
    arguments += [f"--set={change}" for change in changes]
    arguments += [f"--gemm-seconds={gemm_seconds}"] if gemm_seconds else []
    arguments += [f"--out={out}"] if out else []
    arguments += [f"--keep={keep}"] if keep else []
    arguments += ["--json"] if as_json else []

    def body(loaded: Recipe, info: ProcessInfo) -> int:
        from paceline.bench.train import bench_train as measure

        def tell(text: str) -> None:
            if info.is_main:
                typer.echo(text, err=True)

        record = measure(loaded, info, steps=steps, warm_up=warm_up, gemm_seconds=gemm_seconds, keep=keep, tell=tell)
        if record is not None:
            _print(record, recipe, out, as_json)
        return 0

    raise typer.Exit(start(arguments, recipe, changes, nproc, body))


def _print(record: BenchRecord, recipe: str, out: Path | None, as_json: bool) -> None:
    from paceline.bench.train import as_line
    from paceline.report.console import make_console, print_table
    from paceline.report.table import Column, Table

    line = json.dumps(as_line(record))
    if not as_json:
        print_table(make_console(stderr=True), Table(columns=(Column(name=""),) * 2, rows=_rows(record, recipe)))
    # programs read the line; to a person it is four kilobytes of noise
    if as_json or not sys.stdout.isatty():
        typer.echo(line)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _rows(record: BenchRecord, recipe: str) -> tuple[tuple[str, str], ...]:
    from paceline.training.start_up import phases_line

    rows = [
        ("recipe", recipe),
        ("devices", record.devices),
        (
            "step",
            f"{record.step_seconds:.4f} s median of {record.steps} "
            f"({record.step_seconds_min:.4f} ... {record.step_seconds_max:.4f})",
        ),
        ("throughput", f"{record.tokens_per_second_per_gpu:,.0f} tokens/s per device"),
        ("model FLOP/s", f"{record.tflops_per_gpu:.4g} TFLOP/s per device ({record.flops_convention})"),
        (
            "sustained GEMM",
            f"{record.sustained_gemm_tflops:.4g} TFLOP/s in {record.gemm_dtype}; "
            f"the step reaches {record.fraction_of_gemm:.1%} of it",
        ),
        ("peak memory", f"{record.peak_memory_gib:.2f} GiB"),
    ]
    if record.mfu is not None:
        rows.append(("MFU", f"{record.mfu:.1%} of {record.peak_tflops:g} TFLOP/s"))
    if record.tokens_per_joule is not None:
        rows.append(("energy", f"{record.tokens_per_joule:.3g} tokens a joule of the devices"))
    rows.append(("to the first step", phases_line(record.start_up_seconds)))
    return tuple(rows)
