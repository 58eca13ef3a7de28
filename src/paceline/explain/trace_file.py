"""Reads a Kineto or Perfetto JSON trace, plain or gzipped, of any size: one event at a time.

A trace of gigabytes is never whole in memory. Kept are times, kind, stream and correlation of GPU activity as arrays,
and of the host what is needed to judge it: runtime calls by correlation, user annotations, operators with shapes. A
file that ends in the middle of an event is read up to there.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.explain.kinds import kind_index
from paceline.explain.trace_events import Events, finite, number_of, open_trace, whole_event, why_no_events

_GPU = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"))
_RUNTIME = frozenset(("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime"))
_SPANS = frozenset(("user_annotation", "gpu_user_annotation"))


@dataclass(frozen=True, kw_only=True)
class TraceData:
    """GPU activity of one process, by start. Times in seconds from the first event.

    ``kind``: index into `kinds.KINDS`. ``launched``: when the host called the runtime for it, nan where unknown.
    """

    path: Path
    rank: int | None
    world_size: int | None
    device: str
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    kind: NDArray[np.int16]
    stream: NDArray[np.int32]
    name: NDArray[np.int32]
    names: tuple[str, ...]
    launched: NDArray[np.float64]
    bytes_moved: NDArray[np.float64]
    """Of copies, and of collectives where the trace tells their size; nan elsewhere."""
    group: NDArray[np.int32]
    """Process group of a collective as an index into ``groups``, -1 elsewhere."""
    groups: tuple[str, ...]
    spans: Mapping[str, tuple[tuple[float, float], ...]]
    """User annotations of the host by name: (start, end)."""
    waits: Mapping[str, int]
    """How often the host waited for the GPU, by the runtime's call: ``cudaStreamSynchronize`` and its like."""
    host_ops: int
    host_seconds: float
    """From the first to the last event of the host."""
    began: float
    """Seconds of the first event on the trace's own clock."""
    truncated: bool
    problems: tuple[str, ...] = field(default=())

    @property
    def seconds(self) -> float:
        """From the first kernel to the end of the last."""
        return float(self.end.max() - self.start.min()) if len(self.start) else 0.0


class _Collected:
    def __init__(self) -> None:
        self.start, self.length = array("d"), array("d")
        self.stream, self.name, self.correlation = array("i"), array("i"), array("q")
        self.kind = array("h")
        self.bytes_moved, self.group = array("d"), array("i")
        self.names: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.kind_of_name: dict[int, int] = {}
        self.launches: dict[int, float] = {}
        self.launch_ids, self.launch_times = array("q"), array("d")
        self.spans: dict[str, list[tuple[float, float]]] = {}
        self.waits: Counter[str] = Counter()
        self.host_ops = 0
        self.host_first, self.host_last = float("inf"), float("-inf")

    def take(self, event: Mapping[str, Any]) -> None:
        """A whole event (`trace_events.whole_event`)."""
        if event.get("ph") != "X":
            return
        category = event.get("cat")
        start, length = event["ts"], event["dur"]
        if category in _GPU:
            self._gpu(event, start, length)
        elif category in _RUNTIME:
            self._host(start, length)
            name = str(event.get("name", ""))
            if "Synchronize" in name:
                self.waits[name[:200]] += 1
            correlation = number_of((event.get("args") or {}).get("correlation"))
            if correlation >= 0:
                self.launch_ids.append(correlation)
                self.launch_times.append(start)
        elif category == "cpu_op":
            self.host_ops += 1
            self._host(start, length)
        elif category in _SPANS and category == "user_annotation":
            self._host(start, length)
            spans = self.spans.setdefault(str(event.get("name", ""))[:200], [])
            if len(spans) < 100_000:
                spans.append((start, start + length))

    def _host(self, start: float, length: float) -> None:
        self.host_first = min(self.host_first, start)
        self.host_last = max(self.host_last, start + length)

    def _gpu(self, event: Mapping[str, Any], start: float, length: float) -> None:
        arguments = event.get("args") or {}
        text = str(event.get("name", ""))
        name = self.names.setdefault(text, len(self.names))
        if name not in self.kind_of_name:
            self.kind_of_name[name] = kind_index(text, str(event.get("cat", "")).lower())
        self.start.append(start)
        self.length.append(length)
        self.name.append(name)
        self.kind.append(self.kind_of_name[name])
        stream = arguments.get("stream", event.get("tid", -1))
        self.stream.append(number_of(stream, 32))
        correlation = arguments.get("correlation", arguments.get("External id", -1))
        self.correlation.append(number_of(correlation))
        self.bytes_moved.append(_bytes(arguments))
        group = arguments.get("Process Group Name") or arguments.get("Process Group Ranks")
        self.group.append(-1 if group is None else self.groups.setdefault(str(group), len(self.groups)))


_WIDTHS = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}


def _bytes(arguments: Mapping[str, Any]) -> float:
    moved = finite(arguments.get("bytes"))
    if moved is not None:
        return moved
    counted = (finite(arguments.get("In msg nelems")), finite(arguments.get("Out msg nelems")))
    elements = max((each for each in counted if each is not None), default=None)
    return float("nan") if elements is None else elements * _WIDTHS.get(str(arguments.get("dtype")), 2)


def read_trace(path: Path, *, report: Callable[[int], object] = lambda done: None) -> TraceData:
    """Streams a trace.

    Args:
        report: told of the bytes read now and then.

    Raises:
        ConfigError: the file is missing, or no trace.
    """
    collected = _Collected()
    problems: list[str] = []
    truncated = False
    events = 0
    malformed: list[int] = []
    try:
        with open_trace(path) as file:
            reader = Events(file, report)
            for event in reader:
                events += 1
                taken = whole_event(event) if isinstance(event, dict) else None
                if taken is not None:
                    collected.take(taken)
                else:
                    malformed.append(events)
            truncated = reader.truncated
            head, reason, damaged = reader.head, why_no_events(file, reader), getattr(file, "damaged", False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", evidence=str(error), next_step="Give a trace file.") from error
    if not events:
        raise ConfigError(
            f"{path} is no Kineto or Perfetto JSON trace: {reason}",
            evidence=f"It begins with {head[:60]!r}." if head else "",
            next_step="Export it with torch.profiler: prof.export_chrome_trace('trace.json.gz').",
        )
    if truncated:
        ends = "is a damaged gzip file" if damaged else "ends in the middle"
        problems.append(f"{path.name} {ends}; read are the {events:,} events before")
    if malformed:
        problems.append(
            f"{path.name}: {len(malformed):,} of {events:,} events are malformed and left out, the first is number "
            f"{malformed[0]:,}"
        )
    return _finish(path, collected, _facts(head), truncated, problems)


def _facts(head: bytes) -> Mapping[str, Any]:
    """What stands before the events: devices, distributedInfo. Closed by hand, since the rest is not there."""
    text = head.decode(errors="replace").rstrip().rstrip(",")
    for ending in ("}", "]}", '"}', ""):
        try:
            found = json.loads(text + ending, strict=False)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _finish(path: Path, found: _Collected, facts: Mapping[str, Any], truncated: bool, problems: list[str]) -> TraceData:
    start = np.frombuffer(found.start, dtype=np.float64) if found.start else np.zeros(0)
    length = np.frombuffer(found.length, dtype=np.float64) if found.length else np.zeros(0)
    order = np.argsort(start, kind="stable")
    begin = min(float(start.min()) if len(start) else found.host_first, found.host_first)
    begin = 0.0 if begin == float("inf") else begin

    def column(values: array[Any], dtype: Any) -> NDArray[Any]:
        return np.frombuffer(values, dtype=dtype)[order].copy() if values else np.zeros(0, dtype=dtype)

    properties, distributed = facts.get("deviceProperties"), facts.get("distributedInfo")
    properties = properties if isinstance(properties, list) and properties else [{}]
    distributed = distributed if isinstance(distributed, dict) else {}
    return TraceData(
        path=path,
        rank=distributed.get("rank") if isinstance(distributed.get("rank"), int) else None,
        world_size=distributed.get("world_size") if isinstance(distributed.get("world_size"), int) else None,
        device=str(properties[0].get("name", "")) if isinstance(properties[0], dict) else "",
        start=(start[order] - begin) * 1e-6,
        end=(start[order] + length[order] - begin) * 1e-6,
        kind=column(found.kind, np.int16),
        stream=column(found.stream, np.int32),
        name=column(found.name, np.int32),
        names=tuple(found.names),
        launched=_launched(found, column(found.correlation, np.int64), begin),
        bytes_moved=column(found.bytes_moved, np.float64),
        group=column(found.group, np.int32),
        groups=tuple(found.groups),
        spans={
            name: tuple(((a - begin) * 1e-6, (b - begin) * 1e-6) for a, b in spans)
            for name, spans in found.spans.items()
        },
        waits=dict(found.waits.most_common()),
        host_ops=found.host_ops,
        host_seconds=max(0.0, found.host_last - found.host_first) * 1e-6 if found.host_ops else 0.0,
        began=begin * 1e-6,
        truncated=truncated,
        problems=tuple(problems),
    )


def _launched(found: _Collected, correlation: NDArray[np.int64], begin: float) -> NDArray[np.float64]:
    if not found.launch_ids or not len(correlation):
        return np.full(len(correlation), np.nan)
    ids = np.frombuffer(found.launch_ids, dtype=np.int64)
    times = np.frombuffer(found.launch_times, dtype=np.float64)
    order = np.argsort(ids, kind="stable")
    ids, times = ids[order], times[order]
    place = np.minimum(np.searchsorted(ids, correlation), len(ids) - 1)
    return np.where(ids[place] == correlation, (times[place] - begin) * 1e-6, np.nan)
