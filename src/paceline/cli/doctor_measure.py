"""`paceline doctor --measure`: starts a process for each GPU, or takes part in what a launcher started."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.workload import Cluster
from paceline.doctor.ceilings.measure import measure
from paceline.doctor.examination import Examination
from paceline.doctor.measured.calibration import calibration, calibration_text
from paceline.doctor.measured.judge import judge
from paceline.doctor.measured.record import Measured
from paceline.doctor.measured.tables import collective_table, pair_table, rate_table, share_bars
from paceline.errors import ConfigError, LaunchError
from paceline.planner.machines import make_cluster
from paceline.report.console import make_console
from paceline.report.finding import Finding
from paceline.runtime.device import choose_device
from paceline.runtime.elastic import end_with_launcher, start_local
from paceline.runtime.launcher import ProcessInfo, process_info
from paceline.runtime.process import process_group

OWN_FILE = "# Made by `paceline doctor --measure`"
"""How a file begins that may be replaced."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What to measure, and where it goes."""

    recipe: str = ""
    overrides: tuple[str, ...] = ()
    nproc: int | None = None
    out: str = ""
    """The calibration file; empty = none."""
    interconnect: str = ""
    link_gb_per_s: float | None = None
    """Of the network, for each GPU, as its cards say; None where they do not."""


def refuse_out(out: str) -> None:
    """Before anything is measured: a file that is not ours is kept.

    Raises:
        ConfigError: it exists, or its folder does not.
    """
    path = Path(out)
    if out and path.exists() and not path.read_bytes().startswith(OWN_FILE.encode()):
        raise ConfigError(
            f"--out {out} exists, and doctor did not make it", next_step="Give another name (--out), or move it."
        )
    if out and not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no such folder", next_step="Make it, or give another path.")


Told = list[tuple[str, list[Finding]]]
"""(host, what was found there)."""


def take_part(config: RunConfig | None, own: Sequence[Finding] = ()) -> tuple[Measured, Told]:
    """Measures as one of the processes that a launcher started, or alone.

    Args:
        own: what was found on this node, to be told to the first process.
    """
    info = process_info()
    device = choose_device(info, config.cluster.device if config else "auto")
    if info.world_size == 1:
        return measure(info, device, config), []
    with process_group(info, device):
        measured = measure(info, device, config)
        told: list[tuple[str, list[Finding]] | None] = [None] * info.world_size
        dist.all_gather_object(told, (socket.gethostname(), list(own)))
    return measured, [each for each in told if each is not None and each[1]]


def measure_here(config: RunConfig | None, wish: Wish, own: Sequence[Finding] = ()) -> tuple[Measured | None, Told]:
    """(the measurement of all processes, what was found on all nodes); (None, []) on all but a launcher's first.

    Raises:
        LaunchError: a process ended early; what it said stands above.
    """
    info = process_info()
    if info.launcher != "single":
        end_with_launcher()
        found, told = take_part(config, own)
        return (found, told) if info.is_main else (None, [])
    count = wish.nproc or _gpus(config) or 1
    _announce(info, count)
    if count == 1:
        return take_part(config)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        arguments = ["doctor", "ceilings", *([wish.recipe] if config is not None else []), "--out", str(out)]
        for override in wish.overrides if config is not None else ():
            arguments += ["--set", override]
        ended = start_local(arguments, count, use_gpus=config is None or config.cluster.device != "cpu")
        if ended.code or not out.is_file():
            raise LaunchError(
                f"measuring ended early (exit code {ended.code})",
                evidence="A process failed; its message stands above.",
                next_step="paceline doctor without --measure looks at what does not need all GPUs; --nproc 1 measures "
                "one.",
            )
        return Measured.of(json.loads(out.read_text(encoding="utf-8"))), []


def write_measured(config: RunConfig | None, out: str) -> None:
    """In a process that `measure_here` started."""
    end_with_launcher()
    found, _ = take_part(config)
    if process_info().is_main:
        Path(out).write_text(json.dumps(found.as_dict()), encoding="utf-8")


def _gpus(config: RunConfig | None) -> int:
    return 0 if config is not None and config.cluster.device == "cpu" else torch.cuda.device_count()


def _announce(info: ProcessInfo, count: int) -> None:
    if info.is_main:
        what = f"{count} processes" if count > 1 else "one process"
        make_console(stderr=True).print(f"measuring with {what}; about a minute on GPUs ...")


def add_measured(examination: Examination, measured: Measured, wish: Wish, *, needed_tokens: float | None) -> None:
    """Verdicts, tables and the calibration file."""
    cluster = measured_cluster(measured, wish)
    examination.found += judge(measured, cluster, needed_tokens=needed_tokens)
    examination.tables.append(rate_table(measured))
    more = (pair_table(measured), collective_table(measured, cluster))
    examination.tables += [shown for shown in more if shown is not None]
    if (bars := share_bars(measured)) is not None:
        examination.pictures.append(("Measured beside expected", bars))
    numbers = calibration(measured, cluster)
    examination.facts["measured"] = measured.as_dict()
    examination.facts["calibration"] = numbers
    if wish.out and not numbers:
        examination.found.append(_no_calibration(measured, wish.out))
    elif wish.out:
        Path(wish.out).write_text(calibration_text(numbers, measured), encoding="utf-8")
        examination.found.append(
            Finding(
                id="measured.calibration",
                severity="note",
                subject=f"what was measured is written for the planner: {wish.out}",
                evidence=", ".join(f"{name} = {value:g}" for name, value in numbers.items()) + ".",
                next_step=f"paceline plan RECIPE --calibration {wish.out}; or --set cluster.calibration={wish.out}.",
            )
        )


def _no_calibration(measured: Measured, out: str) -> Finding:
    device = measured.ranks[0].device
    known = find_hardware(device) is not None
    return Finding(
        id="measured.no-calibration",
        severity="note",
        subject=f"{out} is not written: nothing of {device} can be held beside what it should give",
        evidence="None of the rates that the planner uses was measured."
        if known
        else f"The file holds the planner's numbers times measured over expected; the table of GPUs has no {device}, "
        "so nothing is expected of it.",
        next_step="Look at what was not measured above."
        if known
        else "Measure on a GPU of the table (docs/plan.md); or learn from runs: paceline plan calibrate.",
    )


def measured_cluster(measured: Measured, wish: Wish) -> Cluster | None:
    """The machines that were measured; None where the card or, between nodes, the network is not known."""
    card = find_hardware(measured.ranks[0].device)
    if card is None:
        return None
    count, nodes = len(measured.ranks), measured.num_nodes
    network = wish.interconnect or (f"{wish.link_gb_per_s:g}" if wish.link_gb_per_s else "")
    if nodes > 1 and not network:
        return None
    return make_cluster(card, count, gpus_per_node=-(-count // nodes), interconnect=network)[0]


def link_rate(gbit: Sequence[float], gpus: int) -> float | None:
    """GB/s of the network for each GPU, of the active cards of a node; slow ones for management are left out."""
    fast = [rate for rate in gbit if rate >= 100]
    return sum(fast) / 8 / gpus if fast and gpus else None
