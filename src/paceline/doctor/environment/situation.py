"""What is a variable judged against, and what does a rule say?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware
from paceline.report.finding import Finding, Severity

Judged = tuple[frozenset[str], Finding]
"""(the names that a rule has judged, what it says); other names are judged by their role."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What variables are judged against; None where it is not known."""

    config: RunConfig | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    card: Hardware | None = None
    cores: int | None = None
    """Of a node, as this process may use them."""
    interfaces: tuple[str, ...] | None = None
    """Network interfaces of the machine whose variables these are."""


Rule = Callable[[Mapping[str, str], Situation], Iterator[Judged]]


def judged(
    names: str, severity: Severity, id: str, subject: str, evidence: str, next_step: str, gain: str | None = None
) -> Judged:
    """What a rule says about `names`, separated by blanks."""
    finding = Finding(id=id, severity=severity, subject=subject, evidence=evidence, next_step=next_step, gain=gain)
    return frozenset(names.split()), finding


def switched_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y")


def many_nodes(situation: Situation) -> bool | None:
    """None where the number of nodes is not known."""
    return None if situation.nodes is None else situation.nodes > 1
