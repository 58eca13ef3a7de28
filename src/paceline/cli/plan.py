"""`paceline plan`: will it fit, how fast will it be, which layout is best and why? Arithmetic; torch is not loaded."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

LAYOUTS = "layouts"


class _Verbs(TyperGroup):
    """What is no verb is the recipe of `layouts`: ``paceline plan llama3_8b --gpus 64``."""

    default_verb = LAYOUTS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            self._refuse_mistyped(args[0])
            args = [self.default_verb, *args]
        return super().parse_args(ctx, args)

    def _refuse_mistyped(self, word: str) -> None:
        """`fitt` is nearer to a verb than to any recipe."""
        near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.75)
        if not near or Path(word).exists():
            return
        from paceline.config.presets import preset_names
        from paceline.errors import ConfigError

        if word not in preset_names():
            raise ConfigError(
                f"{word!r} is neither a verb of `paceline plan` nor a recipe or preset",
                evidence=f"Verbs are {', '.join(self.commands)}.",
                next_step=f"Did you mean paceline plan {near[0]}?",
            )


app = typer.Typer(cls=_Verbs, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def _plan() -> None:
    """Predict memory, step time and the best layout of a recipe, on any cluster.

    [bold]paceline plan RECIPE --gpus 64 --gpu H100-80[/bold] lists the best layouts, says why
    the first is first, what was rejected and what would help (the same as
    `paceline plan layouts RECIPE`). RECIPE is a file or the name of a preset.
    Nothing is started; torch is not needed. All options: [bold]paceline plan layouts --help[/bold].

      paceline plan llama2_7b --gpus 4 --gpu "RTX 4090"
      paceline plan recipes/llama3_8b.toml --gpus 64 --gpu H100-80 --write best.toml
      paceline plan recipes/llama3_8b.toml --gpus 8 --gpu H100-80 --explain-memory
      paceline plan fit --model llama3_70b --gpu H100-80 --tokens 1T --days 30
      paceline plan megatron pretrain.sh --gpus 64 --gpu H100-80
      paceline plan simulate recipes/llama3_8b.toml --gpus 64 --gpu H100-80 --mtbf 12
    """


Recipe = Annotated[str, typer.Argument(help="Recipe file (TOML), or the name of a preset such as llama3_8b.")]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, max=2**20, help=r"GPUs in all. Default: those of \[cluster].")
]
Gpu = Annotated[str, typer.Option("--gpu", help="H100-80, A100-80, 4090 ..., or a file that describes one (TOML).")]
NodesOf = Annotated[
    int, typer.Option("--nodes-of", min=0, max=1024, show_default=False, help="GPUs of a node; default 8.")
]
Interconnect = Annotated[
    str, typer.Option("--interconnect", help="Between nodes: ib400, ib200, roce400, efa400, eth100, eth25, or GB/s.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one field of the recipe. May be repeated."),
]
CalibrationFile = Annotated[
    str, typer.Option("--calibration", help="Measured rates (`plan calibrate`); default: cluster.calibration.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command(LAYOUTS)
def layouts(
    recipe: Recipe,
    gpus: Gpus = None,
    gpu: Gpu = "",
    nodes_of: NodesOf = 0,
    interconnect: Interconnect = "",
    objective: Annotated[
        str, typer.Option("--objective", help="throughput, memory (least on a card), or cost (fewer GPUs too).")
    ] = "throughput",
    top: Annotated[int, typer.Option("--top", min=1, help="How many layouts to show.")] = 10,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="AXIS=VALUE", help="Hold an axis: tp=4, pp=2, zero=3, recompute=none ..."),
    ] = None,
    overrides: Overrides = None,
    calibration: CalibrationFile = "",
    price: Annotated[float, typer.Option("--price", min=0, help="Dollars a GPU-hour, for the cost of the run.")] = 0.0,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of the run (1T, 300B); default: the recipe's.")] = "",
    write: Annotated[str, typer.Option("--write", help="Write the first layout as a recipe to this file.")] = "",
    as_json: Json = False,
    html: Annotated[str, typer.Option("--html", help="Write a page with pictures to this file.")] = "",
    explain_memory: Annotated[
        bool, typer.Option("--explain-memory", help="Bytes by kind of the recipe's own layout, stage by stage.")
    ] = False,
) -> None:
    """The best layouts of a recipe on a cluster, with reasons (the verb may be left out)."""
    from paceline.cli.plan_layouts import Wanted, explain_memory_of, show_layouts
    from paceline.errors import ConfigError
    from paceline.planner.request import make_request

    request = make_request(recipe, overrides or (), gpus, gpu, nodes_of, interconnect, calibration)
    if explain_memory:
        unused = [f"--{name}" for name, value in (("write", write), ("html", html)) if value]
        if unused:
            raise ConfigError(
                f"--explain-memory writes nothing, so {' and '.join(unused)} cannot go with it",
                evidence="It prints the bytes of one layout: the recipe's own.",
                next_step="Leave --explain-memory out to write the best layout; then `paceline plan` that file with "
                "--explain-memory.",
            )
        explain_memory_of(request, as_json=as_json)
        return
    show_layouts(
        request,
        Wanted(
            objective=objective,
            top=top,
            only=tuple(only or ()),
            price=price,
            tokens=tokens,
            write=write,
            as_json=as_json,
            html=html,
        ),
    )


@app.command(
    "megatron", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True}, no_args_is_help=True
)
def megatron(
    command: Annotated[list[str], typer.Argument(help="A launch script, or the flags (in quotes, or as they are).")],
    gpus: Gpus = None,
    gpu: Gpu = "",
    nodes_of: NodesOf = 0,
    interconnect: Interconnect = "",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable that the script reads.")
    ] = None,
    write: Annotated[str, typer.Option("--write", help="Write it as a Paceline recipe to this file.")] = "",
    calibration: CalibrationFile = "",
    as_json: Json = False,
) -> None:
    """Read a Megatron-LM command line: what it takes, reaches and leaves off.

    A script is read, not run: variables, arrays, `if` over strings and numbers,
    torchrun, srun and #SBATCH. Contradictions are refused with the value to set;
    unknown flags are listed; better flags are printed.

      paceline plan megatron pretrain.sh --gpus 64 --gpu H100-80
    """
    from paceline.cli.plan_megatron import show_megatron

    given = dict(text.partition("=")[::2] for text in env or ())
    show_megatron(
        command,
        gpus=gpus,
        gpu=gpu,
        nodes_of=nodes_of,
        interconnect=interconnect,
        given=given,
        calibration=calibration,
        write=write,
        as_json=as_json,
    )


@app.command("fit")
def fit(
    model: Annotated[str, typer.Option("--model", help="A preset such as llama3_70b, or a recipe file.")],
    gpu: Annotated[str, typer.Option("--gpu", help="H100-80, A100-80 ..., or a file that describes one (TOML).")],
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of the run: 1T, 300B.")],
    days: Annotated[float, typer.Option("--days", min=0.01, help="Days that it may take.")],
    batch_tokens: Annotated[str, typer.Option("--batch-tokens", help="Tokens of a step, for a preset.")] = "4M",
    nodes_of: NodesOf = 0,
    interconnect: Interconnect = "",
    reserve: Annotated[
        float, typer.Option("--reserve", help="Share of the time kept for failures, restarts and evaluation.")
    ] = 0.05,
    price: Annotated[float, typer.Option("--price", min=0, help="Dollars a GPU-hour.")] = 0.0,
    overrides: Overrides = None,
    calibration: CalibrationFile = "",
    as_json: Json = False,
) -> None:
    """How many GPUs does it take to train so many tokens in so many days?

    paceline plan fit --model llama3_70b --gpu H100-80 --tokens 1T --days 30
    """
    from paceline.cli.plan_fit import show_fit

    show_fit(
        model,
        gpu=gpu,
        tokens=tokens,
        days=days,
        batch_tokens=batch_tokens,
        overrides=overrides or (),
        calibration=calibration,
        nodes_of=nodes_of,
        interconnect=interconnect,
        reserve=reserve,
        price=price,
        as_json=as_json,
    )


@app.command("simulate")
def simulate(
    recipe: Recipe,
    gpus: Gpus = None,
    gpu: Gpu = "",
    nodes_of: NodesOf = 0,
    interconnect: Interconnect = "",
    slow_rank: Annotated[
        list[str] | None, typer.Option("--slow-rank", metavar="R:1.2", help="A rank that is 1.2 times slower.")
    ] = None,
    slow_link: Annotated[
        list[str] | None, typer.Option("--slow-link", metavar="R-R:2", help="A link that takes 2 times as long.")
    ] = None,
    mtbf: Annotated[float, typer.Option("--mtbf", min=0, help="Hours between failures of the whole job.")] = 0.0,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", min=0.001, help="How long saving holds training up.")
    ] = 30.0,
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-every", min=0, help="Minutes between checkpoints; default: the best.")
    ] = 0.0,
    restart_minutes: Annotated[
        float, typer.Option("--restart-minutes", min=0, help="From a failure to the next step.")
    ] = 10.0,
    trace: Annotated[str, typer.Option("--trace", help="Write a Perfetto trace (JSON) to this file.")] = "",
    overrides: Overrides = None,
    calibration: CalibrationFile = "",
    as_json: Json = False,
) -> None:
    """A step as a timeline of one pipeline's ranks; slow parts; failures.

    The layout is the recipe's own; of a preset, the best one.

      paceline plan simulate recipes/gpt3_175b.toml --gpu A100-80 --slow-rank 70:1.2
    """
    from paceline.cli.plan_simulate import Failures, show_simulation
    from paceline.planner.request import make_request

    show_simulation(
        make_request(recipe, overrides or (), gpus, gpu, nodes_of, interconnect, calibration),
        slow_ranks=slow_rank or (),
        slow_links=slow_link or (),
        failures=Failures(
            mtbf_hours=mtbf,
            checkpoint_seconds=checkpoint_seconds,
            restart_minutes=restart_minutes,
            interval_minutes=checkpoint_minutes,
        ),
        trace=trace,
        as_json=as_json,
    )


@app.command("validate", no_args_is_help=True)
def validate(
    runs: Annotated[list[str], typer.Argument(help="CSV files of measured runs, or run folders.")],
    calibration: Annotated[
        str, typer.Option("--calibration", "--calibrate", help="Measured rates to predict with (`plan calibrate`).")
    ] = "",
    framework: Annotated[
        str, typer.Option("--framework", help="Whose runs, where ids do not tell: paceline, megatron, torchtitan ...")
    ] = "",
    left_out: Annotated[
        bool, typer.Option("--left-out", help="Predict each row by a profile fitted without its model (seconds).")
    ] = False,
    worst: Annotated[int, typer.Option("--worst", min=0, help="How many of the worst rows to list.")] = 5,
    as_json: Json = False,
) -> None:
    """Predict measured runs, and say how far off the predictions are.

    paceline plan validate my_runs.csv --framework megatron
    """
    from paceline.cli.plan_validate import show_validation

    show_validation(runs, calibration=calibration, framework=framework, left_out=left_out, as_json=as_json, worst=worst)


@app.command("calibrate", no_args_is_help=True)
def calibrate(
    runs: Annotated[list[str], typer.Argument(help="Run folders, or CSV files of measured runs.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The file to write.")] = "calibration.toml",
    framework: Annotated[str, typer.Option("--framework", help="Whose runs a CSV file holds.")] = "paceline",
) -> None:
    """Learn this cluster's rates from measured runs, into a file for --calibration.

    paceline plan calibrate runs/first runs/second --out my_cluster.toml
    """
    from paceline.cli.plan_validate import show_calibration

    show_calibration(runs, out=out, framework=framework)
