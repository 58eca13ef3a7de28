"""`paceline plan megatron`: what will a Megatron-LM command line take and reach, and what do its flags leave off?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.plan_outputs import refuse_unwritable, write_output
from paceline.config.check import refuse_errors
from paceline.config.load import dump_recipe
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload
from paceline.errors import ConfigError
from paceline.planner.calibration import calibration_note
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.megatron import MegatronRun, read_megatron
from paceline.planner.megatron_advice import advice
from paceline.planner.megatron_better import Better, best_layout, same_layout
from paceline.planner.megatron_conflicts import conflicts
from paceline.planner.megatron_flags import PASSIVE
from paceline.planner.megatron_ramp_up import FLAG as RAMP_UP
from paceline.planner.megatron_training import left_out
from paceline.planner.request import calibrated
from paceline.report import units
from paceline.report.console import make_console, print_findings, print_table
from paceline.report.finding import Finding
from paceline.report.table import Table, table


def command_text(words: Sequence[str]) -> str:
    """A script's text, or the words as one line.

    Raises:
        ConfigError: the file cannot be read.
    """
    if len(words) != 1:
        return shlex.join(words)
    (word,) = words
    if word.startswith("-") or any(char.isspace() for char in word):
        return word
    try:
        return Path(word).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"there is no launch script {word}",
            evidence=str(error),
            next_step="Give a file, or the flags in quotes: paceline plan megatron '--num-layers 32 ...'",
        ) from error


def show_megatron(
    words: Sequence[str],
    *,
    gpus: int | None,
    gpu: str,
    nodes_of: int,
    interconnect: str,
    given: Mapping[str, str],
    calibration: str,
    write: str,
    as_json: bool,
) -> None:
    """Reads, judges, predicts, prints.

    Raises:
        ConfigError: the flags contradict each other, the sizes or the ranks; all that was found is printed before.
    """
    refuse_unwritable("--write", write, new=True)
    text = command_text(words)
    run = read_megatron(text, gpus=gpus, gpus_per_node=nodes_of or None, given=given)
    cluster, network = make_cluster(
        find_gpu(gpu or "H100 SXM"), run.gpus, gpus_per_node=run.gpus_per_node, interconnect=interconnect
    )
    console = make_console()
    assumed = [] if gpu else ["The GPU is assumed: --gpu says otherwise."]
    assumed += [calibration_note(calibration, "megatron")] if calibration else []
    found = conflicts(run)
    if any(finding.severity == "error" for finding in found):
        if as_json:
            typer.echo(json.dumps({"findings": [finding.as_dict() for finding in found]}, indent=1))
        else:
            print_table(console, _read_table(run, cluster, network, assumed))
            console.print()
            # the errors themselves are told by what is raised
            if others := [finding for finding in found if finding.severity != "error"]:
                print_findings(console, others)
                console.print()
        refuse_errors(found)
    profile = calibrated("megatron", calibration)
    found = [*found, *advice(run, cluster, profile)]
    estimate = predict(run.work, cluster, profile)
    same, best = same_layout(run, cluster, profile), best_layout(run, cluster, profile)
    if as_json:
        typer.echo(json.dumps(_as_dict(run, estimate, found, same, best), indent=1))
    else:
        _print(console, _read_table(run, cluster, network, assumed), cluster, run, estimate, found, same, best)
    if write:
        write_output(write, dump_recipe(_as_recipe(run, cluster, write)))
        if not as_json:
            typer.echo(f"\nwritten: {write}, the recipe as it is")
            if lost := left_out(run.flags):
                typer.echo(f"Not in it, a recipe has nothing for them: {', '.join(lost)}.")


def _as_recipe(run: MegatronRun, cluster: Cluster, path: str) -> RunConfig:
    """With a name of its own, so that two scripts do not share a run folder, and the machines it was read for."""
    nodes, config = max(1, run.gpus // run.gpus_per_node), run.config
    machines = config.cluster.model_copy(update={"nodes": nodes, "gpu": cluster.gpu.name})
    named = config.run.model_copy(update={"name": Path(path).stem})
    return config.model_copy(update={"run": named, "cluster": machines})


def _print(
    console: Console,
    read: Table,
    cluster: Cluster,
    run: MegatronRun,
    estimate: StepEstimate,
    found: Sequence[Finding],
    same: Better,
    best: Better | None,
) -> None:
    print_table(console, read)
    console.print()
    rows = [("as it is", run.work, estimate), ("the same, better flags", same.work, same.estimate)]
    rows += [("best layout", best.work, best.estimate)] if best else []
    print_table(console, _predicted(rows, cluster))
    if found:
        console.print()
        print_findings(console, found)
    better = best or same
    console.print()
    if not better.changes:
        console.print(Text("No better flags were found."))
        return
    ramp_up = any(flag == f"--{RAMP_UP}" for flag, _, _ in better.changes)
    note = "Each batch of the ramp-up must be a multiple of micro-batch x data parallel (interleaved: x pp)."
    notes = (note,) if ramp_up else ()
    print_table(console, table(("flag", "before", "after"), better.changes, title="What changes", notes=notes))
    console.print()
    title = "Better flags" + ("" if best else " (no other layout that fits was found)")
    console.print(Text(title, style="bold"))
    for name, value in better.environment.items():
        console.print(Text(f"export {name}={value}"), soft_wrap=True)
    console.print(Text(better.command()), soft_wrap=True)


def _read_table(run: MegatronRun, cluster: Cluster, network: str, assumed: Sequence[str]) -> Table:
    layout, model = run.layout, run.config.model
    count = count_parameters(model)
    active = f", {units.count(count.active)} active" if model.is_moe else ""
    degrees = [f"tp {layout.tp}", f"pp {layout.pp}", f"cp {layout.cp}"]
    degrees += [f"ep {layout.ep}", f"etp {layout.etp}"] if model.is_moe else []
    virtual = f", {layout.stages_per_rank} virtual stages a rank" if layout.stages_per_rank > 1 else ""
    passive = sum(name in PASSIVE for name in run.flags.given)
    whole = layout.global_batch_size
    even = run.gpus % (layout.tp * layout.pp * layout.cp) == 0
    rows = [
        (
            "model",
            f"{units.count(count.total)} parameters{active}",
            f"{model.num_layers} layers of {model.hidden_size}, {model.num_heads} heads, {model.kv_heads} for keys, "
            f"vocabulary {model.vocab_size:,}",
        ),
        ("machines", cluster.name, run.gpus_reason),
        ("network", *network.split("; ", 1)),
        ("layout", ", ".join(degrees) + virtual, f"data parallel {run.dp}, ZeRO-{layout.zero}" if even else "misfit"),
        (
            "batch",
            f"{whole or '?'} sequences of {layout.seq_len}",
            f"{units.number(run.micro_batches, 'micro-batch')} of {layout.micro_batch_size}" if whole and even else "",
        ),
        ("precision", layout.precision, f"recomputation {layout.recompute}"),
        (
            "flags",
            f"{len(run.flags.given)} understood",
            f"{passive} of them decide nothing here; {_unknown(run)}",
        ),
    ]
    return table(("Megatron-LM", "", ""), rows, notes=tuple(assumed))


def _unknown(run: MegatronRun) -> str:
    names = [f"--{unknown.name}" for unknown in run.flags.unknown]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} unknown" + (f": {', '.join(names[:3])}{more}" if names else "")


def _predicted(rows: Sequence[tuple[str, Workload, StepEstimate]], cluster: Cluster) -> Table:
    cells = []
    for name, work, found in rows:
        virtual = f" x{work.stages_per_rank}" if work.stages_per_rank > 1 else ""
        cells.append(
            (
                name,
                f"tp {work.tp}, pp {work.pp}{virtual}, micro {work.micro_batch_size}, recompute {work.recompute}",
                units.duration(found.seconds),
                units.count(found.tokens_per_second_per_gpu),
                f"{found.tflops_per_gpu:.0f}",
                "" if found.mfu is None else units.percent(found.mfu),
                f"{found.memory_gib:.1f}" + " !" * (found.fits and found.tight),
                "yes" if found.fits else "no",
                units.percent(found.bubble),
                units.percent(found.exposed_communication),
            )
        )
    return table(
        ("", "", *(">step", ">tokens/s/GPU", ">TFLOP/s", ">MFU", ">GiB", "fits", ">bubble", ">exposed")),
        cells,
        title=f"Megatron-LM on {cluster.name}, predicted",
        notes=(
            f"MFU and TFLOP/s: {rows[0][2].convention}.",
            *(["! tight: above 80 % of what the driver leaves."] if any(" !" in row[6] for row in cells) else []),
            f"{units.size(cluster.gpu.memory_bytes)} a card. What overlap that is left off costs is in the findings.",
        ),
    )


def _as_dict(
    run: MegatronRun, estimate: StepEstimate, found: Sequence[Finding], same: Better, best: Better | None
) -> dict[str, Any]:
    def figures(of: StepEstimate, work: Workload) -> dict[str, Any]:
        return {
            "layout": {
                **{name: getattr(work, name) for name in ("tp", "pp", "cp", "ep", "etp", "zero", "stages_per_rank")},
                "micro_batch_size": work.micro_batch_size,
                "recompute": work.recompute,
            },
            "step_seconds": of.seconds,
            "tokens_per_second_per_gpu": of.tokens_per_second_per_gpu,
            "tflops_per_gpu": of.tflops_per_gpu,
            "mfu": of.mfu,
            "mfu_convention": of.convention,
            "memory_gib": of.memory_gib,
            "fits": of.fits,
        }

    better = {
        name: {**figures(one.estimate, one.work), "flags": list(one.flags), "environment": one.environment}
        for name, one in (("same_layout", same), ("best_layout", best))
        if one is not None
    }
    return {
        "gpus": run.gpus,
        "recipe": run.config.model_dump(mode="json", include={"model", "train", "parallel", "optim"}),
        **figures(estimate, run.work),
        "findings": [finding.as_dict() for finding in found],
        "unknown_flags": [str(unknown) for unknown in run.flags.unknown],
        "better": better,
    }
