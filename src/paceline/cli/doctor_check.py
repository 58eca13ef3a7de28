"""`paceline doctor check`: looks at this machine, or at the files that describe another, and at a recipe."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

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
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.request import calibrated, find_cluster, load
from paceline.report.finding import Finding
from paceline.runtime.environment import environment

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

    @property
    def describes_another(self) -> bool:
        """Whether files stand for the machine."""
        return bool(self.topo or self.smi or self.env or self.lspci)


def examine(asked: Asked) -> Examination:
    """Everything that was asked for.

    Raises:
        ConfigError: a file or the recipe cannot be read, or an option is not known. Before anything is shown.
    """
    recipe, is_preset = None, False
    if asked.recipe:
        recipe, is_preset, _ = load(asked.recipe, asked.overrides, asked.gpus)
    live = Live() if asked.describes_another else look()
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
    _add_environment(examination, asked, host, per_node or (cluster.gpus_per_node if cluster else 0))
    if host is not None:
        examination.add_host(host, gpus=len(cards))
        _add_software(examination, live, len(cards))
    if recipe is not None:
        _add_recipe(examination, asked, recipe, cluster, is_preset=is_preset)
    return examination


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


def _add_environment(examination: Examination, asked: Asked, host: Host | None, per_node: int) -> None:
    if asked.env:
        variables, odd = parse_settings(read_text(asked.env, "--env", _ENV), asked.env)
        examination.found += odd
        examination.add_environment(variables, gpus_per_node=per_node or None, cores=None, interfaces=None)
    elif host is not None:
        examination.add_environment(
            environment(), gpus_per_node=per_node or None, cores=host.cores, interfaces=host.interfaces
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
) -> None:
    profile = calibrated("paceline", asked.calibration or recipe.config.cluster.calibration)
    judgement = judge_recipe(recipe, cluster, profile, is_preset=is_preset)
    examination.found += judgement.findings
    if not asked.describes_another and not is_preset:
        examination.found += judge_files(recipe.config)
    if judgement.own is not None:
        examination.facts["predicted"] = judgement.own.as_dict()
