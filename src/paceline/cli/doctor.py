"""`paceline doctor`: will this run work on this machine, before it starts? And what does an NCCL log say?"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

CHECK = "check"


class _Verbs(TyperGroup):
    """What is no verb belongs to `check`: ``paceline doctor recipe.toml``, ``paceline doctor --topo FILE``."""

    default_verb = CHECK

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = [self.default_verb, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Verbs, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.callback()
def _doctor() -> None:
    """Look at a machine, its environment and a recipe before a run; say what is wrong and what to do.

    [bold]paceline doctor[/bold] looks at this machine (the same as `paceline doctor check`),
    [bold]paceline doctor RECIPE[/bold] at a recipe on it as well. Another machine is described
    by files. Exit code: 0 without errors, 1 with, 2 for bad use.
    All options: [bold]paceline doctor check --help[/bold].

      paceline doctor recipes/llama3_8b.toml
      paceline doctor recipes/llama3_8b.toml --topo topo.txt --env env.txt --gpus 16 --gpu H100-80
      nvidia-smi topo -m | paceline doctor --topo -
      paceline doctor recipes/llama3_8b.toml --measure
      paceline doctor nccl nccl.log
    """


Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Html = Annotated[str, typer.Option("--html", help="Write a page that opens offline to this file.")]


@app.command(CHECK)
def check(
    recipe: Annotated[str, typer.Argument(help="Recipe file (TOML) or preset; may be left out.")] = "",
    topo: Annotated[str, typer.Option("--topo", help="Text of `nvidia-smi topo -m`; - reads standard input.")] = "",
    smi: Annotated[str, typer.Option("--smi", help="Text of `nvidia-smi -q -x`.")] = "",
    env: Annotated[str, typer.Option("--env", help="NAME=VALUE lines, as `env` prints them.")] = "",
    lspci: Annotated[str, typer.Option("--lspci", help="Text of `sudo lspci -vvv`: is PCIe ACS on?")] = "",
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=2**20, help="GPUs in all.")] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="H100-80, A100-80 ..., or a file that describes one (TOML).")] = "",
    nodes_of: Annotated[
        int,
        typer.Option(
            "--nodes-of", min=0, max=1024, show_default=False, help="GPUs of a node; default: as seen, else 8."
        ),
    ] = 0,
    interconnect: Annotated[
        str, typer.Option("--interconnect", help="Between nodes: ib400, roce400, eth25 ..., or GB/s.")
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one field of the recipe. May be repeated."),
    ] = None,
    calibration: Annotated[
        str, typer.Option("--calibration", help="Measured rates to predict with; default: cluster.calibration.")
    ] = "",
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's ceilings: about a minute on GPUs.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Processes that measure; default: one for each GPU.")
    ] = None,
    out: Annotated[
        str, typer.Option("--out", "-o", help="Where --measure writes what `plan --calibration` reads; '' = nowhere.")
    ] = "calibration.toml",
    as_json: Json = False,
    html: Html = "",
) -> None:
    """This machine or another one, its environment and software, and a recipe on it (the verb may be left out).

    With --topo, --smi, --env or --lspci only these files are looked at: they speak of another machine.
    """
    from paceline.cli.doctor_check import Asked, examine
    from paceline.cli.doctor_show import show

    asked = Asked(
        recipe=recipe,
        topo=topo,
        smi=smi,
        env=env,
        lspci=lspci,
        gpus=gpus,
        gpu=gpu,
        nodes_of=nodes_of,
        interconnect=interconnect,
        overrides=tuple(overrides or ()),
        calibration=calibration,
        measure=measure,
        nproc=nproc,
        out=out,
    )
    found = examine(asked)
    # under a launcher the first process speaks for all
    raise typer.Exit(0 if found is None else show(found, "Doctor", as_json=as_json, html=html))


@app.command("ceilings", hidden=True)
def ceilings(
    recipe: Annotated[str, typer.Argument(help="Recipe whose dataset and run folder are measured.")] = "",
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    out: Annotated[str, typer.Option("--out", help="JSON of what was measured.")] = "measured.json",
) -> None:
    """Measure in this process of a launcher; `check --measure` starts these."""
    from paceline.cli.doctor_measure import write_measured
    from paceline.planner.request import load

    config = load(recipe, overrides or (), None)[0].config if recipe else None
    write_measured(config, out)


@app.command("nccl", no_args_is_help=True)
def nccl(
    logs: Annotated[
        list[str], typer.Argument(help="Files with NCCL's messages, of any ranks; - reads standard input.")
    ],
    gpu: Annotated[str, typer.Option("--gpu", help="The GPU's name, where an error's meaning depends on it.")] = "",
    as_json: Json = False,
    html: Html = "",
) -> None:
    """Read logs of NCCL_DEBUG=INFO: transport, rings, why not RDMA, who hangs.

    NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log; paceline doctor nccl nccl.log
    """
    from paceline.cli.doctor_nccl import read_logs
    from paceline.cli.doctor_show import show

    raise typer.Exit(show(read_logs(logs, gpu), "NCCL log", as_json=as_json, html=html))
