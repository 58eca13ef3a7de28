"""What a person wants to know when a run is over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.observe.events import StepRecord, read_metrics, write_atomically
from paceline.report import units
from paceline.training.start_up import phases_line
from paceline.training.validate import Evaluation

SUMMARY = "summary.json"
"""In the run folder."""
WARM_UP_RECORDS = 1
"""Logged steps at the start that speeds leave out: compilation, first allocations, a cold cache."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run in a few numbers; also written to ``summary.json``."""

    run_dir: str
    steps: int
    total_steps: int
    stopped_by: str
    tokens: int
    parameters: int
    loss_first: float | None
    loss_last: float | None
    evaluation: dict[str, float]
    """`loss`, `perplexity`, `bits_per_byte`, `unigram_bits_per_byte` on the held-out data; empty without any."""
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    flops_per_token: float | None
    flops_convention: str
    peak_tflops: float | None
    memory_gib: float | None
    skipped_steps: int
    devices: str
    samples: tuple[tuple[str, str], ...] = ()
    """(prompt, continuation)"""
    made_up_tokens: bool = False
    """trained on synthetic data: it has no text to continue"""
    is_score: bool = False
    """a reward model, which does not speak"""
    is_chat: bool = False
    """trained on conversations: it is asked through its chat template"""
    start_up: Mapping[str, float] = field(default_factory=dict)
    """seconds of each phase of the last start, from the command to the end of its first step"""
    tokens_per_joule: float | None = None
    """tokens of the run / energy of all devices; None where a device does not count its energy"""

    def write(self, folder: Path) -> None:
        write_atomically(folder / SUMMARY, json.dumps(asdict(self), indent=2) + "\n")

    def lines(self) -> list[tuple[str, str]]:
        """(title, text) for the terminal."""
        rows = [
            (
                "steps",
                f"{self.steps} of {self.total_steps}" + (f" (stopped: {self.stopped_by})" * bool(self.stopped_by)),
            )
        ]
        rows.append(("tokens", f"{units.count(self.tokens)} into {units.count(self.parameters)} parameters"))
        if self.loss_first is not None and self.loss_last is not None:
            rows.append(("training loss", f"{self.loss_first:.3f} -> {self.loss_last:.3f}"))
        rows += self._held_out()
        rows += self._speed()
        if self.skipped_steps:
            rows.append(("skipped steps", f"{self.skipped_steps} (loss or gradient not finite)"))
        if self.start_up:
            rows.append(("to the first step", phases_line(self.start_up)))
        rows.append(("run folder", self.run_dir))
        return rows

    def _held_out(self) -> list[tuple[str, str]]:
        found = self.evaluation
        if not found:
            return []
        if "perplexity" not in found:
            of = ", ".join(f"{found[name]:,.0f} {name}" for name in ("pairs", "examples") if name in found)
            more = "".join(
                f", {name.replace('_', ' ')} {found[name]:.3f}"
                for name in ("reward_accuracy", "reward_margin", "kl")
                if name in found
            )
            return [("held-out loss", f"{found['loss']:.4f} over {of}{more}")]
        rows = [("held-out loss", f"{found['loss']:.3f} nats a token, perplexity {found['perplexity']:.1f}")]
        if "bits_per_byte" in found:
            ours, base = found["bits_per_byte"], found["unigram_bits_per_byte"]
            rows.append(
                ("bits per byte", f"{ours:.3f}; unigram model on the same tokens {base:.3f}; ratio {ours / base:.3f}")
            )
        return rows

    def _speed(self) -> list[tuple[str, str]]:
        if self.tokens_per_second is None or self.tokens_per_second_per_gpu is None:
            return []
        rows = [
            (
                "throughput",
                f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_second_per_gpu:,.0f} per device "
                f"({self.devices})",
            )
        ]
        if self.tflops_per_gpu is not None and self.flops_per_token is not None:
            rows.append(
                (
                    "model FLOP/s",
                    f"{self.tflops_per_gpu:.3g} TFLOP/s per device = tokens/s x {self.flops_per_token / 1e9:.4g} GFLOP "
                    f"a token (attention {self.flops_convention}, recomputation not counted)",
                )
            )
        if self.mfu is not None:
            rows.append(("MFU", f"{self.mfu:.1%} = model FLOP/s / peak of {self.peak_tflops:g} TFLOP/s"))
        if self.memory_gib is not None:
            rows.append(("peak memory", f"{self.memory_gib:.2f} GiB per device"))
        if self.tokens_per_joule is not None:
            rows.append(("energy", f"{self.tokens_per_joule:.3g} tokens a joule of the devices"))
        return rows


def lacks_summary(folder: Path, steps: int) -> bool:
    """Whether a run that has trained ``steps``, all of its recipe, was cut off before it summed them up.

    A folder without metrics has nothing to sum up: a converted checkpoint, say.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() or not metrics.stat().st_size:
        return False
    try:
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return bool(found["stopped_by"]) or int(found["steps"]) < steps
    except (OSError, ValueError, KeyError, TypeError):
        return True


def speed_of(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Means over the logged steps after the first, each weighted by the steps it stands for."""
    usable = records[WARM_UP_RECORDS:] or list(records)
    if not usable:
        names = ("tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "memory_gib", "tokens_per_joule")
        return dict.fromkeys(names)
    before = dict(zip((r.step for r in records[1:]), (r.step for r in records[:-1]), strict=False))
    weights = [record.step - before.get(record.step, record.step - 1) for record in usable]
    seconds = sum(weight * record.step_seconds for weight, record in zip(weights, usable, strict=True))
    mean_step = seconds / sum(weights)
    last = usable[-1]
    scale = last.step_seconds / mean_step
    return {
        "tokens_per_second_per_gpu": last.tokens_per_second_per_gpu * scale,
        "tflops_per_gpu": None if last.tflops_per_gpu is None else last.tflops_per_gpu * scale,
        "mfu": None if last.mfu is None else last.mfu * scale,
        "memory_gib": max(record.memory_gib for record in records),
        "tokens_per_joule": _tokens_per_joule(usable, weights),
    }


def _tokens_per_joule(records: Sequence[StepRecord], weights: Sequence[int]) -> float | None:
    """Tokens over joules of the steps that the records stand for; None where one of them does not know its energy."""
    rates = [record.extra.get("tokens_per_joule") for record in records]
    known = [rate for rate in rates if isinstance(rate, float) and rate > 0]
    if len(known) < len(rates):
        return None
    return sum(weights) / sum(weight / rate for weight, rate in zip(weights, known, strict=True))


def summarize(
    folder: Path,
    *,
    steps: int,
    total_steps: int,
    tokens: int,
    stopped_by: str,
    parameters: int,
    world_size: int,
    devices: str,
    flops_per_token: float | None,
    evaluation: Evaluation | None,
    samples: Sequence[tuple[str, str]] = (),
    made_up_tokens: bool = False,
    is_score: bool = False,
    is_chat: bool = False,
    start_up: Mapping[str, float] | None = None,
) -> Summary:
    """Reads the run folder's own metrics, so that a resumed run is summed up whole.

    ``steps`` and ``tokens`` are those of the run: one that was stopped may stand some steps after its last metrics.
    """
    records = read_metrics(folder)
    speed = speed_of(records)
    last = records[-1]
    per_gpu = speed["tokens_per_second_per_gpu"]
    return Summary(
        run_dir=str(folder),
        steps=steps,
        total_steps=total_steps,
        stopped_by=stopped_by,
        tokens=tokens,
        parameters=parameters,
        loss_first=records[0].loss,
        loss_last=last.loss,
        evaluation=evaluation.values() if evaluation else {},
        tokens_per_second=None if per_gpu is None else per_gpu * world_size,
        flops_per_token=flops_per_token,
        flops_convention=last.flops_convention,
        peak_tflops=last.peak_tflops,
        skipped_steps=last.skipped_steps,
        devices=devices,
        samples=tuple(samples),
        made_up_tokens=made_up_tokens,
        is_score=is_score,
        is_chat=is_chat,
        start_up={phase: round(seconds, 3) for phase, seconds in (start_up or {}).items()},
        **speed,
    )
