"""What does this machine show? Looked at once on each node, before anything is measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.config.run import RunConfig
from paceline.doctor.environment.visible import visible_gpus
from paceline.doctor.examination import Examination
from paceline.doctor.hardware.card import Card
from paceline.doctor.hardware.host import Host, read_host
from paceline.doctor.hardware.judge import no_cards
from paceline.doctor.hardware.live import Live, look
from paceline.doctor.software import Software, read_software
from paceline.report.finding import Finding
from paceline.runtime.environment import environment


@dataclass(frozen=True, kw_only=True)
class Machine:
    variables: dict[str, str]
    live: Live
    host: Host
    software: Software
    cards: tuple[Card, ...]
    """Those that programs see: of the driver's tools, or, without them, what torch tells."""
    odd: tuple[Finding, ...] = field(default=())
    """What went wrong while looking."""


def look_here() -> Machine:
    """Torch is loaded, where it is installed: it knows best which libraries it has found."""
    variables = environment()
    live = find_cards()
    loaded: dict[str, str] = {}
    capability: tuple[int, int] | None = None
    devices: tuple[tuple[str, int], ...] = ()
    odd: list[Finding] = []
    if importlib.util.find_spec("torch") is not None:
        try:
            from paceline.cli.doctor_torch import what_torch_says

            loaded, capability, devices = what_torch_says()
        except (ImportError, OSError, RuntimeError) as error:
            odd.append(_broken(error))
    # torch counts those that are visible already
    cards = tuple(seen_cards(live.cards, variables)) or tuple(
        Card(index=index, name=name, memory_bytes=size) for index, (name, size) in enumerate(devices)
    )
    if cards and not live.cards:
        odd.append(
            Finding(
                id="hardware.torch-alone",
                severity="note",
                subject=f"torch sees {len(cards)} x {cards[0].name}; clocks, errors and links are not determined",
                evidence=live.why_not,
                next_step="pip install nvidia-ml-py, or start the container with the utility capability "
                "(NVIDIA_DRIVER_CAPABILITIES=compute,utility).",
            )
        )
    software = read_software(loaded, driver=live.driver, driver_cuda=live.driver_cuda)
    return Machine(
        variables=variables,
        live=live,
        host=read_host(),
        software=replace(software, capability=capability),
        cards=cards,
        odd=tuple(odd),
    )


def seen_cards(cards: Sequence[Card], variables: Mapping[str, str]) -> list[Card]:
    """Those that programs see, in their order; all of them where none would be left, which is a finding of its own."""
    seen = visible_gpus(variables, len(cards), [card.uuid for card in cards])
    return [cards[index] for index in seen] or list(cards)


def find_cards() -> Live:
    """A seam for tests: machines that this one is not."""
    return look()


def _broken(error: Exception) -> Finding:
    return Finding(
        id="software.torch-broken",
        severity="error",
        subject="torch is installed and does not load",
        evidence=f"{type(error).__name__}: {error}",
        next_step="A library is missing or of another version: pip install --force-reinstall torch.",
    )


def add_machine(examination: Examination, machine: Machine, *, gpus_per_node: int, wanted: bool) -> None:
    """GPUs, host, environment and software of one node; links are apart."""
    examination.found += machine.odd
    if machine.cards:
        examination.add_cards(machine.cards)
    else:
        examination.found.append(no_cards(machine.live.why_not, wanted=wanted))
    examination.add_environment(
        machine.variables,
        gpus_per_node=gpus_per_node or None,
        cores=machine.host.cores,
        interfaces=machine.host.interfaces,
    )
    examination.add_host(machine.host, gpus=len(machine.cards))
    examination.add_software(machine.software, gpus=len(machine.cards))


def node_findings(machine: Machine, config: RunConfig | None, nodes: int) -> list[Finding]:
    """What one node of several has to say; notes are left out."""
    examination = Examination(config=config, nodes=nodes)
    wanted = config is not None and config.cluster.device == "cuda"
    add_machine(examination, machine, gpus_per_node=len(machine.cards), wanted=wanted)
    return [finding for finding in examination.findings if finding.severity != "note"]


def of_other_nodes(told: Sequence[tuple[str, list[Finding]]], here: Sequence[Finding]) -> list[Finding]:
    """Findings of other nodes, the same of several as one; those that this node has as well are left out."""
    known = set(here)
    hosts: dict[Finding, list[str]] = {}
    for host, findings in told:
        for finding in findings:
            if finding not in known:
                hosts.setdefault(finding, []).append(host)
    return [
        replace(finding, subject=f"{', '.join(names[:6])}{' ...' if len(names) > 6 else ''}: {finding.subject}")
        for finding, names in hosts.items()
    ]
