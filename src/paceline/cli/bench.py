"""`paceline bench`: how fast is it, comparably?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.bench.train import BenchRecord
    from paceline.config.load import Recipe
    from paceline.runtime.launcher import ProcessInfo

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory, beside what this device sustains.")


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
    out: Annotated[Path | None, typer.Option("--out", help="Append the JSON line to this file too.")] = None,
) -> None:
    """Train a recipe on synthetic data and report the median step.

    Runs the loop of `paceline train` itself, with its metrics, then measures
    what a large matrix product sustains on the same device. Prints a table
    (stderr) and one JSON line (stdout).

      paceline bench train recipes/llama3_1b.toml --steps 20
      paceline bench train recipes/llama3_8b.toml --nproc 2 --out results.jsonl
    """
    from paceline.cli.start import start

    changes = overrides or []
    arguments = ["bench", "train", recipe, f"--steps={steps}", f"--warm-up={warm_up}"]
    arguments += [f"--set={change}" for change in changes]
    arguments += [f"--out={out}"] if out else []

    def body(loaded: Recipe, info: ProcessInfo) -> int:
        from paceline.bench.train import bench_train as measure

        record = measure(loaded, info, steps=steps, warm_up=warm_up)
        if record is not None:
            _print(record, recipe, out)
        return 0

    raise typer.Exit(start(arguments, recipe, changes, nproc, body))


def _print(record: BenchRecord, recipe: str, out: Path | None) -> None:
    from paceline.bench.train import as_line
    from paceline.report.console import make_console, print_table
    from paceline.report.table import Column, Table

    line = json.dumps(as_line(record))
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
            f"{record.sustained_gemm_tflops:.4g} TFLOP/s; the step reaches {record.fraction_of_gemm:.1%} of it",
        ),
        ("peak memory", f"{record.peak_memory_gib:.2f} GiB"),
    ]
    if record.mfu is not None:
        rows.append(("MFU", f"{record.mfu:.1%} of {record.peak_tflops:g} TFLOP/s"))
    console = make_console(stderr=True)
    print_table(console, Table(columns=(Column(name=""), Column(name="")), rows=tuple(rows)))
    typer.echo(line)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
