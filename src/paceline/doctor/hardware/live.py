"""What does this machine say of its GPUs? NVML where its package is there, else nvidia-smi; else why not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.doctor.hardware.card import Card
from paceline.doctor.hardware.nvml import link_matrix_text, load_nvml, read_nvml
from paceline.doctor.hardware.smi import parse_smi
from paceline.errors import ConfigError

Run = Callable[[Sequence[str]], str | None]
_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Live:
    """Empty where there is nothing; `why_not` says why."""

    cards: tuple[Card, ...] = ()
    driver: str = ""
    driver_cuda: str = ""
    topology: str = ""
    """As ``nvidia-smi topo -m`` prints it."""
    lspci: str = ""
    why_not: str = ""


def run(command: Sequence[str]) -> str | None:
    """What a program prints; None where it is missing or does not answer in time. A failure's words count."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout or done.stderr


def look(*, nvml: Any = None, run: Run = run, devices: Path = Path("/dev")) -> Live:
    """Asks this machine.

    Args:
        nvml: the module `pynvml` or its like; None looks for the package.
        run: starts programs; another one in tests.
    """
    nvml = nvml or load_nvml()
    reasons = []
    found: tuple[list[Card], str, str] | None = None
    topology: str | None = None
    if nvml is not None:
        try:
            found = read_nvml(nvml)
            topology = link_matrix_text(nvml)
        except nvml.NVMLError as error:
            reasons.append(f"NVML: {error}")
    else:
        reasons.append("the package nvidia-ml-py is not installed")
    if found is None:
        found, reason = _from_smi(run)
        reasons += [reason] if reason else []
    if found is None or not found[0]:
        reasons.append(_devices(devices))
        return Live(why_not=". ".join(reasons) + ".")
    cards, driver, cuda = found
    return Live(
        cards=tuple(cards),
        driver=driver,
        driver_cuda=cuda,
        # the program also tells network cards and CPUs
        topology=_matrix(run(("nvidia-smi", "topo", "-m"))) or topology or "",
        lspci=_acs(run(("lspci", "-vvv"))),
    )


def _from_smi(run: Run) -> tuple[tuple[list[Card], str, str] | None, str]:
    text = run(("nvidia-smi", "-q", "-x"))
    if text is None:
        return None, "nvidia-smi is not found or does not answer"
    try:
        return parse_smi(text, "nvidia-smi -q -x"), ""
    except ConfigError as problem:
        return None, problem.evidence.rstrip(".")


def _matrix(text: str | None) -> str:
    return text if text and "GPU0" in text else ""


def _acs(text: str | None) -> str:
    """Only what root sees."""
    return text if text and "ACSCtl:" in text else ""


def _devices(folder: Path) -> str:
    cards = sorted(path.name for path in folder.glob("nvidia[0-9]*"))
    if cards:
        return f"/dev/{cards[0]} is there: this container or user may not use it, or driver and library differ"
    return "There is no /dev/nvidia0: no NVIDIA GPU, no driver, or a container without --gpus"
