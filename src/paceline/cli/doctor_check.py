"""`paceline doctor check`: looks at this machine, or at the files that describe another, and at a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.cli.doctor_machine import Machine, add_machine, look_here, node_findings, of_other_nodes, seen_cards
from paceline.cli.doctor_memory import judge_host_memory
from paceline.config.load import Recipe
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.workload import Cluster
from paceline.doctor.config import Judgement, judge_count, judge_files, judge_recipe
from paceline.doctor.environment.settings import parse_settings
from paceline.doctor.environment.visible import visible_gpus
from paceline.doctor.examination import Examination
from paceline.doctor.hardware.card import Card
from paceline.doctor.hardware.smi import parse_smi
from paceline.doctor.measured.record import Measured
from paceline.doctor.packages import judge_packages
from paceline.doctor.text_file import read_text
from paceline.doctor.topology.judge import judge as judge_topology
from paceline.doctor.topology.matrix import LinkMatrix, parse_matrices
from paceline.doctor.topology.wiring import binding
from paceline.errors import ConfigError
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import Candidate
from paceline.planner.request import calibrated, find_cluster, load
from paceline.report.finding import Finding
from paceline.runtime.launcher import ProcessInfo, process_info

if TYPE_CHECKING:
    from paceline.cli.doctor_measure import Wish

_TOPO = "nvidia-smi topo -m > topo.txt"
_SMI = "nvidia-smi -q -x > smi.xml"
_ENV = "env > env.txt"
_LSPCI = "sudo lspci -vvv > lspci.txt"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Options of the verb; empty where they were not given."""

    recipe: str = ""
    topo: str = ""
    smi: str = ""
    env: str = ""
    lspci: str = ""
    gpus: int | None = None
    gpu: str = ""
    nodes_of: int = 0
    interconnect: str = ""
    overrides: tuple[str, ...] = ()
    calibration: str = ""
    measure: bool = False
    nproc: int | None = None
    out: str = ""

    @property
    def describes_another(self) -> bool:
        """Whether files stand for the machine."""
        return bool(self.topo or self.smi or self.env or self.lspci)


def examine(asked: Asked) -> Examination | None:
    """Everything that was asked for; None in a process of a launcher that is not the first.

    Raises:
        ConfigError: a file or the recipe cannot be read, or an option is not known. Before anything is shown.
    """
    _refuse_pairs(asked)
    recipe, is_preset = None, False
    if asked.recipe:
        recipe, is_preset, _ = load(asked.recipe, asked.overrides, asked.gpus)
    config = recipe.config if recipe and not is_preset else None
    info = process_info()
    # one process of each node looks, before torch starts others and fills the GPUs
    machine = look_here() if info.local_rank == 0 and not asked.describes_another else None
    measured: Measured | None = None
    told: list[tuple[str, list[Finding]]] = []
    if asked.measure:
        from paceline.cli.doctor_measure import measure_here

        own = node_findings(machine, config, info.num_nodes) if machine and info.num_nodes > 1 else []
        measured, told = measure_here(config, _wish(asked), own)
    if not info.is_main:
        return None
    variables, odd = _variables(asked, machine)
    every = _cards(asked, machine)
    cards = seen_cards(every, variables) if asked.smi else list(machine.cards) if machine else []
    matrices, unread = _matrices(asked, machine)
    cores = len(matrices[0].cpu_numbers) if matrices else 0
    matrices = [_as_seen(matrix, variables, every) for matrix in matrices]
    per_node = len(cards) or (len(matrices[0].gpus) if matrices else 0)
    there = sum(len(matrix.gpus) for matrix in matrices) if asked.topo else per_node
    cluster = _cluster(asked, recipe, cards, per_node, there, info)
    examination = Examination(
        config=config, nodes=cluster.nodes if cluster else None, card=cluster.gpu if cluster else None
    )
    if machine is not None:
        wanted = recipe is not None and recipe.config.cluster.device == "cuda"
        add_machine(examination, machine, gpus_per_node=per_node, wanted=wanted)
        examination.found += of_other_nodes(told, examination.found)
    elif cards:
        examination.add_cards(cards)
    examination.found += [*odd, *unread]
    if matrices:
        examination.add_topology(matrices)
        if machine is not None:
            # Slurm may show each task its own GPU alone
            place = None if info.launcher == "single" else min(info.local_rank, max(0, len(matrices[0].gpus) - 1))
            examination.found += binding(matrices[0], machine.host.cpus, place)
    if text := _lspci(asked, machine):
        examination.add_acs(text, asked.lspci or "lspci")
    if asked.env:
        in_node = per_node or (cluster.gpus_per_node if cluster else 0)
        examination.add_environment(variables, gpus_per_node=in_node or None, cores=cores or None, interfaces=None)
    best = None
    if recipe is not None:
        ranks = cluster.gpus if cluster else _ranks(asked, recipe.config, there, info)
        judgement = _judgement(examination, asked, recipe, cluster, matrices[:1], variables, ranks, is_preset)
        best = judgement.own
        if machine is not None and config is not None and judgement.legal and (cards or not asked.gpu):
            examination.found += judge_host_memory(config, info, ranks, gpus=len(cards))
    if machine is not None and config is not None:
        examination.found += [*judge_files(config), *judge_packages(config)]
        examination.found += judge_count(config, len(cards)) if cards else ()
    if measured is not None and machine is not None:
        _add_measured(examination, asked, measured, machine, best)
    return examination


def _add_measured(
    examination: Examination, asked: Asked, measured: Measured, machine: Machine, own: Candidate | None
) -> None:
    from paceline.cli.doctor_measure import add_measured, link_rate

    rates = [port.gbit or 0.0 for port in machine.host.ports if port.state == "ACTIVE"]
    wish = replace(_wish(asked), link_gb_per_s=link_rate(rates, len(machine.cards)))
    eats = own.estimate.tokens_per_second_per_gpu * own.config.parallel.model_ranks if own else None
    add_measured(examination, measured, wish, needed_tokens=eats)


def _refuse_pairs(asked: Asked) -> None:
    """Options that do not go together, and an output that cannot be written, before a minute is spent."""
    if asked.measure and asked.describes_another:
        raise ConfigError(
            "--measure measures this machine; --topo, --smi, --env and --lspci describe another",
            next_step="Leave the files out, or run it on that machine.",
        )
    if asked.nproc and not asked.measure:
        raise ConfigError("--nproc goes with --measure", next_step="Add --measure, or leave --nproc out.")
    if asked.measure:
        from paceline.cli.doctor_measure import refuse_out

        refuse_out(asked.out)


def _wish(asked: Asked) -> Wish:
    from paceline.cli.doctor_measure import Wish

    return Wish(
        recipe=asked.recipe,
        overrides=asked.overrides,
        nproc=asked.nproc,
        out=asked.out,
        interconnect=asked.interconnect,
    )


def _cards(asked: Asked, machine: Machine | None) -> list[Card]:
    """All of the machine, visible or not."""
    if asked.smi:
        return parse_smi(read_text(asked.smi, "--smi", _SMI), asked.smi)[0]
    return list(machine.live.cards) if machine else []


def _matrices(asked: Asked, machine: Machine | None) -> tuple[list[LinkMatrix], list[Finding]]:
    """A file that cannot be read is bad use; what this machine prints is only a finding."""
    if asked.topo:
        return parse_matrices(read_text(asked.topo, "--topo", _TOPO), asked.topo), []
    if machine is None or not machine.live.topology:
        return [], []
    try:
        return parse_matrices(machine.live.topology, "nvidia-smi topo -m"), []
    except ConfigError as problem:
        unread = Finding(
            id="topology.unread",
            severity="note",
            subject=f"links between GPUs are not determined: {problem.subject}",
            evidence=problem.evidence,
            next_step="Look at nvidia-smi topo -m; measure the links: paceline doctor --measure.",
        )
        return [], [unread]


def _lspci(asked: Asked, machine: Machine | None) -> str:
    return read_text(asked.lspci, "--lspci", _LSPCI) if asked.lspci else machine.live.lspci if machine else ""


def _cluster(
    asked: Asked, recipe: Recipe | None, cards: list[Card], per_node: int, there: int, info: ProcessInfo
) -> Cluster | None:
    """The machines: as asked for, as the recipe says, else those that a launcher has, else those that are seen."""
    section = recipe.config.cluster if recipe else None
    name = asked.gpu or (section.gpu if section else "") or (cards[0].name if cards else "")
    count = asked.gpus or (section.nodes * section.gpus_per_node if section else 0)
    if recipe is not None and asked.gpu and count:
        return find_cluster(recipe.config, asked.gpus, asked.gpu, asked.nodes_of or per_node, asked.interconnect)[0]
    count = count or (info.world_size if info.world_size > 1 else there)
    if not name or not count:
        return None
    gpu = find_gpu(name) if asked.gpu or (section and section.gpu) else find_hardware(name)
    if gpu is None:
        return None
    nodes_of = asked.nodes_of or min(per_node or (section.gpus_per_node if section else 8), count)
    return make_cluster(gpu, count, gpus_per_node=nodes_of, interconnect=asked.interconnect)[0]


def _variables(asked: Asked, machine: Machine | None) -> tuple[dict[str, str], list[Finding]]:
    if asked.env:
        return parse_settings(read_text(asked.env, "--env", _ENV), asked.env)
    return (machine.variables if machine else {}), []


def _as_seen(matrix: LinkMatrix, variables: Mapping[str, str], cards: Sequence[Card]) -> LinkMatrix:
    """The GPUs that programs see, in their order; all of them where none would be left."""
    uuids = [card.uuid for card in cards] if len(cards) == len(matrix.gpus) else []
    seen = visible_gpus(variables, len(matrix.gpus), uuids)
    return matrix.seen(seen) if seen else matrix


def _ranks(asked: Asked, config: RunConfig, there: int, info: ProcessInfo) -> int | None:
    """Of the run, where no GPU is named: as asked for, as the recipe says, else those that are there, if any."""
    section = config.cluster
    started = info.world_size if info.world_size > 1 else 0
    return asked.gpus or section.nodes * section.gpus_per_node or started or there or None


def _judgement(
    examination: Examination,
    asked: Asked,
    recipe: Recipe,
    cluster: Cluster | None,
    matrices: Sequence[LinkMatrix],
    variables: Mapping[str, str],
    ranks: int | None,
    is_preset: bool,
) -> Judgement:
    """Added to the findings, and the recipe's own layout as it is predicted, where it can be, to the facts."""

    def on_links(other: RunConfig) -> list[Finding]:
        return [
            found
            for matrix in matrices
            for found in judge_topology(matrix, config=other, card=examination.card, nodes=examination.nodes)
        ]

    judgement = judge_recipe(
        recipe,
        cluster,
        calibrated("paceline", asked.calibration or recipe.config.cluster.calibration),
        is_preset=is_preset,
        gpus=ranks,
        environ=variables,
        on_links=on_links,
    )
    examination.found += judgement.findings
    if judgement.own is not None:
        examination.facts["predicted"] = judgement.own.as_dict()
    return judgement
