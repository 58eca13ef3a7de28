"""Which links join the GPUs and network cards of a node? The text of ``nvidia-smi topo -m``, of any driver.

Devices are named as the header names them: GPU0, NIC0 or (older drivers) mlx5_0. Links, the fastest first:

    NV#   # NVLinks, together
    PIX   one PCIe switch
    PXB   several PCIe switches, no host bridge
    PHB   a PCIe host bridge, so the processor
    NODE  host bridges of one NUMA node
    SYS   the link between NUMA nodes
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import ConfigError

LEVELS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS", "N/A")
"""The closest first; N/A is a link that the driver does not know."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LABEL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|N/A")
_GPU = re.compile(r"GPU\d{1,5}")
_AFFINITY = {"CPU_Affinity": "cpus", "NUMA_Affinity": "numa", "NUMA": "numa", "GPU_NUMA_ID": "gpu_numa"}
_LEGEND = re.compile(r"^\s*(NIC\d+)\s*:\s*(\S+)\s*$")
_MOST_CPUS = 2**16
_HOW = "Save it whole: nvidia-smi topo -m > topo.txt; then paceline doctor --topo topo.txt."


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """Of one GPU; None where the text does not say."""

    cpus: str | None = None
    """As written: ``0-27,56-83``."""
    numa: str | None = None

    @property
    def cpu_numbers(self) -> frozenset[int]:
        """Empty where the text does not say."""
        return frozenset(cpu_numbers(self.cpus or ""))

    @property
    def num_cpus(self) -> int:
        return len(self.cpu_numbers)


def cpu_numbers(text: str) -> list[int]:
    """``0-2,8`` is 0, 1, 2, 8; empty where it is no such list, or one of more CPUs than there are."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return []
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high >= _MOST_CPUS:
            return []
        found += range(low, high + 1)
    return found


@dataclass(frozen=True, kw_only=True)
class LinkMatrix:
    """Links of one node."""

    devices: tuple[str, ...]
    links: dict[tuple[str, str], str]
    """The label between two devices, both ways; none for a device and itself."""
    affinity: dict[str, Affinity] = field(default_factory=dict)
    nic_names: dict[str, str] = field(default_factory=dict)
    """NIC0 -> mlx5_0."""

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if _GPU.fullmatch(name))

    def seen(self, order: Sequence[int]) -> LinkMatrix:
        """The same node with some of its GPUs alone, in another order (of CUDA_VISIBLE_DEVICES); names stay."""
        kept = [self.gpus[index] for index in order]
        return replace(self, devices=(*kept, *(name for name in self.devices if name not in self.gpus)))

    def named(self, groups: Sequence[Sequence[int]]) -> str:
        """Groups of places in `gpus`, by the driver's numbers: ``{0,1}, {2,3}``."""
        return ", ".join("{" + ",".join(str(self.number(place)) for place in group) + "}" for group in groups)

    def number(self, place: int) -> int:
        """The driver's number of a GPU."""
        return int(self.gpus[place].removeprefix("GPU"))

    @property
    def slices(self) -> tuple[str, ...]:
        """MIG slices."""
        return tuple(name for name in self.devices if name.startswith("MIG"))

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if not _GPU.fullmatch(name) and not name.startswith(("MIG", "CPU")))

    @property
    def cpu_numbers(self) -> frozenset[int]:
        """Of all CPUs that are near a GPU; empty where the text does not say."""
        return frozenset[int]().union(*(near.cpu_numbers for near in self.affinity.values()))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Of GPUs, each once."""
        return [(a, b) for index, a in enumerate(self.gpus) for b in self.gpus[index + 1 :]]

    def nearest_nics(self, gpu: str) -> list[str]:
        """The network cards with the closest link to a GPU."""
        closest = min((self.level(gpu, nic) for nic in self.nics), default=0)
        return [nic for nic in self.nics if self.level(gpu, nic) == closest]

    def label(self, one: str, other: str) -> str:
        return self.links[one, other]

    def level(self, one: str, other: str) -> int:
        """Place in `LEVELS`: 0 for NVLink."""
        label = self.label(one, other)
        return LEVELS.index("NV" if label.startswith("NV") else label)

    def nvlinks(self, one: str, other: str) -> int:
        label = self.label(one, other)
        return int(label[2:]) if label.startswith("NV") else 0


def parse_matrices(text: str, name: str) -> list[LinkMatrix]:
    """Every matrix in the text: one for each node whose output was put into it.

    Raises:
        ConfigError: there is none, or one is cut, wrapped or has labels that are none.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.lstrip("\ufeff").splitlines()]
    starts = [index for index, line in enumerate(lines) if _columns(line) is not None]
    if not starts:
        raise ConfigError(
            f"{name} holds no link matrix",
            evidence=_why_none(text, lines),
            next_step=_HOW,
        )
    ends = [*starts[1:], len(lines)]
    return [_parse(lines[start:end], start + 1, name) for start, end in zip(starts, ends, strict=True)]


def _why_none(text: str, lines: Sequence[str]) -> str:
    if not text.strip():
        return "It is empty."
    failed = next((line.strip() for line in lines if re.search(r"NVIDIA-SMI has failed|No devices|couldn't", line)), "")
    if failed:
        return f"nvidia-smi says: {failed[:160]}. The driver is missing or does not run; there is no topology to read."
    return "A matrix begins with a line of device names: GPU0 GPU1 ... CPU Affinity."


def _columns(line: str) -> list[str] | None:
    """Device and affinity names of a header line; None for any other line."""
    joined = re.sub(r"(CPU|NUMA) Affinity", r"\1_Affinity", line)
    words = re.sub(r"GPU NUMA ID", "GPU_NUMA_ID", joined).split()
    # a row begins with a name too, but goes on with a label
    if not words or not re.match(r"(GPU|MIG)\d", words[0]) or any(_LABEL.fullmatch(word) for word in words):
        return None
    devices = [word for word in words if word not in _AFFINITY]
    return words if len(set(devices)) == len(devices) and not any(":" in word for word in devices) else None


def _parse(lines: Sequence[str], first: int, name: str) -> LinkMatrix:
    columns = _columns(lines[0]) or []
    devices = [column for column in columns if column not in _AFFINITY]
    trailing = [column for column in columns if column in _AFFINITY]
    links: dict[tuple[str, str], str] = {}
    affinity: dict[str, Affinity] = {}
    legend: dict[str, str] = {}
    rows: set[str] = set()
    for number, line in enumerate(lines[1:], first + 1):
        words = line.split()
        if match := _LEGEND.match(line):
            legend[match[1]] = match[2]
        elif words and words[0] in devices and words[0] not in rows:
            rows.add(words[0])
            _read_row(words, devices, number, name, links)
            affinity[words[0]] = _read_affinity(words[1 + len(devices) :], trailing)
    missing = [device for device in devices if device not in rows and device.startswith(("GPU", "MIG"))]
    if missing:
        raise ConfigError(
            f"{name}: the matrix has columns for {', '.join(missing)}, but no rows",
            evidence=f"Its header in line {first} names {len(devices)} devices, {len(rows)} rows follow: it was cut.",
            next_step=_HOW,
        )
    _fill(devices, rows, links)
    return LinkMatrix(devices=tuple(devices), links=links, affinity=affinity, nic_names=legend)


def _read_row(
    words: Sequence[str], devices: Sequence[str], number: int, name: str, links: dict[tuple[str, str], str]
) -> None:
    cells = words[1 : 1 + len(devices)]
    wrong = next((cell for cell in cells if not _LABEL.fullmatch(cell)), None)
    if wrong is not None or len(cells) < len(devices):
        found = sum(1 for _ in _leading(words[1:]))
        raise ConfigError(
            f"{name}, line {number}: {words[0]} has {found} links for {len(devices)} columns"
            + (f", then {wrong!r}" if wrong else ""),
            evidence="Links are X, NV#, PIX, PXB, PHB, NODE, SYS or N/A. The text was cut or wrapped at the width of a "
            "terminal, or is not of nvidia-smi topo -m.",
            next_step=_HOW,
        )
    for device, cell in zip(devices, cells, strict=True):
        if device != words[0]:
            links[words[0], device] = "SYS" if cell == "SOC" else "N/A" if cell == "X" else cell


def _leading(cells: Sequence[str]) -> Iterator[str]:
    for cell in cells:
        if not _LABEL.fullmatch(cell):
            return
        yield cell


def _read_affinity(words: Sequence[str], trailing: Sequence[str]) -> Affinity:
    """The columns after the links. Where a cell is empty, a list of CPUs is told by its dash or comma."""
    names = [_AFFINITY[column] for column in trailing]
    if len(words) < len(names) and "cpus" in names and not (words and re.search(r"[-,]", words[0])):
        names.remove("cpus")
    values = {name: word for name, word in zip(names, words, strict=False) if word != "N/A"}
    return Affinity(cpus=values.get("cpus"), numa=values.get("numa"))


def _fill(devices: Sequence[str], rows: set[str], links: dict[tuple[str, str], str]) -> None:
    """Links of devices that have a column but no row: the same the other way."""
    for one in devices:
        for other in devices:
            if one != other and one not in rows:
                links[one, other] = links.get((other, one), "N/A")
