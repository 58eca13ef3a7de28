"""What do the numbers of a run say is wrong, what does it cost, and what would change it?

Each rule looks at one thing and gives the causes it finds. Costs are of the step as it is: the share that would be
gone. A thing that holds one rank up costs all ranks its time, so costs are of the worst rank in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.explain.attribution import Attribution, attribute
from paceline.explain.capture_report import captures_of, unattributed
from paceline.explain.cause import Cause, ranked
from paceline.explain.expert_rules import expert_causes
from paceline.explain.hang_rules import hang_causes
from paceline.explain.host_rules import (
    clock_causes,
    evaluation_causes,
    garbage_causes,
    logging_causes,
    memory_causes,
    processor_causes,
)
from paceline.explain.pipeline_rules import bubble_causes
from paceline.explain.ranks import RankReport, judge_ranks
from paceline.explain.run_folder import RunView
from paceline.explain.settings_rules import settings_causes
from paceline.explain.shares import Shares
from paceline.explain.slow_rules import change_causes, slow_causes
from paceline.explain.storage_rules import checkpoint_causes, data_causes
from paceline.explain.waterfall import Waterfall, make_waterfall
from paceline.report.finding import Finding

Rule = Callable[[RunView, Shares, RankReport], Iterator[Cause]]

_MOST_CHARACTERS = 300
"""Of what an error said."""

_RULES: tuple[Rule, ...] = (
    data_causes,
    checkpoint_causes,
    garbage_causes,
    processor_causes,
    evaluation_causes,
    logging_causes,
    bubble_causes,
    slow_causes,
    memory_causes,
    clock_causes,
    change_causes,
    expert_causes,
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that is known of a run."""

    view: RunView
    shares: Shares
    waterfall: Waterfall | None
    ranks: RankReport
    findings: tuple[Finding, ...]
    captured: Path | None
    """The capture that was read, and what it says."""
    attribution: Attribution | None


def diagnose(view: RunView) -> Diagnosis:
    """Reads a run's numbers and names what is wrong, the dearest first."""
    shares = Shares(view=view)
    report = judge_ranks(view, shares)
    captured = next(iter(captures_of(view.path)), None)
    owned = _read(captured)
    waterfall = make_waterfall(view, shares, owned.by_part() if owned is not None and owned.on_gpu else None)
    causes: list[Cause] = []
    if waterfall is not None:
        for rule in _RULES:
            causes += rule(view, shares, report)
        causes += settings_causes(view, shares, waterfall)
    causes += [*_state_of_run(view, waterfall), *(unattributed(owned) if owned is not None else ())]
    return Diagnosis(
        view=view,
        shares=shares,
        waterfall=waterfall,
        ranks=report,
        findings=tuple(cause.finding() for cause in ranked(_once(causes))),
        captured=captured,
        attribution=owned,
    )


def _read(captured: Path | None) -> Attribution | None:
    """None where the capture is still being written, or damaged."""
    try:
        return None if captured is None else attribute(captured)
    except PacelineError:
        return None


def _once(causes: Iterable[Cause]) -> list[Cause]:
    """One of each id; the dearest."""
    kept: dict[str, Cause] = {}
    for cause in causes:
        known = kept.get(cause.id)
        if known is None or (cause.share or 0.0) > (known.share or 0.0):
            kept[cause.id] = cause
    return list(kept.values())


def _state_of_run(view: RunView, waterfall: Waterfall | None) -> Iterator[Cause]:
    """What is missing, and how the run ended."""
    if view.problems:
        yield Cause(
            id="explain.incomplete",
            subject="a part of the run folder cannot be read",
            evidence="; ".join(view.problems[:6]) + ".",
            next_step="What is said here is of the rest.",
            share=None,
            severity="note",
            gain="-",
        )
    yield from hang_causes(
        view.path,
        ranks=range(view.world_size),
        last_step=int(view.steps[-1]) if len(view.steps) else 0,
        ended=view.end in ("end", "stop"),
        since=view.started,
    )
    last = view.events[-1] if view.events else {}
    if last.get("event") == "error":
        yield Cause(
            id="explain.run-failed",
            subject=f"the run ended with an error at step {last.get('step')}",
            evidence=_told(last),
            next_step="The whole error is in the run folder's logs/.",
            share=None,
            severity="error",
            gain="-",
        )
    if waterfall is None and not view.problems:
        yield Cause(
            id="explain.no-steps",
            subject="no step is finished yet",
            evidence=f"{view.path}",
            next_step="Come back when some steps are done.",
            share=None,
            severity="note",
            gain="-",
        )


def _told(event: Mapping[str, Any]) -> str:
    """Kind of an error and the first line of what it said."""
    lines = str(event.get("message") or event.get("subject") or "").strip().splitlines()
    said = lines[0][:_MOST_CHARACTERS] if lines else ""
    return ": ".join(part for part in (str(event.get("error") or ""), said) if part) or "See logs/."
