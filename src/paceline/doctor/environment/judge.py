"""What do the environment variables that are set mean, and which had better not be?

Rules about one variable, or a few, are in `communication` and `processes`; what is left is judged by its role:
leftovers of debugging, choices taken from a library, values that are none, old names, names that nobody reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from paceline.doctor.environment.communication import COMMUNICATION
from paceline.doctor.environment.processes import PROCESSES
from paceline.doctor.environment.situation import Situation
from paceline.doctor.variables.known import KNOWN, belongs, meant_by, names_a_version, nearest
from paceline.doctor.variables.variable import Variable
from paceline.report.finding import Finding
from paceline.report.table import Table, table

_SECRET = re.compile(r"PSK|TOKEN|SECRET|PASSWORD|API_?KEY", re.IGNORECASE)
_LONGEST = 48


def judge(environ: Mapping[str, str], situation: Situation) -> list[Finding]:
    """Findings about all variables of the known families, rules first."""
    named: set[str] = set()
    findings: list[Finding] = []
    for rule in (*COMMUNICATION, *PROCESSES):
        for about, finding in rule(environ, situation):
            named |= about
            findings.append(finding)
    for name in sorted(environ):
        if belongs(name) and name not in named:
            findings += _by_role(name, environ[name])
    return findings


def variable_table(environ: Mapping[str, str]) -> Table:
    """Every variable that was looked at, with its meaning."""
    rows = []
    for name in sorted(environ):
        if not belongs(name):
            continue
        known = KNOWN.get(name)
        told = "set by an image; nothing reads it" if names_a_version(name) else "not known"
        meaning = told if known is None else _meaning(known)
        rows.append((name, _shown(name, environ[name]), known.role if known else "?", meaning))
    notes = () if rows else ("None of the families that we know is set.",)
    return table(("variable", "value", "role", "meaning"), rows, title="Environment", notes=notes)


def _meaning(known: Variable) -> str:
    if known.role != "renamed":
        return known.meaning
    return f"now {known.meaning}" if known.meaning not in ("", "-") else "no longer read"


def _shown(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(not shown)"
    text = value if value.isprintable() else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _by_role(name: str, value: str) -> Iterator[Finding]:
    known = KNOWN.get(name)
    shown = f"{name}={_shown(name, value)}"
    if known is None:
        if not names_a_version(name):
            yield _unknown(name, shown)
    elif known.role == "renamed":
        yield _renamed(known, shown)
    elif not value.strip():
        return
    elif not known.accepts(value):
        yield Finding(
            id="env.value",
            severity="warning",
            subject=f"{shown} is no value of {name}",
            evidence=f"{name}: {known.meaning}. Accepted: {_readable(known.accepted)}. Source: {known.source}.",
            next_step=f"Correct it, or unset {name}.",
        )
    elif known.is_default(value):
        return
    elif known.role == "debug":
        yield Finding(
            id="env.debug",
            severity="warning",
            subject=f"{shown} is a leftover of debugging",
            evidence=f"{name}: {known.meaning}. Source: {known.source}.",
            next_step=f"unset {name}, unless you are looking for a fault right now.",
        )
    elif known.role == "override":
        yield Finding(
            id="env.override",
            severity="warning",
            subject=f"{shown} takes a choice from the library",
            evidence=f"{name}: {known.meaning}. It is meant for experiments and workarounds; kept in scripts it can "
            f"cost speed, crash or hang with another version or machine. Source: {known.source}.",
            next_step=f"unset {name}, and measure with and without it: paceline doctor --measure.",
        )


def _unknown(name: str, shown: str) -> Finding:
    meant = meant_by(name)
    if meant is not None:
        return Finding(
            id="env.misspelt",
            severity="warning",
            subject=f"{shown} is read by nobody; {meant} is",
            evidence=f"{meant}: {KNOWN[meant].meaning}. A misspelt name is ignored without a word.",
            next_step=f"Rename it to {meant}, or unset it.",
        )
    near = nearest(name)
    return Finding(
        id="env.unknown",
        severity="note",
        subject=f"{shown} is not in the table of {len(KNOWN)} variables",
        evidence="It may belong to a newer version or another program; libraries ignore names that they do not know."
        + (f" Near it: {', '.join(near)}." if near else ""),
        next_step=f"Look {name} up, or unset it.",
    )


def _renamed(known: Variable, shown: str) -> Finding:
    new = known.meaning if known.meaning not in ("", "-") else ""
    return Finding(
        id="env.renamed",
        severity="warning",
        subject=f"{shown}: this name is {'an old one of ' + new if new else 'no longer read'}",
        evidence=f"Current versions warn about it or ignore it. Source: {known.source}.",
        next_step=f"Use {new} instead, or unset it." if new else f"unset {known.name}.",
    )


def _readable(accepted: str) -> str:
    names = {r"[01]": "0 or 1", r"-?\d+": "a whole number", r"[1-9]\d*": "a positive whole number"}
    return names.get(accepted, accepted.replace("(?i:", "(").replace(r"\d", "digit"))
