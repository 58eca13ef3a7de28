"""What does a run of another system become as a recipe?

Each system has a file of tables (`foreign_llamafactory.py`, `foreign_swift.py`; what they share because both stand on
Transformers' Trainer is in `foreign_trainer.py`). Every key that is given ends in one of four places:

| place | what becomes of the key |
| --- | --- |
| ``simple`` and ``rules`` | fields of the recipe |
| ``passive`` | nothing: it does not decide what is learned; told in one note |
| ``without`` | nothing, though it matters; a warning with the reason, or an error: it would be another training |
| nowhere | an error, with the nearest known name |

Torch-free; nothing is started or written.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.foreign_values import Kind, converted, is_nothing, shown
from paceline.report.finding import Finding, Severity


@dataclass(frozen=True, kw_only=True)
class Simple:
    """A key that is one field of ours, with its own value or one of a list."""

    ours: str
    """Dotted: ``"optim.lr"``."""
    kind: Kind = "text"
    values: Mapping[Any, Any] | None = None
    """Their value -> ours; None keeps it. Others are refused."""


@dataclass(frozen=True, kw_only=True)
class Without:
    """A key that has no counterpart."""

    reason: str
    severity: Severity = "warning"
    off: tuple[Any, ...] = ()
    """Values that ask for what happens anyway, beside `NOTHING`."""
    only_with: tuple[str, str] | None = None
    """(key, value): it is read there only beside these, and otherwise asks for nothing."""


@dataclass(frozen=True, kw_only=True)
class System:
    """Tables of one system."""

    name: str
    """What `--from` calls it."""
    title: str
    """What people call it, with the version that the tables were written for."""
    simple: Mapping[str, Simple]
    rules: tuple[tuple[frozenset[str], Callable[[Draft], None]], ...]
    """Keys that a rule reads together, and the rule; in order."""
    defaults: Mapping[str, Any]
    """Values of theirs that count where a key is not given, and differ from ours."""
    passive: frozenset[str]
    without: Mapping[str, Without]
    also_called: Mapping[str, str] = field(default_factory=dict)
    """Another name -> the name in these tables."""

    @property
    def known(self) -> frozenset[str]:
        read = {name for names, _ in self.rules for name in names}
        return frozenset({*self.simple, *read, *self.passive, *self.without, *self.also_called})


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a field of the recipe comes from."""

    said: str
    """``"learning_rate: 1e-4"``, for people."""
    is_default: bool = False
    """It was not given: the other system's default."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A recipe, where its fields come from, and what was found."""

    system: System
    fields: Mapping[str, Any]
    """Dotted name -> value; only what differs from ours, or was given."""
    origins: Mapping[str, Origin]
    findings: tuple[Finding, ...]

    def tables(self) -> dict[str, Any]:
        """``{"optim": {"lr": 1e-4}}``."""
        return tables_of(self.fields)


def tables_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested tables."""
    result: dict[str, Any] = {}
    for name, value in fields.items():
        *path, key = name.split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
        table[key] = value
    return result


class Draft:
    """A translation under way: what was given, and what it has become so far. Rules read and write it."""

    def __init__(
        self,
        system: System,
        given: Mapping[str, Any],
        *,
        processes: int,
        folder: Path,
        count_rows: Callable[[str], int | None] = lambda path: None,
        longest: Callable[[str], int | None] = lambda path: None,
        count_packed: Callable[[Mapping[str, Any]], int | None] = lambda tables: None,
    ) -> None:
        self.system = system
        self.given = given
        self.processes = processes
        self.folder = folder
        self.count_rows = count_rows
        self.longest, self.count_packed = longest, count_packed
        self.fields: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.findings: list[Finding] = []

    def has(self, name: str) -> bool:
        """Whether a key was given, and asks for something."""
        return not is_nothing(self.given.get(name))

    def value(self, name: str, kind: Kind, default: Any = None) -> Any:
        """The value of a key, or the system's default, or ``default``.

        Raises:
            ConfigError: it is of another kind.
        """
        found = self.given.get(name)
        if found is None:
            found = self.system.defaults.get(name)
        return default if found is None else converted(name, found, kind)

    def put(self, ours: str, value: Any, *names: str, said: str = "") -> None:
        """Sets a field; ``names`` are the keys that it comes from, ``said`` more words on how."""
        # of what is worked out, each factor is told
        ours_shown = None if said.startswith("=") else value
        told = [_told(name, self.given[name], ours_shown) for name in names if not is_nothing(self.given.get(name))]
        defaults = self.system.defaults
        default = [_told(name, defaults[name], ours_shown) for name in names if name in defaults]
        text = ", ".join(told or default)
        if text and said:
            said = f" {said}" if said.startswith(("=", "of ", "(")) else f"; {said}"
        self.fields[ours] = value
        self.origins[ours] = Origin(said=text + said, is_default=not told and bool(default))

    def find(self, what: str, severity: Severity, subject: str, evidence: str, next_step: str) -> None:
        """Adds a finding, with the id ``config.from-WHAT``."""
        self.findings.append(
            Finding(
                id=f"config.from-{what}",
                severity=severity,
                subject=subject,
                evidence=evidence,
                next_step=next_step,
            )
        )


def translate(
    system: System,
    given: Mapping[str, Any],
    *,
    processes: int = 1,
    folder: Path = Path(),
    count_rows: Callable[[str], int | None] = lambda path: None,
    longest: Callable[[str], int | None] = lambda path: None,
    count_packed: Callable[[Mapping[str, Any]], int | None] = lambda tables: None,
) -> Translation:
    """What ``given`` becomes as a recipe.

    Args:
        given: keys and values, as in the other system's file or on its command line.
        processes: that it would run in: global batches are products of it.
        folder: paths in ``given`` begin here.
        count_rows: rows of a path as `data.train` names it; None where that cannot be said.
        longest: tokens of the longest sequence of the model at a path; None where it is not here.
        count_packed: sequences of an epoch of a recipe that packs or holds rows out; None where they cannot be counted.

    Raises:
        ConfigError: a value is not of its key's kind.
    """
    named, contradictions = _by_one_name(system, given)
    draft = Draft(
        system, named,
        processes=processes, folder=folder, count_rows=count_rows, longest=longest, count_packed=count_packed,
    )  # fmt: skip
    draft.findings += contradictions
    unknown = [name for name in named if name not in system.known]
    for name, simple in system.simple.items():
        if draft.value(name, "text") is not None:
            _put_simple(draft, name, simple)
    for _, rule in system.rules:
        rule(draft)
    _tell_without(draft)
    _tell_unknown(draft, unknown)
    _tell_passive(draft)
    return Translation(system=system, fields=draft.fields, origins=draft.origins, findings=tuple(draft.findings))


def _by_one_name(system: System, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """What is given under the tables' names, and where two names of one key say different things."""
    named: dict[str, Any] = {}
    origin: dict[str, str] = {}
    findings = []
    for name, value in given.items():
        key = system.also_called.get(_plain(name), _plain(name))
        if key in named and named[key] != value:
            findings.append(
                Finding(
                    id="config.from-both",
                    severity="error",
                    subject=f"{origin[key]}: {shown(named[key])} and {name}: {shown(value)} are both given",
                    evidence="They are names of one key; the recipe has the last.",
                    next_step="Leave one out.",
                )
            )
        named[key], origin[key] = value, name
    return named, findings


def _told(name: str, theirs: Any, ours: Any) -> str:
    """The key alone where its value is ours."""
    return name if shown(theirs) == shown(ours) else f"{name}: {shown(theirs)}"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _put_simple(draft: Draft, name: str, simple: Simple) -> None:
    value = draft.value(name, simple.kind)
    if is_nothing(value) and simple.kind in ("text", "names"):
        return
    if simple.values is None:
        draft.put(simple.ours, value, name)
    elif value in simple.values:
        draft.put(simple.ours, simple.values[value], name)
    else:
        draft.find(
            "value",
            "error",
            f"{name}: {shown(value)} has no counterpart",
            f"{simple.ours} can say {', '.join(shown(one) for one in dict.fromkeys(simple.values))} of it.",
            f"Choose one of these, or leave {name} out.",
        )


def _tell_without(draft: Draft) -> None:
    for name, without in draft.system.without.items():
        value = draft.given.get(name)
        if is_nothing(value) or value in without.off or str(value).lower() in map(str, without.off):
            continue
        if _is_idle(draft, without):
            continue
        other = without.severity == "error"
        draft.find(
            "without-counterpart",
            without.severity,
            f"{name}: {shown(value)} has no counterpart",
            without.reason,
            f"Leave {name} out" + (": what would be trained is another thing." if other else " if you can do without."),
        )


def _is_idle(draft: Draft, without: Without) -> bool:
    if without.only_with is None:
        return False
    key, value = without.only_with
    return str(draft.given.get(key)).lower() != value


def _tell_unknown(draft: Draft, unknown: Iterable[str]) -> None:
    for name in unknown:
        near = difflib.get_close_matches(name, sorted(draft.system.known), n=1, cutoff=0.75)
        draft.find(
            "unknown",
            "error",
            f"{name}: {shown(draft.given[name])} is not a key that is known of {draft.system.title}",
            "It has not become anything.",
            f"Did you mean {near[0]}?" if near else "Leave it out, or set in the recipe what it stands for.",
        )


def _tell_passive(draft: Draft) -> None:
    idle = {name for name, without in draft.system.without.items() if _is_idle(draft, without)}
    names = [name for name in draft.given if name in draft.system.passive or (name in idle and draft.has(name))]
    if names:
        draft.find(
            "passive",
            "note",
            f"{len(names)} key{'s have' if len(names) > 1 else ' has'} no field in the recipe and need"
            f"{'' if len(names) > 1 else 's'} none: {', '.join(names)}",
            "They decide logging, caches, workers or defaults of the other program, not what is learned.",
            "Nothing to do.",
        )
