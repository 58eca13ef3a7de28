"""`paceline plan simulate`: a step as a timeline, what slow parts cost, and how much of the time is training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import typer
from rich.text import Text

from paceline.cli.plan_outputs import refuse_unwritable, write_output
from paceline.config.check import check, refuse_errors
from paceline.errors import ConfigError
from paceline.planner.goodput import Goodput, best_interval, goodput
from paceline.planner.rank import Candidate, estimate_config, rank
from paceline.planner.reasons import layout_text
from paceline.planner.request import Request
from paceline.planner.timeline import Timeline, perfetto, slow_parts, timeline
from paceline.report import units
from paceline.report.console import make_console, print_table
from paceline.report.table import Table, table

_MOST_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What is known about them; times in the units of the command line."""

    mtbf_hours: float
    checkpoint_seconds: float
    restart_minutes: float
    interval_minutes: float
    """0 = the best."""


def show_simulation(
    request: Request,
    *,
    slow_ranks: Sequence[str],
    slow_links: Sequence[str],
    failures: Failures,
    trace: str,
    as_json: bool,
) -> None:
    """The recipe's own layout; of a preset, the best one.

    Raises:
        ConfigError: the layout cannot run, or a slow part does not exist.
    """
    refuse_unwritable("--trace", trace, new=False)
    config, cluster = request.config, request.cluster
    if request.is_preset:
        ranked = rank(config, cluster, profile=request.profile)
        if not ranked.fitting:
            raise ConfigError(
                f"{request.name} fits {cluster.name} in no layout",
                next_step=f"{request.command} says what would help.",
            )
        found = ranked.fitting[0]
    else:
        refuse_errors(check(config, request.recipe.registry, cluster.gpus))
        found = estimate_config(config, cluster, request.profile)
    slow, told = slow_parts(found.config, cluster.gpus, slow_ranks, slow_links)
    plain = timeline(found.config, found.estimate)
    shown = timeline(found.config, found.estimate, slow) if told else plain
    expected = _expected(failures)
    if trace:
        write_output(trace, json.dumps(perfetto(shown, layout_text(found.config))))
    if as_json:
        typer.echo(json.dumps(_as_dict(found, plain, shown, expected), indent=1))
        return
    console = make_console()
    print_table(console, _step_table(request, found, plain, shown, told))
    console.print()
    print_table(console, _ranks_table(shown))
    if expected:
        console.print()
        print_table(console, _goodput_table(failures, expected, found, shown))
    if not found.estimate.fits:
        console.print(Text(f"It does not fit: {found.estimate.memory_gib:.1f} GiB on the fullest card."))
    if trace:
        console.print(Text(f"\nwritten: {trace}; open it at ui.perfetto.dev"), soft_wrap=True)


def _expected(failures: Failures) -> Goodput | None:
    if not failures.mtbf_hours:
        return None
    mtbf, checkpoint = 3600 * failures.mtbf_hours, failures.checkpoint_seconds
    restart = 60 * failures.restart_minutes
    if failures.interval_minutes:
        return goodput(mtbf, checkpoint, restart, 60 * failures.interval_minutes)
    return best_interval(mtbf, checkpoint, restart)


def _step_table(request: Request, found: Candidate, plain: Timeline, shown: Timeline, told: Sequence[str]) -> Table:
    estimate = found.estimate
    rows = [
        ("machines", request.cluster.name, ""),
        ("network", *request.network.split("; ", 1)),
        ("layout", layout_text(found.config), units.number(estimate.micro_batches, "micro-batch")),
        ("step", units.duration(plain.seconds), f"{units.count(found.tokens_per_second)} tokens/s, predicted"),
        ("idle", units.percent(1 - sum(plain.busy) / len(plain.busy) / plain.seconds), "of a rank's time, on average"),
    ]
    if told:
        loss = shown.seconds / plain.seconds - 1
        rows.append(("with slow parts", units.duration(shown.seconds), f"{loss:+.1%}; all ranks wait"))
        rows += [("", "", sentence) for sentence in told]
    return table(("simulated", "", ""), rows, notes=request.notes)


def _ranks_table(shown: Timeline) -> Table:
    rows = []
    for rank_, busy in enumerate(shown.busy):
        spans = [span for span in shown.spans if span.rank == rank_ and span.kind in ("forward", "backward", "weights")]
        rows.append(
            (
                str(rank_),
                units.duration(min(span.start for span in spans)),
                units.duration(max(span.start + span.seconds for span in spans)),
                units.duration(busy),
                units.percent(1 - busy / shown.seconds),
            )
        )
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ("...", "", "", "", ""), *rows[-half:]]
    return table(
        (">pp", ">first work", ">last work", ">busy", ">idle"),
        rows,
        title="Ranks of one pipeline",
        notes=("Idle: waiting for others, for gradients' sums, and the optimizer's part of the step.",),
    )


def _goodput_table(failures: Failures, expected: Goodput, found: Candidate, shown: Timeline) -> Table:
    train = found.config.train
    speed = train.global_batch_size * train.seq_len / shown.seconds
    chosen = "as given" if failures.interval_minutes else "the best: near sqrt(2 x checkpoint x MTBF)"
    steps = max(1, round(expected.interval_seconds / shown.seconds))
    rows = [
        ("goodput", units.percent(expected.share), f"{units.count(expected.share * speed)} tokens/s over days"),
        ("checkpoint every", units.duration(expected.interval_seconds), f"{steps:,} steps; {chosen}"),
        (
            "failures",
            f"{expected.failures_per_day:.2g} a day",
            f"MTBF {failures.mtbf_hours:g} h of the whole job = {failures.mtbf_hours * found.gpus:,.0f} GPU-hours",
        ),
        ("lost to each", units.duration(expected.lost_seconds_per_failure), "work since the checkpoint, and restart"),
    ]
    return table(
        ("with failures", "", ""),
        rows,
        notes=(
            f"Saving holds training up for {failures.checkpoint_seconds:g} s, a restart takes "
            f"{failures.restart_minutes:g} min (--checkpoint-seconds, --restart-minutes: measure yours).",
            "Formula: J. T. Daly, Future Generation Computer Systems 22 (2006), equation 20.",
        ),
    )


def _as_dict(found: Candidate, plain: Timeline, shown: Timeline, expected: Goodput | None) -> dict[str, object]:
    return {
        **found.as_dict(),
        "simulated_step_seconds": plain.seconds,
        "slow_step_seconds": shown.seconds,
        "busy_seconds": list(shown.busy),
        "goodput": None
        if expected is None
        else {
            "share": expected.share,
            "checkpoint_interval_seconds": expected.interval_seconds,
            "failures_per_day": expected.failures_per_day,
            "lost_seconds_per_failure": expected.lost_seconds_per_failure,
        },
    }
