"""Which machines are meant? From what a person writes ("H100-80", "ib400", a file) to a `Cluster`."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.costs.hardware import Hardware, find_hardware, hardware_names
from paceline.costs.workload import INTERCONNECTS, Cluster
from paceline.errors import ConfigError

DESCRIPTION = """\
name = "My GPU"
bf16 = 400             # TFLOP/s, dense, fp32 accumulation
fp8 = 800              # leave out if it has none
memory_gb = 48
memory_tb_per_s = 1.6
nvlink_gb_per_s = 300  # per direction, all links of a GPU; leave out if it has none
pcie_gb_per_s = 31     # per direction
memory_share = 0.985   # what the driver leaves to programs
source = "data sheet"
"""
"""A GPU in ten lines."""

_OPTIONAL = {"fp8": None, "nvlink_gb_per_s": None, "pcie_gb_per_s": None, "source": "described by the user"}
_NOT_DESCRIBED = ("patterns",)


def find_gpu(text: str) -> Hardware:
    """The GPU of a name in any spelling ("H100-80", "a100 80gb", "4090"), or described in a TOML file.

    Raises:
        ConfigError: it is not known, or several are meant equally well; names them, and how to describe a new one.
    """
    if text.endswith(".toml"):
        return read_gpu(Path(text))
    exact = find_hardware(text)
    if exact is not None:
        return exact
    asked = _parts(text)
    meant = [
        name
        for name in hardware_names()
        if asked and asked <= _parts(name) | _memory(name) | {"nvidia", "geforce", "amd", "instinct", "gb"}
    ]
    ranks = {name: _closeness(asked, name) for name in meant}
    best = [name for name in meant if ranks[name] == max(ranks.values())]
    if len(best) == 1 and asked & _models(best[0]):
        found = find_hardware(best[0])
        assert found is not None
        return found
    if meant:
        candidates = [name for name in meant if asked & _models(name)] or meant
        raise ConfigError(
            f"--gpu {text} does not say which GPU of the table of hardware is meant",
            evidence=f"It may be {' or '.join(candidates)}.",
            next_step="Give one of these names"
            + (f': --gpu "{candidates[0]}".' if len(candidates) > 1 else f', "{candidates[0]}", if it is the one.')
            + f" Or describe yours in a file, my_gpu.toml:\n{_example()}",
        )
    near = difflib.get_close_matches(text.lower(), [name.lower() for name in hardware_names()], n=3, cutoff=0.3)
    names = [name for close in near for name in hardware_names() if name.lower() == close]
    raise ConfigError(
        f"there is no GPU {text!r} in the table of hardware",
        evidence=f"Near it: {', '.join(names)}. " * bool(names) + f"It has: {', '.join(hardware_names())}.",
        next_step="Take one of these, or describe yours in a file, my_gpu.toml, and pass --gpu my_gpu.toml:\n"
        + _example(),
    )


def _parts(name: str) -> frozenset[str]:
    """``A100 SXM 80`` and ``a100-sxm-80gb`` are {a100, sxm, 80}."""
    words = re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower())
    return frozenset(re.sub(r"^(\d+)(gb|g)$", r"\1", word) for word in words)


def _closeness(asked: frozenset[str], name: str) -> tuple[int, int, bool]:
    """How well a name is meant: words in common, few beyond them, and the usual SXM where nothing else decides."""
    return len(asked & _parts(name)), -len(_parts(name) - asked), "sxm" in _parts(name)


def _models(name: str) -> frozenset[str]:
    """The words of a name that say which product it is, not its socket or its memory: ``a100``, ``4090``."""
    words = (word for word in _parts(name) if any(letter.isdigit() for letter in word))
    return frozenset(word for word in words if not word.isdigit() or len(word) > 3)


def _memory(name: str) -> set[str]:
    found = find_hardware(name)
    return {f"{found.memory_gb:g}"} if found else set()


def read_gpu(path: Path) -> Hardware:
    """A GPU described in ten lines of TOML.

    Raises:
        ConfigError: the file is missing, not TOML, or lacks a number.
    """
    known = [field.name for field in fields(Hardware) if field.name not in _NOT_DESCRIBED]
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"there is no GPU file {path}", evidence=str(error), next_step=_how()) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML", evidence=str(error), next_step=_how()) from error
    unknown = sorted(values.keys() - set(known))
    missing = [name for name in ("name", "bf16", "memory_gb", "memory_tb_per_s") if name not in values]
    wrong = [
        name
        for name, value in values.items()
        if name not in unknown and name not in ("name", "source") and (not isinstance(value, int | float) or value <= 0)
    ]
    shares = [name for name, value in values.items() if name.endswith("_share") and name not in wrong and value > 1]
    if unknown or missing or wrong or shares:
        faults = [
            *([f"unknown: {', '.join(unknown)}"] if unknown else []),
            *([f"missing: {', '.join(missing)}"] if missing else []),
            *([f"no positive number: {', '.join(wrong)}"] if wrong else []),
            *([f"a share above 1: {', '.join(f'{name} = {values[name]:g}' for name in shares)}"] if shares else []),
        ]
        raise ConfigError(f"{path} does not describe a GPU: {'; '.join(faults)}", next_step=_how())
    return Hardware(**(_OPTIONAL | values), patterns=())


def _how() -> str:
    return f"For example:\n{_example()}"


def _example() -> str:
    return "".join(f"    {line}\n" for line in DESCRIPTION.splitlines()).rstrip()


def make_cluster(gpu: Hardware, gpus: int, *, gpus_per_node: int = 0, interconnect: str = "") -> tuple[Cluster, str]:
    """(the machines, what was assumed about their network).

    Args:
        gpus_per_node: 0 = 8, or all where there are fewer.
        interconnect: a name of `INTERCONNECTS`, or a number of GB/s per GPU; empty = the usual one of that GPU.

    Raises:
        ConfigError: an interconnect that is not known, or nodes that do not divide the GPUs.
    """
    per_node = gpus_per_node or min(8, gpus)
    if gpus > per_node and gpus % per_node:
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {per_node}",
            next_step=f"Take {gpus // per_node * per_node} or {-(-gpus // per_node) * per_node} GPUs, or another "
            "--nodes-of.",
        )
    name = interconnect or usual_interconnect(gpu)
    rate, what = _rate(name)
    racks = 72 if gpu.name.startswith("GB") else 0
    cluster = Cluster(
        gpu=gpu, gpus=gpus, gpus_per_node=min(per_node, gpus), node_gb_per_s=rate, fast_domain=min(racks, gpus)
    )
    if gpus <= per_node:
        link = gpu.nvlink_gb_per_s
        inside = f"NVLink, {link:.0f} GB/s a GPU and direction" if link else _pcie(gpu)
        return cluster, f"one node; {inside}" if gpus > 1 else "one GPU; nothing is sent"
    assumed = "" if interconnect else "; assumed (--interconnect)"
    shown = f"{name}, " * (name in INTERCONNECTS)
    return cluster, f"nodes of {per_node}; {shown}{rate:g} GB/s a GPU: {what.partition(' (')[0]}{assumed}"


def _pcie(gpu: Hardware) -> str:
    """What is assumed of links that the board decides: a full slot, and how cards reach each other."""
    rate = f"PCIe, {gpu.pcie_gb_per_s or 16.0:.0f} GB/s a GPU and direction assumed"
    consumer = any("GeForce" in pattern for pattern in gpu.patterns)
    return rate + ("; GeForce: no peer-to-peer" if consumer else "")


def usual_interconnect(gpu: Hardware) -> str:
    """What clusters of that GPU usually have."""
    if gpu.nvlink_gb_per_s is None or "PCIe" in gpu.name:
        return "eth100"
    if gpu.name.startswith(("V100", "A100", "A800")):
        return "ib200" if not gpu.name.startswith("V100") else "ib100"
    return "ib800" if gpu.name.startswith(("B300", "GB300")) else "ib400"


def _rate(name: str) -> tuple[float, str]:
    if name in INTERCONNECTS:
        return INTERCONNECTS[name]
    try:
        rate = float(name)
    except ValueError:
        rate = 0.0
    if rate > 0:
        return rate, "as given"
    near = difflib.get_close_matches(name, INTERCONNECTS, n=2, cutoff=0.4)
    listed = "; ".join(f"{key} = {value:g} GB/s ({what})" for key, (value, what) in INTERCONNECTS.items())
    raise ConfigError(
        f"there is no interconnect {name!r}",
        evidence=f"There are: {listed}.",
        next_step=(f"Did you mean {' or '.join(near)}? " if near else "")
        + "Or give GB/s per GPU and direction: --interconnect 25.",
    )
