"""The tables of `paceline plan RECIPE`: the best layouts, why, and what each rank holds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.plan_outputs import refuse_unwritable, write_output
from paceline.cli.plan_page import KINDS, plan_page
from paceline.config.check import check, refuse_errors
from paceline.config.load import differences
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.costs.profiles import Profile
from paceline.costs.step import SAFE_SHARE, StageMemory
from paceline.costs.workload import Cluster
from paceline.errors import ConfigError
from paceline.planner.rank import OBJECTIVES, Candidate, Ranking, estimate_config, rank, rank_counts
from paceline.planner.reasons import Reasons, layout_text, not_counted, reasons
from paceline.planner.request import Request, count_of, parse_only, refuse_held
from paceline.report import units
from paceline.report.console import make_console, print_findings, print_table
from paceline.report.table import Table, table


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of the verb."""

    objective: str
    top: int
    only: tuple[str, ...]
    price: float
    tokens: str
    write: str
    as_json: bool
    html: str


def show_layouts(request: Request, wanted: Wanted) -> None:
    """Ranks, prints, writes."""
    objective = next((name for name in OBJECTIVES if name == wanted.objective), None)
    if objective is None:
        raise ConfigError(
            f"--objective {wanted.objective} is not known", next_step=f"There are {', '.join(OBJECTIVES)}."
        )
    only = parse_only(wanted.only)
    if wanted.tokens:
        count_of(wanted.tokens, "--tokens")  # before the work, not after its table
    refuse_unwritable("--write", wanted.write, new=True)
    refuse_unwritable("--html", wanted.html, new=False)
    config, cluster = request.config, request.cluster
    ranking = rank_counts(config, cluster, objective=objective, profile=request.profile, only=only)
    if not ranking.predicted and not ranking.space.too_large:
        refuse_held(config, only, cluster)
    if wanted.as_json:
        shown = [*ranking.fitting, *ranking.too_large][: wanted.top] if not ranking.fitting else ranking.fitting
        typer.echo(json.dumps([found.as_dict() for found in shown[: wanted.top]], indent=1))
    why = None if wanted.as_json and not wanted.html else reasons(ranking, cluster, request.profile)
    if not wanted.as_json:
        assert why is not None
        _print(make_console(), request, ranking, why, wanted)
    if wanted.html:
        assert why is not None
        _write_page(request, ranking, why, wanted)
    if wanted.write:
        if not ranking.fitting:
            raise ConfigError(
                "nothing fits, so there is nothing to write", next_step="Look at what would help, without --write."
            )
        write_output(wanted.write, written_recipe(request, ranking.fitting[0], wanted.write))
        if not wanted.as_json:
            typer.echo(f"\nwritten: {wanted.write} ({layout_text(ranking.fitting[0].config)})")


def _print(console: Console, request: Request, ranking: Ranking, why: Reasons, wanted: Wanted) -> None:
    print_table(console, _question(request, ranking))
    _say(console, "Does it fit?", why.answer)
    console.print()
    if ranking.fitting:
        print_table(console, layouts_table(ranking.fitting[: wanted.top], request.config))
        console.print()
        print_table(console, _run_table(ranking.fitting[0], request.config, wanted))
        _say(console, "The first", why.first)
        _say(console, "In place of it", (*_own(request, ranking.fitting[0]), *why.others))
    else:
        console.print(Text("Nothing fits.", style="bold"))
        if ranking.too_large:
            print_table(console, layouts_table(_lightest(ranking)[: wanted.top], request.config))
    _say(console, "Not in the table", why.rejected)
    if why.helps:
        console.print()
        print_findings(console, why.helps)


def _own(request: Request, best: Candidate) -> list[str]:
    """The layout that the recipe itself asks for, beside the first."""
    if request.is_preset:
        return []
    try:
        own = estimate_config(request.config, request.cluster, request.profile)
    except ConfigError as problem:
        return [
            f"The recipe's own layout cannot run on {units.number(request.cluster.gpus, 'GPU')}: {problem.subject}."
        ]
    text = layout_text(own.config, than=best.config)
    if not text:
        return ["This is the recipe's own layout."]
    speed = own.estimate.tokens_per_second_per_gpu / best.estimate.tokens_per_second_per_gpu - 1
    fits = "" if own.estimate.fits else ", does not fit"
    return [f"The recipe's own layout ({text}): {speed:+.1%} tokens/s, {own.estimate.memory_gib:.1f} GiB{fits}."]


def _write_page(request: Request, ranking: Ranking, why: Reasons, wanted: Wanted) -> None:
    shown = (list(ranking.fitting) or _lightest(ranking))[: wanted.top]
    title = f"{request.name} on {request.cluster.name}"
    if not shown:
        raise ConfigError(
            f"--html {wanted.html} would be a page without layouts: none comes near enough to fitting",
            evidence="".join(why.answer[-1:]),
            next_step="More or larger GPUs, or a smaller model; without --html it says what would fit.",
        )
    question, layouts = _question(request, ranking), layouts_table(shown, request.config)
    write_output(wanted.html, plan_page(title, question, layouts, shown, ranking, why))
    if not wanted.as_json:
        typer.echo(f"\nwritten: {wanted.html}")


def _lightest(ranking: Ranking) -> list[Candidate]:
    return sorted(ranking.too_large, key=lambda found: found.estimate.memory_bytes)


def _say(console: Console, title: str, sentences: Sequence[str]) -> None:
    if not sentences:
        return
    console.print()
    console.print(Text(title, style="bold"))
    for sentence in sentences:
        console.print(Text(f"  {sentence}"), soft_wrap=True)


def _question(request: Request, ranking: Ranking) -> Table:
    config, cluster = request.config, request.cluster
    train, parameters = config.train, count_parameters(config.model)
    active = f", {units.count(parameters.active)} active" if config.model.is_moe else ""
    batch = train.global_batch_size * train.seq_len
    rows = [
        ("model", f"{units.count(parameters.total)} parameters{active}", config.model.preset or request.name),
        ("batch", f"{units.count(batch)} tokens", f"{train.global_batch_size} sequences of {train.seq_len}"),
        (
            "machines",
            cluster.name,
            f"{units.size(cluster.gpu.memory_bytes)} of {cluster.gpu.memory_gb:g} GiB are left to programs",
        ),
        ("network", *_network(request.network)),
        (
            "looked at",
            f"{ranking.space.count:,} combinations of degrees",
            f"{ranking.predicted:,} layouts predicted, {len(ranking.fitting):,} fit; in order of {ranking.objective}",
        ),
    ]
    return table(("plan", "", ""), rows, notes=request.notes)


def _network(sentence: str) -> tuple[str, str]:
    nodes, _, links = sentence.partition("; ")
    return nodes, links


_SCHEDULES = {"1f1b": "1f1b", "interleaved_1f1b": "interleaved", "zero_bubble": "zero bubble", "zbv": "zbv"}


def layouts_table(found: Sequence[Candidate], config: RunConfig) -> Table:
    """One row a layout."""
    experts = config.model.is_moe
    any_tight = any(candidate.estimate.tight for candidate in found)
    several = len({candidate.gpus for candidate in found}) > 1
    rows = []
    for place, candidate in enumerate(found, 1):
        parallel, estimate = candidate.config.parallel, candidate.estimate
        mode = parallel.recompute
        schedule = _SCHEDULES[parallel.pipeline_schedule] if parallel.pp > 1 else ""
        engine = f"{parallel.zero}" + (f" x{parallel.dp_replicate}" if parallel.dp_replicate > 1 else "")
        rows.append(
            (
                str(place),
                *((str(candidate.gpus),) if several else ()),
                str(parallel.tp),
                str(parallel.pp),
                str(parallel.cp),
                *((str(parallel.ep),) if experts else ()),
                str(parallel.dp_degree(candidate.gpus)),
                engine,
                f"{schedule} x{parallel.stages_per_rank}" if parallel.stages_per_rank > 1 else schedule,
                str(candidate.config.train.micro_batch_size),
                (mode if isinstance(mode, str) else "by layer") + (" *" if parallel.offload != "none" else ""),
                units.duration(estimate.seconds),
                units.count(candidate.tokens_per_second),
                units.count(estimate.tokens_per_second_per_gpu),
                "" if estimate.mfu is None else units.percent(estimate.mfu),
                f"{estimate.memory_gib:.1f}" + (" !" if estimate.tight else "  " * any_tight),
                units.percent(estimate.bubble),
                units.percent(estimate.exposed_communication),
            )
        )
    columns = [
        ">",
        *((">GPUs",) if several else ()),
        *(">tp", ">pp", ">cp"),
        *((">ep",) if experts else ()),
        *(">dp", "zero", "schedule", ">micro", "recompute", ">step", ">tokens/s", ">a GPU", ">MFU"),
        *(">GiB", ">bubble", ">exposed"),
    ]
    convention = found[0].estimate.convention if found else ""
    staged = any(candidate.config.parallel.stages_per_rank > 1 for candidate in found)
    copied = any(candidate.config.parallel.dp_replicate > 1 for candidate in found)
    offloaded = any(candidate.config.parallel.offload != "none" for candidate in found)
    return table(
        columns,
        rows,
        title="Layouts, predicted",
        notes=(
            f"MFU: {convention}. GiB: of the fullest card.",
            "Exposed: communication that nothing hides. zero 0 and 1: flat engine; 2 and 3: FSDP2.",
            *(("A schedule's x2: two stages a rank.",) if staged else ()),
            *(("zero 3 x2: two copies of the sharded state, each over a part of the ranks.",) if copied else ()),
            *(
                (f"! tight: above {SAFE_SHARE:.0%} of what the driver leaves, as the dry run says.",)
                if any_tight
                else ()
            ),
            *(("* the optimizer's state in host memory (parallel.offload).",) if offloaded else ()),
        ),
    )


def _run_table(best: Candidate, config: RunConfig, wanted: Wanted) -> Table:
    train = config.train
    tokens = (
        count_of(wanted.tokens, "--tokens") if wanted.tokens else train.steps * train.global_batch_size * train.seq_len
    )
    seconds = tokens / best.tokens_per_second
    hours = seconds * best.gpus / 3600
    rows = [
        ("tokens of the run", units.count(tokens), "--tokens" if wanted.tokens else f"{train.steps:,} steps"),
        (
            "time",
            units.duration(seconds),
            f"{units.count(best.tokens_per_second)} tokens/s on {units.number(best.gpus, 'GPU')}",
        ),
        ("GPU-hours", f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}", "without restarts and evaluation"),
    ]
    if wanted.price:
        rows.append(("money", f"${hours * wanted.price:,.0f}", f"at ${wanted.price:g} a GPU-hour"))
    return table(("the run with the first", "", ""), rows)


_CHOSEN = (
    *("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "zero"),
    *("pipeline_schedule", "stages_per_rank", "recompute", "offload"),
)
"""Fields that a written recipe says even where they are the default."""


def written_recipe(request: Request, best: Candidate, path: str) -> str:
    """A recipe that extends the one asked about: the chosen `[parallel]` and `[train]` fields, and what was `--set`."""
    plain, config = request.as_it_is(), best.config
    tables: dict[str, Any] = {}
    if request.is_preset:
        tables["model"] = {"preset": request.name}
        tables["train"] = {"steps": config.train.steps}
    else:
        tables["extends"] = os.path.relpath(Path(request.name).resolve(), Path(path).resolve().parent)
    for key, (_, value) in differences(plain, config).items():
        section, _, name = key.partition(".")
        if section in ("cluster", "run") or "." in name:
            continue
        tables.setdefault(section, {})[name] = value
    parallel = config.parallel.model_dump(mode="json")
    tables.setdefault("parallel", {}).update({name: parallel[name] for name in _CHOSEN})
    train = {name: getattr(config.train, name) for name in ("micro_batch_size", "global_batch_size", "seq_len")}
    tables.setdefault("train", {}).update(train)
    per_node = min(request.cluster.gpus_per_node, best.gpus)
    tables["cluster"] = {"gpus_per_node": per_node}
    if best.gpus % per_node == 0:  # then the file says how many GPUs it is for
        tables["cluster"] = {"nodes": best.gpus // per_node, "gpus_per_node": per_node}
    named = config.run.name != plain.run.name
    tables["run"] = {"name": config.run.name if named else Path(path).stem}
    if name := _table_name(request.cluster):
        tables["cluster"]["gpu"] = name
    estimate = best.estimate
    head = (
        f"# Chosen by `paceline plan` for {request.cluster.name}: {units.duration(estimate.seconds)} a step, "
        f"{estimate.memory_gib:.1f} GiB, predicted.\n"
    )
    return head + tomli_w.dumps(tables)


def _table_name(cluster: Cluster) -> str:
    """Empty for a GPU that a file describes: a recipe names those of the table only."""
    return cluster.gpu.name if cluster.gpu.patterns else ""


# ---- memory, stage by stage


MOMENTS = ("start_up", "forward_peak", "backward_peak", "optimizer_step")


def explain_memory_of(request: Request, *, as_json: bool) -> None:
    """Bytes of the recipe's own layout; of a preset, of the best one.

    Raises:
        ConfigError: it cannot be run on so many GPUs; names the nearest that can.
    """
    config, cluster = request.config, request.cluster
    if request.is_preset:
        ranking = rank(config, cluster, profile=request.profile)
        found = ([*ranking.fitting[:1], *_lightest(ranking)] or [estimate_config(config, cluster, request.profile)])[0]
    else:
        refuse_errors(check(config, request.recipe.registry, cluster.gpus))
        found = estimate_config(config, cluster, request.profile)
    if as_json:
        typer.echo(json.dumps([_as_dict(place, stage) for place, stage in enumerate(found.estimate.stages)], indent=1))
        return
    console = make_console()
    print_table(console, memory_table(found, request.profile))
    console.print()
    print_table(console, moments_table(found))
    share = found.estimate.memory_bytes / cluster.gpu.memory_bytes
    verdict = "fits" if found.estimate.fits else "does not fit"
    if found.estimate.tight:
        verdict = f"fits, but is tight ({share:.0%}, above {SAFE_SHARE:.0%})"
    room = units.size(cluster.gpu.memory_bytes)
    console.print()
    console.print(
        Text(f"{layout_text(found.config)} on {cluster.name} {verdict}: {found.estimate.memory_gib:.2f} GiB of {room}.")
    )
    if found.host_bytes:
        console.print(Text(f"Offloaded: {units.size(found.host_bytes)} of host memory a rank, pinned."))
    command = request.command
    if not found.estimate.fits:
        console.print(Text(f"  → {command} lists layouts that do."), soft_wrap=True)
    if request.is_preset:
        told = "A preset has no layout of its own: this is the best one."
    else:
        told = (
            f"This is the recipe's own layout. Of the best one:\n  {command} --write best.toml\n"
            f"  paceline plan best.toml {request.machines} --explain-memory"
        )
    console.print(Text(told), soft_wrap=True)


def _as_dict(place: int, stage: StageMemory) -> dict[str, Any]:
    kinds = {f"{kind}_gib": getattr(stage, kind) / 2**30 for kind in KINDS}
    moments = {f"{name}_gib": value / 2**30 for name, value in stage.moments.items()}
    return {"pipeline_rank": place, **kinds, "total_gib": stage.total / 2**30, **moments}


def memory_table(found: Candidate, profile: Profile) -> Table:
    """Bytes by kind for each position of the pipeline, at their peak."""
    kinds = [kind for kind in KINDS if kind != "framework" or any(s.framework >= 2**20 for s in found.estimate.stages)]
    rows = [
        (str(place), *(f"{getattr(stage, kind) / 2**30:.2f}" for kind in kinds), f"{stage.total / 2**30:.2f}")
        for place, stage in enumerate(found.estimate.stages)
    ]
    return table(
        (">pp", *(f">{kind}" for kind in kinds), ">total"),
        rows,
        title="Memory of a rank by position in the pipeline, in GiB, predicted",
        notes=(
            "optimizer: masters and moments. gathered: weights and gradients that are whole for a while (FSDP).",
            *(
                ("framework: what torch's allocator was measured to hold beside these.",)
                if len(kinds) == len(KINDS)
                else ()
            ),
            not_counted(profile),
        ),
    )


def moments_table(found: Candidate) -> Table:
    """What is held when."""
    rows = []
    for place, stage in enumerate(found.estimate.stages):
        moments = stage.moments
        rows.append((str(place), *(f"{moments[name] / 2**30:.2f}" for name in MOMENTS)))
    titles = [f">{name.replace('_', ' ')}" for name in MOMENTS]
    return table((">pp", *titles), rows, title="The same by moment of a step, in GiB")
