"""`paceline train`: run a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config.load import Recipe
    from paceline.runtime.launcher import ProcessInfo


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe file (TOML), or `recipe.toml` of an earlier run.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one field of the recipe. May be repeated."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Start so many processes here, one a GPU. Leave out under torchrun or Slurm."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the recipe, show what each rank would hold, start nothing.")
    ] = False,
    print_schema: Annotated[
        bool, typer.Option("--print-schema", help="Print the JSON schema of a recipe (for editors), then exit.")
    ] = False,
    print_recipe: Annotated[
        bool, typer.Option("--print-recipe", help="Print the resolved recipe as TOML, then exit.")
    ] = False,
    presets: Annotated[bool, typer.Option("--presets", help="List the model presets, then exit.")] = False,
    system: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SYSTEM",
            help="RECIPE is a run of llamafactory or ms-swift (its YAML, script, or command line in quotes): print the "
            "recipe that it becomes, then exit.",
        ),
    ] = "",
) -> None:
    """Train a model: `paceline train recipes/demo.toml --nproc 2`.

    The run folder (`run.dir`) gets the resolved recipe, metrics.jsonl,
    checkpoints and logs. The same command again goes on from the newest whole
    checkpoint, if there is one. SIGTERM and Ctrl-C save a checkpoint and end the
    run cleanly.

    [bold]One machine[/bold]: --nproc starts the processes. [bold]Several[/bold]: start this
    command with torchrun or srun, without --nproc; their environment decides.

      paceline train recipes/demo.toml
      paceline train recipes/llama3_8b.toml --nproc 8 --set train.steps=1000
      paceline train recipes/llama3_8b.toml --nproc 8 --dry-run
      torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500 \\
        -m paceline train recipes/llama3_8b.toml
      srun --ntasks-per-node=8 paceline train recipes/llama3_8b.toml

    [bold]From LLaMA-Factory or ms-swift[/bold]: the recipe is printed, nothing runs.

      paceline train --from llamafactory x.yaml --nproc 8 > x.toml
      paceline train --from ms-swift \\
        "swift sft --model Qwen3-8B --dataset my.jsonl"
    """
    if print_schema:
        from paceline.config.load import json_schema

        typer.echo(json_schema())
        return
    if presets:
        from paceline.cli.presets import print_presets

        print_presets()
        return
    if recipe is None:
        raise ConfigError(
            "`paceline train` needs a recipe",
            next_step="For example: paceline train recipes/demo.toml. `paceline train --help` says more.",
        )
    if system:
        from paceline.cli.train_from import print_recipe_of

        raise typer.Exit(print_recipe_of(system, recipe, overrides or (), nproc))
    from paceline.config.load import dump_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    if print_recipe:
        typer.echo(dump_recipe(loaded.config))
        return
    if dry_run:
        from paceline.cli.dry_run import dry_run as show

        show(loaded, nproc)
        return
    from paceline.cli.start import start

    changes = overrides or []
    arguments = ["train", recipe, *(f"--set={change}" for change in changes)]
    raise typer.Exit(start(arguments, recipe, changes, nproc, _run))


def _run(recipe: Recipe, info: ProcessInfo) -> int:
    from paceline.cli.summary import print_summary
    from paceline.interop import formats
    from paceline.training.run import run_recipe

    formats.register(recipe.registry)
    code = run_recipe(recipe, info)
    if info.is_main:
        print_summary(recipe.config.run.folder)
    return code
