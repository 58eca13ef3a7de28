"""`paceline plan validate` and `plan calibrate`: predictions beside measured runs, and what to learn from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import typer
from rich.text import Text

from paceline.cli.plan_outputs import refuse_unwritable, write_output
from paceline.costs.profiles import Profile, find_profile
from paceline.errors import ConfigError
from paceline.planner import first_choice
from paceline.planner.calibration import (
    Calibration,
    calibrate,
    calibration_note,
    calibration_text,
    range_of,
    read_calibration,
    read_measured,
)
from paceline.planner.published import NotScored, PublishedRun
from paceline.planner.run_tables import MEASURED, REQUIRED
from paceline.planner.scored import Errors
from paceline.planner.validate import SourceReport, cross_validate, report, score
from paceline.report import units
from paceline.report.console import make_console, print_table
from paceline.report.table import Table, table


def show_validation(
    paths: Sequence[str], *, calibration: str, framework: str, left_out: bool, as_json: bool, worst: int
) -> None:
    """Predicts every row that can be predicted, and lists the others by reason.

    Raises:
        ConfigError: a file is missing, or no row can be scored.
    """
    if framework:
        find_profile(framework)
    runs, skipped = read_measured(paths, framework)
    if not runs:
        told = sorted({f"{one.name}: {one.reasons}" for one in skipped})
        more = f"; and {len(told) - 5} more" if len(told) > 5 else ""
        raise ConfigError(
            "no row can be scored",
            evidence=f"{len(skipped)} rows: {' | '.join(told[:5])}{more}.",
            next_step=f"Each row must fill {', '.join(REQUIRED)}; {', '.join(MEASURED)} are what predictions are "
            "compared with. Other columns may be left out. For a table of your own say whose runs they are: "
            "--framework paceline.",
        )
    profiles: Mapping[str, Profile] = read_calibration(calibration) if calibration else {}
    if left_out:
        if len(runs) > 300:
            typer.echo(f"{len(runs):,} rows: a fit for each model that is left out takes ten seconds or so.", err=True)
        scored, cells = cross_validate(runs)
        whole = {one.run.id for one in scored}
        scored += score([run for run in runs if run.id not in whole], profiles)
    else:
        scored = score(runs, profiles)
        cells = first_choice.cells(scored)
    if as_json:
        typer.echo(json.dumps([one.as_dict() for one in scored], indent=1))
        if skipped:
            typer.echo(f"not predicted: {len(skipped):,} rows; without --json they are listed by reason", err=True)
        return
    console = make_console()
    found = report(scored, cells, skipped)
    print_table(console, _errors_table(found, left_out))
    for name in dict.fromkeys(one.run.source.profile for one in scored) if calibration else ():
        console.print(Text(calibration_note(calibration, name)), soft_wrap=True)
    unmeasured = sum(not run.measured for run in runs)
    if unmeasured:
        count = _rows(unmeasured)
        console.print(Text(f"{count} without a measurement: predicted (--json), compared with nothing."))
    for shown in (_fits_table(found), _regret_table(found), _skipped_table(skipped), _worst_table(found, worst)):
        if shown.rows:
            console.print()
            print_table(console, shown)


def _errors_table(found: Sequence[SourceReport], left_out: bool) -> Table:
    rows = []
    for one in found:
        for what, errors in (("step time", one.time), ("memory", one.memory)):
            if errors is not None:
                rows.append((one.title, what, *_cells(errors)))
    for what, name in (("step time", "time_error"), ("memory", "memory_error")):
        values = [value for one in found for row in one.scored if (value := getattr(row, name)) is not None]
        if (errors := Errors.of(values)) is not None and len(found) > 1:
            rows.append(("all", what, *_cells(errors)))
    how = (
        "Every row by a profile that was fitted without its model (docs/accuracy.md)."
        if left_out
        else "By the profiles as they are shipped or calibrated, which may have seen these rows: --left-out scores "
        "each by one that did not see its model."
    )
    return table(
        ("source", "of", ">rows", ">MAPE", ">median", ">p90", ">worst"),
        rows,
        title="Predicted against measured",
        notes=(how,),
    )


def _cells(errors: Errors) -> tuple[str, ...]:
    values = (errors.mape, errors.median, errors.p90, errors.worst)
    return (f"{errors.rows:,}", *(units.percent(value) for value in values))


def _fits_table(found: Sequence[SourceReport]) -> Table:
    rows = []
    for one in found:
        if (fit := one.fit) is not None:
            rows.append(
                (
                    one.title,
                    f"{fit.refused:,} of {fit.ran:,}",
                    f"{fit.explained - fit.foreseen:,} of {fit.explained:,}",
                    f"{fit.others_flagged:,} of {fit.others:,}",
                )
            )
    return table(
        ("source", ">refused, but ran", ">said to fit, but ran out", ">other crashes, refused"),
        rows,
        title="Does it fit?",
        notes=("Crashes count where smaller micro-batches of the same layout show that memory explains them.",),
    )


def _regret_table(found: Sequence[SourceReport]) -> Table:
    rows = []
    for one in found:
        if one.cells:
            small = sum(cell.regret <= 0.05 for cell in one.cells)
            worst = max(one.cells, key=lambda cell: cell.regret)
            rows.append(
                (
                    one.title,
                    f"{len(one.cells)}",
                    f"{small} ({small / len(one.cells):.0%})",
                    f"{units.percent(worst.regret)} ({worst.model or 'no name'} on {worst.gpus})",
                )
            )
    return table(
        ("source", ">cells", ">regret up to 5 %", ">worst"),
        rows,
        title="Regret of the first choice, by model and number of GPUs",
    )


def _skipped_table(skipped: Sequence[NotScored]) -> Table:
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in skipped:
        reasons.setdefault((one.source, one.reasons), []).append(one.name)
    rows = [
        (source, f"{len(names):,}", ", ".join(names[:2]) + (" ..." if len(names) > 2 else ""), reason)
        for (source, reason), names in sorted(reasons.items(), key=lambda item: -len(item[1]))
    ]
    more = f"{len(rows) - 25} more reasons." if len(rows) > 25 else ""
    return table(
        ("source", ">rows", "which", "why not"),
        rows[:25],
        title=f"Not scored: {_rows(len(skipped))}",
        notes=(more,) if more else (),
    )


def _worst_table(found: Sequence[SourceReport], count: int) -> Table:
    rows: list[tuple[float, tuple[str, ...]]] = []
    for row in (row for one in found for row in one.scored):
        if (error := row.time_error) is not None:
            seconds = row.predicted_seconds, row.run.step_seconds or 0.0
            rows.append((error, (row.run.id, "step time", *map(units.duration, seconds), f"{error:+.1%}")))
        if (error := row.memory_error) is not None:
            sizes = row.predicted_bytes, row.run.memory_bytes or 0.0
            rows.append((error, (row.run.id, "memory", *map(units.gib, sizes), f"{error:+.1%}")))
    rows.sort(key=lambda pair: -abs(pair[0]))
    shown = [cells for _, cells in rows[:count]]
    return table(("row", "of", ">predicted", ">measured", ">error"), shown, title="The worst")


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


# ---- calibrate


def show_calibration(paths: Sequence[str], *, out: str, framework: str) -> None:
    """Fits and writes.

    Raises:
        ConfigError: the file is there, or nothing can be learned.
    """
    refuse_unwritable("--out", out, new=True)
    profile = find_profile(framework)
    runs, skipped = read_measured(paths, framework)
    skipped += [_unused(run) for run in runs if run.source.profile != framework or not run.measured]
    runs = [run for run in runs if run.source.profile == framework and run.measured]
    if not runs:
        reasons = "; ".join(sorted({f"{one.name}: {one.reasons}" for one in skipped})[:5])
        raise ConfigError(
            f"nothing can be learned about {framework} from {', '.join(paths)}",
            evidence=reasons,
            next_step="Give folders of runs on GPUs with ten logged steps or more.",
        )
    found = calibrate(runs, profile)
    write_output(out, calibration_text(found, runs))
    console = make_console()
    print_table(console, _runs_table(runs, found))
    console.print()
    print_table(console, _numbers_table(found, profile))
    for warning in _doubts(found):
        console.print(Text(warning), soft_wrap=True)
    if skipped:
        console.print(Text(f"\nLearned from {_rows(len(runs))}, not from {_rows(len(skipped))}:"))
    for one in skipped:
        console.print(Text(f"  {one.name}: {one.reasons}"), soft_wrap=True)
    console.print(Text(f"\nwritten: {out}; use it with --calibration {out}"), soft_wrap=True)


def _unused(run: PublishedRun) -> NotScored:
    why = "nothing is measured" if not run.measured else f"it is a run of {run.source.profile}"
    return NotScored(id=run.id, source=run.source.key, reason=why)


def _numbers_table(found: Calibration, profile: Profile) -> Table:
    rows = []
    for name, value in found.numbers.items():
        low, high = range_of(name)
        among = f"{low:g} to {high:g}" if math.isfinite(high) else f"from {low:g}"
        end = "at its end" if name in found.at_bounds else ""
        rows.append((name, f"{float(getattr(profile, name)):.4g}", f"{value:.4g}", among, end))
    return table(("number", ">before", ">now", "may be", ""), rows, title=f"What was learned about {profile.title}")


_STILL_OFF = 0.1
"""Mean error of its own runs from which on a calibration is doubted."""


def _doubts(found: Calibration) -> Iterator[str]:
    """Why these numbers may not be those of the cluster."""
    if found.at_bounds:
        yield (
            f"At the end of what is possible: {', '.join(found.at_bounds)}. The runs say more than these numbers can: "
            "look at their columns (gpu, recompute, tp, mbs ...) and at --framework, or measure again."
        )
    for what, errors in (("step time", found.after), ("memory", found.memory_after)):
        if errors and (off := fmean(map(abs, errors))) > _STILL_OFF:
            yield (
                f"Still off: {what} of the runs that were learned from by {units.percent(off)} in the mean. "
                "Predictions of others will be no better."
            )


def _runs_table(runs: Sequence[PublishedRun], found: Calibration) -> Table:
    timed = [run for run in runs if run.step_seconds]
    rows = [
        (run.id, units.duration(run.step_seconds or 0.0), f"{first:+.1%}", f"{then:+.1%}")
        for run, first, then in zip(timed, found.before, found.after, strict=True)
    ]
    note = "On the runs that were learned from: others will be further off. Keep some runs apart, and `plan validate`."
    return table(
        ("run", ">measured step", ">error before", ">now"), rows[:40], title="Predictions of these runs", notes=(note,)
    )
