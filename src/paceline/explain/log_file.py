"""Reads training logs of Megatron-LM, torchtitan and the Hugging Face Trainer, and what NCCL and its watchdog write.

Lines are searched, not matched whole: streams of several processes get glued together, and prefixes are added by
launchers. A field that is not there stays unknown.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError

Framework = Literal["Megatron-LM", "torchtitan", "Hugging Face Trainer", "unknown"]

_NUMBER = r"[-+\d.eE]+|nan|inf"
_MEGATRON = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|")
_MEGATRON_FIELDS = {
    "seconds": (re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)"), 1e-3),
    "tflops": (re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)"), 1.0),
    "samples": (re.compile(r"consumed samples:\s+(\d+)"), 1.0),
    "batch": (re.compile(r"global batch size:\s+(\d+)"), 1.0),
    "loss": (re.compile(rf"lm loss: ({_NUMBER})"), 1.0),
    "grad_norm": (re.compile(rf"grad norm: ({_NUMBER})"), 1.0),
    "skipped": (re.compile(r"number of skipped iterations:\s+(\d+)"), 1.0),
}
_TITAN = re.compile(r"step:\s*(\d+)\s+loss:\s*(" + _NUMBER + r")")
_TITAN_FIELDS = {
    "grad_norm": (re.compile(rf"grad_norm:\s*({_NUMBER})"), 1.0),
    "memory_gib": (re.compile(r"memory:\s*([\d.]+)GiB"), 1.0),
    "memory_share": (re.compile(r"memory:\s*[\d.]+GiB\(([\d.]+)%\)"), 1e-2),
    "tokens_per_second": (re.compile(r"(?:tps|wps):\s*([\d,.]+)"), 1.0),
    "tflops": (re.compile(r"tflops:\s*([\d,.]+)"), 1.0),
    "mfu": (re.compile(r"mfu:\s*([\d.]+)%"), 1e-2),
    "seconds": (re.compile(r"time_metrics/end_to_end\(s\):\s*([\d.]+)"), 1.0),
    "data_seconds": (re.compile(r"time_metrics/data_loading\(s\):\s*([\d.]+)"), 1.0),
}
_HF = re.compile(r"\{'(?:loss|eval_loss|train_runtime|grad_norm|learning_rate)'[^{}]*\}")
_TQDM = re.compile(r"\|\s*(\d+)/(\d+)\s*\[([\d:]+)<([\d:?]+),\s*([\d.]+)(s/it|it/s)\]?")
_ARGUMENT = re.compile(r"^\s*(?:\[?(?:default)?\d*\]?:?)?\s*([a-z][a-z0-9_]+) \.{3,} (.+?)\s*$")
_TIMER = re.compile(r"^\s*([a-z0-9-]+) \.{3,}: \(([\d.]+), ([\d.]+)\)")
_WATCHDOG = re.compile(
    r"\[Rank (\d+)\].*?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
    r"(?:, NumelIn=(\d+))?(?:, NumelOut=(\d+))?"
)
_LAST = re.compile(r"\[Rank (\d+)\].*?last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)")
_NETWORK = re.compile(
    r"NCCL INFO (?:NET/IB : No device found|NET/Socket : Using|Using network (\w+)|NET/IB : Using)|"
    r"NET/IB : No device found|Using network (Socket|IB|AWS Libfabric|\w+)"
)
_DISABLED = re.compile(r"NCCL_IB_DISABLE (?:set by environment to|=) ?1|NCCL_IB_DISABLE=1")
_OURS = re.compile(
    r"^(?:.*INFO (?:[\w.]+: )?)?(?:step \d+(?:/| of )\d+ .*|(?:data|mesh|model) ready after .*|first step after .*)"
)
"""`observe/progress.py` and `training/run.py` write these."""
_OUR_FOLDER = re.compile(r"(?:run folder[: ]+|checkpoint of step \d+: )([^\s,]+?)(?:/checkpoints/\S*)?$")
_WORLD = re.compile(r"using world size: (\d+)")


@dataclass(frozen=True, kw_only=True)
class LogStep:
    """One logged step; nan where the line does not say."""

    step: int
    seconds: float = math.nan
    tflops: float = math.nan
    tokens_per_second: float = math.nan
    """Of one GPU."""
    loss: float = math.nan
    batch: float = math.nan
    """Sequences."""
    mfu: float = math.nan
    memory_gib: float = math.nan
    memory_share: float = math.nan
    data_seconds: float = math.nan
    grad_norm: float = math.nan
    skipped: float = math.nan


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """What the watchdog of a rank said."""

    rank: int
    sequence: int
    operation: str
    elements: int | None
    enqueued: int | None = None
    completed: int | None = None


@dataclass(frozen=True, kw_only=True)
class LogData:
    path: Path
    framework: Framework
    steps: tuple[LogStep, ...]
    total_steps: int | None
    arguments: Mapping[str, str]
    """Megatron-LM's printed arguments, or flags of its command line, with underscores."""
    timers: Mapping[str, tuple[float, float]]
    """Milliseconds: (least, most) over ranks, the newest."""
    stuck: tuple[Stuck, ...]
    network: frozenset[str]
    """Of ``socket``, ``ib``, ``no ib device``, ``ib disabled``."""
    summary: Mapping[str, float]
    """What the Hugging Face Trainer prints at the end."""
    lines: int
    problems: tuple[str, ...] = field(default=())

    def number(self, name: str) -> float:
        """An argument as a number, nan where it is not one."""
        try:
            return float(self.arguments[name])
        except (KeyError, ValueError):
            return math.nan

    def is_on(self, name: str) -> bool | None:
        """An argument as a switch; None where the log does not print it."""
        value = self.arguments.get(name)
        return None if value is None else value.lower() not in ("false", "none", "0", "")


def read_log(path: Path) -> LogData:
    """Reads a log.

    Raises:
        ConfigError: it cannot be read, or nothing in it is known.
    """
    try:
        if path.suffix == ".json":
            return _trainer_state(path)
        with path.open(encoding="utf-8", errors="replace") as file:
            return read_lines(path, file)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read", evidence=str(error), next_step="Give a run folder, a trace or a log."
        ) from error


def read_lines(path: Path, lines: Iterable[str]) -> LogData:
    """As `read_log`, from lines.

    Raises:
        ConfigError: nothing in them is known.
    """
    found = _Found()
    number = 0
    for line in lines:
        number += 1
        # a progress bar writes its lines with carriage returns
        for part in line.split("\r"):
            found.take(part)
    if not found.known and found.ours:
        raise ConfigError(
            f"{path} is the output of `paceline train`, whose run folder says more",
            evidence=f"For example this line: {found.ours}",
            next_step=f"Give the run folder: `paceline explain {found.folder or 'runs/NAME'}`.",
        )
    if not found.known:
        raise ConfigError(
            f"{path} is no log that is known here",
            evidence=f"None of its {number:,} lines is one of Megatron-LM, torchtitan, the Hugging Face "
            "Trainer, NCCL or "
            "its watchdog.",
            next_step="Give the file with the training output. Megatron-LM prints a line every --log-interval "
            "steps, and "
            "TFLOP/s with --log-throughput.",
        )
    return found.data(path, number)


class _Found:
    def __init__(self) -> None:
        self.steps: dict[tuple[str, int], dict[str, float]] = {}
        self.counts = {"Megatron-LM": 0, "torchtitan": 0, "Hugging Face Trainer": 0}
        self.total: int | None = None
        self.arguments: dict[str, str] = {}
        self.timers: dict[str, tuple[float, float]] = {}
        self.stuck: dict[int, Stuck] = {}
        self.last: dict[int, tuple[int, int]] = {}
        self.network: set[str] = set()
        self.summary: dict[str, float] = {}
        self._hf_step = 0
        self.ours = self.folder = ""
        """A line of Paceline's own console, and the run folder that it names."""

    @property
    def known(self) -> bool:
        return bool(self.steps or self.stuck or self.network or self.summary or self.last)

    def take(self, line: str) -> None:
        if "iteration" in line and "|" in line:
            self._megatron(line)
        if "loss:" in line and "step:" in line:
            self._titan(line)
        if "{'" in line:
            self._trainer(line)
        if "it/s" in line or "s/it" in line:
            self._bar(line)
        if " ..." in line:
            self._dotted(line)
        if "Rank" in line and ("Watchdog" in line or "last enqueued" in line):
            self._watchdog(line)
        if "NET" in line or "network" in line or "NCCL_IB_DISABLE" in line:
            self._transport(line)
        if "--" in line and ("pretrain" in line or "torchrun" in line or "--tensor-model-parallel-size" in line):
            self._flags(line)
        if not self.ours and (match := _OURS.search(line)):
            self.ours = match[0].strip()
        if not self.folder and (match := _OUR_FOLDER.search(line)):
            self.folder = match[1]
        world = _WORLD.search(line)
        if world:
            self.arguments.setdefault("world_size", world[1])

    def _megatron(self, line: str) -> None:
        # two records may be glued into one line
        starts = [match.start() for match in _MEGATRON.finditer(line)] + [len(line)]
        for begin, end in pairwise(starts):
            part = line[begin:end]
            match = _MEGATRON.search(part)
            if match is None or "elapsed time" not in part:
                continue
            self.total = int(match[2])
            self._add("Megatron-LM", int(match[1]), part, _MEGATRON_FIELDS)

    def _titan(self, line: str) -> None:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        match = _TITAN.search(plain)
        if match:
            self._add("torchtitan", int(match[1]), plain, _TITAN_FIELDS, loss=_float(match[2]))

    def _add(
        self, framework: str, step: int, text: str, fields: Mapping[str, tuple[re.Pattern[str], float]], **more: float
    ) -> None:
        values = dict(more)
        for name, (pattern, factor) in fields.items():
            match = pattern.search(text)
            if match:
                values[name] = _float(match[1].replace(",", "")) * factor
        self.steps.setdefault((framework, step), {}).update(values)
        self.counts[framework] += 1

    def _trainer(self, line: str) -> None:
        for text in _HF.findall(line):
            try:
                values = ast.literal_eval(text.replace(": nan", ": None"))
            except (ValueError, SyntaxError):
                continue
            if isinstance(values, dict):
                self.trainer(values)

    def trainer(self, values: Mapping[str, Any]) -> None:
        numbers = {name: _float(value) for name, value in values.items() if isinstance(value, int | float | str)}
        if "train_runtime" in numbers:
            self.summary.update(numbers)
        elif "loss" in numbers:
            # lines carry no step of their own; a progress bar beside them does
            step = int(numbers.get("step", self._hf_step or len(self.steps) + 1))
            kept: dict[str, float] = {name: numbers[name] for name in ("loss", "grad_norm") if name in numbers}
            self.steps.setdefault(("Hugging Face Trainer", step), {}).update(kept)
            self.counts["Hugging Face Trainer"] += 1

    def _bar(self, line: str) -> None:
        match = _TQDM.search(line)
        if match is None:
            return
        step, pace = int(match[1]), float(match[5])
        self._hf_step = step
        self.total = int(match[2])
        if step and pace > 0:
            seconds = pace if match[6] == "s/it" else 1 / pace
            self.steps.setdefault(("Hugging Face Trainer", step), {})["seconds"] = seconds
            self.counts["Hugging Face Trainer"] += 1

    def _dotted(self, line: str) -> None:
        timer = _TIMER.match(line)
        if timer:
            self.timers[timer[1]] = float(timer[2]), float(timer[3])
            return
        argument = _ARGUMENT.match(line)
        if argument and ":" not in argument[1]:
            self.arguments[argument[1]] = argument[2]

    def _flags(self, line: str) -> None:
        words = line.split()
        for word, following in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--") and len(word) > 2:
                name, _, value = word[2:].partition("=")
                self.arguments.setdefault(
                    name.replace("-", "_"), value or ("True" if following.startswith("--") else following)
                )

    def _watchdog(self, line: str) -> None:
        match = _WATCHDOG.search(line)
        if match:
            rank = int(match[1])
            self.stuck[rank] = Stuck(
                rank=rank,
                sequence=int(match[2]),
                operation=match[3],
                elements=int(match[4]) if match[4] else None,
            )
        last = _LAST.search(line)
        if last:
            self.last[int(last[1])] = int(last[2]), int(last[3])

    def _transport(self, line: str) -> None:
        if _DISABLED.search(line):
            self.network.add("ib disabled")
        if _NETWORK.search(line) is None:
            return
        if "No device found" in line:
            self.network.add("no ib device")
        elif "Socket" in line:
            self.network.add("socket")
        elif "NET/IB : Using" in line or "Using network IB" in line:
            self.network.add("ib")

    def data(self, path: Path, lines: int) -> LogData:
        framework = max(self.counts, key=lambda name: self.counts[name])
        if not self.counts[framework]:
            framework = "Hugging Face Trainer" if self.summary else "unknown"
        steps = sorted((step, values) for (kind, step), values in self.steps.items() if kind == framework)
        stuck = [
            Stuck(
                rank=one.rank,
                sequence=one.sequence,
                operation=one.operation,
                elements=one.elements,
                enqueued=self.last.get(one.rank, (None, None))[0],
                completed=self.last.get(one.rank, (None, None))[1],
            )
            for one in self.stuck.values()
        ]
        allowed = LogStep.__dataclass_fields__
        return LogData(
            path=path,
            framework=framework,  # type: ignore[arg-type]
            steps=tuple(
                LogStep(step=step, **{name: value for name, value in values.items() if name in allowed})
                for step, values in steps
            ),
            total_steps=self.total,
            arguments=self.arguments,
            timers=self.timers,
            stuck=tuple(sorted(stuck, key=lambda one: one.rank)),
            network=frozenset(self.network),
            summary=self.summary,
            lines=lines,
        )


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _trainer_state(path: Path) -> LogData:
    """The ``trainer_state.json`` of the Hugging Face Trainer."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = state["log_history"]
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no trainer_state.json of the Hugging Face Trainer and no trace",
            evidence=f"{type(error).__name__}: {error}",
            next_step="Give a run folder, a trace or a log.",
        ) from error
    found = _Found()
    for entry in history:
        if isinstance(entry, dict):
            found.trainer(entry)
    found.total = state.get("max_steps")
    return found.data(path, len(history))
