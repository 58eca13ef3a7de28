"""`paceline doctor check`: looks at this machine, or at the files that describe another, and at a recipe."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config.load import Recipe
from paceline.costs.hardware import find_hardware
from paceline.costs.workload import Cluster
from paceline.doctor.config import judge_files, judge_recipe
from paceline.doctor.environment.settings import parse_settings
from paceline.doctor.examination import Examination
from paceline.doctor.hardware.card import Card
from paceline.doctor.hardware.host import Host, read_host
from paceline.doctor.hardware.judge import no_cards
from paceline.doctor.hardware.live import Live, look
from paceline.doctor.hardware.smi import parse_smi
from paceline.doctor.software import read_software
from paceline.doctor.text_file import read_text
from paceline.doctor.topology.matrix import LinkMatrix, parse_matrices
from paceline.errors import ConfigError
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.rank import Candidate
from paceline.planner.request import calibrated, find_cluster, load
from paceline.report.finding import Finding
from paceline.runtime.environment import environment
from paceline.runtime.launcher import process_info

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
    # before torch starts processes and fills the GPUs
    variables, main = environment(), process_info().is_main
    live = look() if main and not asked.describes_another else Live()
    measured = None
    if asked.measure:
        from paceline.cli.doctor_measure import measure_here

        measured = measure_here(recipe.config if recipe and not is_preset else None, _wish(asked))
    if not main:
        return None
    cards = _cards(asked, live)
    matrices = _matrices(asked, live)
    per_node = len(cards) or (len(matrices[0].gpus) if matrices else 0)
    cluster = _cluster(asked, recipe, cards, per_node)
    examination = Examination(
        config=recipe.config if recipe and not is_preset else None,
        nodes=cluster.nodes if cluster else None,
        card=cluster.gpu if cluster else None,
    )
    host = None if asked.describes_another else read_host()
    if cards:
        examination.add_cards(cards)
    elif not asked.describes_another:
        wanted = recipe is not None and recipe.config.cluster.device == "cuda"
        examination.found.append(no_cards(live.why_not, wanted=wanted))
    if matrices:
        examination.add_topology(matrices)
    if text := read_text(asked.lspci, "--lspci", _LSPCI) if asked.lspci else live.lspci:
        examination.add_acs(text, asked.lspci or "lspci")
    _add_environment(examination, asked, variables, host, per_node or (cluster.gpus_per_node if cluster else 0))
    if host is not None:
        examination.add_host(host, gpus=len(cards))
        _add_software(examination, live, len(cards))
    own = _add_recipe(examination, asked, recipe, cluster, is_preset=is_preset) if recipe is not None else None
    if measured is not None:
        from paceline.cli.doctor_measure import add_measured, link_rate

        rates = [port.gbit or 0.0 for port in host.ports if port.state == "ACTIVE"] if host else []
        wish = replace(_wish(asked), link_gb_per_s=link_rate(rates, len(cards)))
        eats = own.estimate.tokens_per_second_per_gpu * own.config.parallel.model_ranks if own else None
        add_measured(examination, measured, wish, needed_tokens=eats)
    return examination


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


def _cards(asked: Asked, live: Live) -> list[Card]:
    return parse_smi(read_text(asked.smi, "--smi", _SMI), asked.smi)[0] if asked.smi else list(live.cards)


def _matrices(asked: Asked, live: Live) -> list[LinkMatrix]:
    if asked.topo:
        return parse_matrices(read_text(asked.topo, "--topo", _TOPO), asked.topo)
    return parse_matrices(live.topology, "nvidia-smi topo -m") if live.topology else []


def _cluster(asked: Asked, recipe: Recipe | None, cards: list[Card], per_node: int) -> Cluster | None:
    """The machines: as asked for, as the recipe says, else those that are seen."""
    section = recipe.config.cluster if recipe else None
    name = asked.gpu or (section.gpu if section else "") or (cards[0].name if cards else "")
    count = asked.gpus or (section.nodes * section.gpus_per_node if section else 0)
    if recipe is not None and asked.gpu and count:
        return find_cluster(recipe.config, asked.gpus, asked.gpu, asked.nodes_of or per_node, asked.interconnect)[0]
    count = count or per_node
    if not name or not count:
        return None
    gpu = find_gpu(name) if asked.gpu or (section and section.gpu) else find_hardware(name)
    if gpu is None:
        return None
    nodes_of = asked.nodes_of or min(per_node or (section.gpus_per_node if section else 8), count)
    return make_cluster(gpu, count, gpus_per_node=nodes_of, interconnect=asked.interconnect)[0]


def _add_environment(
    examination: Examination, asked: Asked, variables: dict[str, str], host: Host | None, per_node: int
) -> None:
    if asked.env:
        variables, odd = parse_settings(read_text(asked.env, "--env", _ENV), asked.env)
        examination.found += odd
        examination.add_environment(variables, gpus_per_node=per_node or None, cores=None, interfaces=None)
    elif host is not None:
        examination.add_environment(
            variables, gpus_per_node=per_node or None, cores=host.cores, interfaces=host.interfaces
        )


def _add_software(examination: Examination, live: Live, gpus: int) -> None:
    """Torch is loaded here, where it is installed: it knows best which libraries it has found."""
    loaded: dict[str, str] = {}
    capability = None
    if importlib.util.find_spec("torch") is not None:
        try:
            from paceline.cli.doctor_torch import what_torch_says

            loaded, capability = what_torch_says()
        except (ImportError, OSError, RuntimeError) as error:
            examination.found.append(
                Finding(
                    id="software.torch-broken",
                    severity="error",
                    subject="torch is installed and does not load",
                    evidence=f"{type(error).__name__}: {error}",
                    next_step="A library is missing or of another version: pip install --force-reinstall torch.",
                )
            )
    software = read_software(loaded, driver=live.driver, driver_cuda=live.driver_cuda)
    examination.add_software(replace(software, capability=capability), gpus=gpus)


def _add_recipe(
    examination: Examination, asked: Asked, recipe: Recipe, cluster: Cluster | None, *, is_preset: bool
) -> Candidate | None:
    """The recipe's own layout as it is predicted, where it can be."""
    profile = calibrated("paceline", asked.calibration or recipe.config.cluster.calibration)
    judgement = judge_recipe(recipe, cluster, profile, is_preset=is_preset)
    examination.found += judgement.findings
    if not asked.describes_another and not is_preset:
        examination.found += judge_files(recipe.config)
    if judgement.own is not None:
        examination.facts["predicted"] = judgement.own.as_dict()
    return judgement.own
