"""What did NCCL say? Lines of ``NCCL_DEBUG=INFO``, of any version and any number of ranks, in one pass.

A line is ``host:process:thread [device] file.cc:line NCCL LEVEL text``; launchers put their own words before it. Lines
that lack the beginning, as in excerpts of bug reports, are read for what they say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_LINE = re.compile(
    r"(?P<host>[^\s:\[\]()]+):(?P<process>\d+):(?P<thread>\d+)\s+\[(?P<device>-?\d+)\]\s+"
    r"(?:(?P<file>\S+?:\d+)\s+)?NCCL\s+(?P<level>INFO|WARN|ATTN|TRACE|ABORT|CALL)\s+(?P<text>.*)"
)
_SHORT = re.compile(r"(?:(?P<file>\S+\.cc:\d+)\s+)?NCCL\s+(?P<level>INFO|WARN|ATTN)\s+(?P<text>.*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

_VERSION = re.compile(r"NCCL version (\d[\w.]*)(?:\+cuda([\d.]+))?")
_DRIVER = re.compile(r"cudaDriverVersion (\d+)")
_SETTING = re.compile(r"\b(NCCL_[A-Z0-9_]+) set by environment to (.*?)\.?\s*$")
_NETWORK = re.compile(r"Using network (.+?)\s*$")
_CARDS = re.compile(r"NET/IB\w* : Using (.*)")
_CARD = re.compile(r"\[\d+\]([^\s:;]+:\d+/[\w/]+)")
_INTERFACE = re.compile(r"(?:Bootstrap ?: Using|NET/Socket ?: Using|OOB) (?:\[\d+\])?([\w.\-@]+):")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)?\s*:\s*(?P<from>\d+)(?:\[[^\]]*\])? -> (?P<to>\d+)(?:\[[^\]]*\])? "
    r"(?:\[(?P<way>send|receive)\] )?via (?P<via>.*?)(?:/Shared)?\s*(?:comm 0x.*)?$"
)
_RING = re.compile(r"(?:Channel|Ring) (\d+)(?:/(\d+))?\s*:((?:\s+\d+)+)\s*$")
_COUNTS = re.compile(r"(\d+) coll channels")
_KINDS = re.compile(r"(\d+) (coll|collnet|nvls|p2p) channels")
_INIT = re.compile(r"\brank (\d+) nranks (\d+) .*?(?:commId (\w+))? ?- Init (START|COMPLETE)")
_GDR = re.compile(r"GPU Direct RDMA (Enabled|Disabled)")
_SEEN = re.compile(
    r"NET/|Bootstrap|Using network|NCCL_[A-Z]|via (?:P2P|SHM|NET)|Connected all|coll channels|NVLS|posix_fallocate|"
    r"shared memory segment|Watchdog caught|WorkNCCL|last enqueued NCCL|CUDA error 802|Net : |NCCL version"
)


@dataclass
class NcclLog:
    """Counts and sets; a log of any length takes little room."""

    lines: int = 0
    hosts: set[str] = field(default_factory=set)
    versions: Counter[str] = field(default_factory=Counter)
    driver_cuda: set[int] = field(default_factory=set)
    """13000 is CUDA 13.0."""
    settings: dict[str, str] = field(default_factory=dict)
    networks: Counter[str] = field(default_factory=Counter)
    cards: set[str] = field(default_factory=set)
    """``mlx5_0:1/IB``."""
    interfaces: set[str] = field(default_factory=set)
    no_device: int = 0
    """Lines that say that NET/IB found no device."""
    plugin: Counter[str] = field(default_factory=Counter)
    """What was said of the network plugin."""
    transports: Counter[str] = field(default_factory=Counter)
    """``P2P/CUMEM``, ``NET/IB/GDRDMA``: connections of each, without the number of the card."""
    pairs: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Of each transport."""
    gdr: Counter[str] = field(default_factory=Counter)
    rings: dict[int, tuple[int, ...]] = field(default_factory=dict)
    channels: Counter[str] = field(default_factory=Counter)
    """The most of coll, collnet, nvls and p2p channels."""
    nvls: Counter[str] = field(default_factory=Counter)
    """``available`` and ``not available``."""
    num_ranks: int = 0
    started: set[tuple[str, int]] = field(default_factory=set)
    """(communicator, rank)."""
    completed: set[tuple[str, int]] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    """Ranks of a communicator."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Texts of WARN lines, with their file, addresses and numbers of processes left out."""
    others: list[str] = field(default_factory=list)
    """Lines of torch and CUDA that speak of failures."""

    @property
    def spans_nodes(self) -> bool | None:
        """None where the log does not tell."""
        if len(self.hosts) > 1:
            return True
        if any(name.startswith("NET/") for name in self.transports):
            return True
        whole = self.hosts and self.num_ranks and len({rank for _, rank in self.started}) >= self.num_ranks
        return False if whole or (self.transports and self.hosts) else None


def read_log(lines: Iterable[str]) -> NcclLog:
    """Everything that the lines tell; ``log.lines`` is 0 where none is of NCCL."""
    log = NcclLog()
    for raw in lines:
        line = _ANSI.sub("", raw).strip()
        match = _LINE.search(line) or _SHORT.search(line)
        if match is None:
            if _SEEN.search(line):
                log.lines += 1
                _read_text(log, line)
                _read_failure(log, line)
            continue
        log.lines += 1
        found = match.groupdict()
        if found.get("host"):
            log.hosts.add(found["host"])
        text = found["text"]
        if found["level"] == "WARN":
            log.warnings[_without_numbers(f"{found.get('file') or ''} {text}".strip())] += 1
        _read_text(log, text)
    return log


def _read_text(log: NcclLog, text: str) -> None:
    if match := _VERSION.search(text):
        log.versions[match[1] + (f" (CUDA {match[2]})" if match[2] else "")] += 1
    if match := _DRIVER.search(text):
        log.driver_cuda.add(int(match[1]))
    if match := _SETTING.search(text):
        log.settings[match[1]] = match[2]
    if match := _NETWORK.search(text):
        log.networks[match[1]] += 1
    if match := _CARDS.search(text):
        log.cards.update(_CARD.findall(match[1]))
    if match := _INTERFACE.search(text):
        log.interfaces.add(match[1])
    if re.search(r"NET/IB\w* : No device found", text):
        log.no_device += 1
    if "NET/Plugin" in text:
        log.plugin[text.partition("NET/Plugin")[2].strip(" :")[:120]] += 1
    if match := _GDR.search(text):
        log.gdr[match[1]] += 1
    if "NVLS multicast support is" in text:
        log.nvls["not available" if "not available" in text else "available"] += 1
    _read_channels(log, text)
    if match := _INIT.search(text):
        rank, size, name = int(match[1]), int(match[2]), match[3] or ""
        log.num_ranks = max(log.num_ranks, size)
        log.sizes[name] = size
        (log.started if match[4] == "START" else log.completed).add((name, rank))


def _read_channels(log: NcclLog, text: str) -> None:
    if match := _CHANNEL.search(text):
        name = re.sub(r"^(NET/[^/]+)/\d+", r"\1", match["via"])
        log.transports[name] += 1
        log.pairs.setdefault(name, set()).add((int(match["from"]), int(match["to"])))
    elif match := _RING.search(text):
        log.rings[int(match[1])] = tuple(map(int, match[3].split()))
    if _COUNTS.search(text):
        for count, kind in _KINDS.findall(text):
            log.channels[kind] = max(log.channels[kind], int(count))


def _read_failure(log: NcclLog, line: str) -> None:
    if re.search(r"Watchdog caught|WorkNCCL|last enqueued", line) or not line.startswith(("NET/", "Using", "NCCL")):
        log.others.append(line[:1000])


def _without_numbers(text: str) -> str:
    """So that the same warning of many ranks counts as one."""
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "<ip>", text)
    text = re.sub(r"<\d+>", "<port>", text)
    text = re.sub(r"0x[0-9a-f]+", "<address>", text)
    return re.sub(r"(recv|send)-[\w-]+", r"\1-...", text)
