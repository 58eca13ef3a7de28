"""How does the run go? Sums stay on the device; the host asks for them once a logged step, never in between.

What each rank knows is gathered from all ranks in one collective of a few numbers. Losses are read as
(sum of losses) / (number of tokens) over *all* ranks, so the layout need not be known: tensor-parallel copies of the
same loss count twice in both, and pipeline stages without a loss add nothing to either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.observe.events import Metric, StepRecord
from paceline.report.finding import Finding

TERA = 1e12

# torch 2.13 renames the collective and warns about the old name; 2.11 has only that
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What turns tokens per second into FLOP/s and MFU; all handed in, none guessed here.

    ``flops_per_token`` are model FLOPs, forward and backward, of the *whole* model for one token, recomputation not
    counted, after ``flops_convention``. ``peak_tflops`` is the dense peak of one device, None where unknown.
    """

    flops_per_token: float | None
    flops_convention: str
    peak_tflops: float | None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A logged step: the record, equal on all ranks, and what a person should know about it."""

    record: StepRecord
    skipped_in_a_row: int
    """Steps up to this one whose loss or gradient was not finite, without one between that was."""
    slowest_data_rank: int
    findings: tuple[Finding, ...] = ()


class Meter:
    """Collects what one rank sees of a step and turns it into a ``StepRecord`` when asked.

    A step calls ``add_micro_batch`` for each micro-batch, ``end_step`` once, and ``read`` only where it is logged.
    ``read`` is a collective over the default process group.

    Args:
        tokens_per_step: tokens of a global batch, over all ranks and micro-batches, where a step does not say.
        num_devices: devices that share this work: the world size.
        tokens_before, skipped_before: totals of the run so far, from the checkpoint of a resumed one.
        mean_names: extra means a micro-batch may add to; the same on all ranks, or the collective would not fit.
        memory_bytes: called where a step is logged; this rank's peak so far.
        joules: called where a step is logged; what this rank's device has used so far, None where nobody knows.
    """

    def __init__(
        self,
        device: torch.device,
        rates: Rates,
        *,
        tokens_per_step: int,
        num_devices: int,
        memory_bytes: Callable[[], int],
        joules: Callable[[], float | None] = lambda: None,
        tokens_before: int = 0,
        skipped_before: int = 0,
        mean_names: tuple[str, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.rates = rates
        self.tokens_per_step = tokens_per_step
        self.num_devices = num_devices
        self.mean_names = mean_names
        self.tokens = tokens_before
        self._memory_bytes = memory_bytes
        self._energy = _Energy(joules)
        self._clock = clock
        # loss sum, tokens with a loss, then (sum, count) of each extra; float64 holds token counts exactly
        self._sums = torch.zeros(2 + 2 * len(mean_names), dtype=torch.float64, device=device)
        self._grad_norm = torch.zeros((), dtype=torch.float64, device=device)
        self._skipped = torch.tensor([skipped_before, 0], dtype=torch.int64, device=device)
        self._fresh = True
        self._steps = 0
        self._window_tokens = 0
        self._data_wait_seconds = 0.0
        self._excluded_seconds = 0.0
        self._window_start = self._clock()

    def start(self) -> None:
        """Starts the clock of the first window; call right before the first step."""
        self._window_start = self._clock()
        self._excluded_seconds = 0.0
        self._data_wait_seconds = 0.0
        self._steps = 0
        self._window_tokens = 0
        self._energy.take()

    def add_data_wait(self, seconds: float) -> None:
        """Time in which the step had nothing to do because its batch was not there."""
        self._data_wait_seconds += seconds

    def add_micro_batch(
        self, loss_sum: Tensor, num_tokens: Tensor, means: Mapping[str, tuple[Tensor, Tensor | int]] | None = None
    ) -> None:
        """Adds a micro-batch's detached scalars, on the device. A stage without a loss adds zeros.

        ``means``: (sum, number) of each; the record shows the quotient of their totals over micro-batches and ranks.
        """
        if self._fresh:
            self._sums.zero_()
            self._fresh = False
        self._sums[0] += loss_sum.detach()
        self._sums[1] += num_tokens.detach()
        for name, (value, number) in (means or {}).items():
            index = 2 + 2 * self.mean_names.index(name)
            self._sums[index] += value.detach()
            self._sums[index + 1] += number

    def end_step(self, grad_norm: Tensor, skipped: Tensor, tokens: int | None = None) -> None:
        """Ends a step.

        Args:
            grad_norm: global norm before clipping, a scalar on the device, equal on all ranks.
            skipped: boolean scalar on the device, equal on all ranks: the update was left out.
            tokens: of this step's global batch; None = ``tokens_per_step``.
        """
        tokens = self.tokens_per_step if tokens is None else tokens
        if self._fresh:
            # a pipeline stage without the loss has added nothing to this step
            self._sums.zero_()
        self._fresh = True
        self._grad_norm.copy_(grad_norm.detach())
        flag = skipped.to(torch.int64)
        self._skipped[0] += flag
        self._skipped[1] = (self._skipped[1] + 1) * flag
        self._steps += 1
        self.tokens += tokens
        self._window_tokens += tokens

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time in this block (an evaluation, a checkpoint) is not the steps'. Waits for the device at both ends."""
        self._wait_for_device()
        start, joules = self._clock(), self._energy.now()
        try:
            yield
        finally:
            self._wait_for_device()
            self._excluded_seconds += self._clock() - start
            self._energy.exclude(self._energy.now() - joules)

    def read(self, step: int, lr: float, extra: Mapping[str, Metric] | None = None) -> Reading:
        """The record of the step that just ended: one collective, one wait for the device. Starts the next window.

        Args:
            extra: more of the record's `extra`, equal on all ranks.
        """
        assert self._steps > 0, "no step since the last reading"
        table = self._gather()
        # the copy to the host waited for the device, so the clock now shows finished work
        now = self._clock()
        seconds = now - self._window_start - self._excluded_seconds
        step_seconds = seconds / self._steps
        data_wait = table[:, _WAIT] / self._steps
        sums = table[:, _SUMS:].sum(dim=0).tolist()
        record, findings = self._record(
            step,
            lr,
            loss=_ratio(sums[0], sums[1]),
            grad_norm=float(table[self._rank(), _NORM]),
            step_seconds=step_seconds,
            data_wait_seconds=float(data_wait.max()),
            memory_gib=float(table[:, _MEMORY].max()) / 2**30,
            skipped=int(table[self._rank(), _SKIPPED]),
            extra={name: _ratio(sums[2 + 2 * i], sums[3 + 2 * i]) for i, name in enumerate(self.mean_names)}
            | self._energy_metrics(float(table[:, _ENERGY].sum()), seconds)
            | dict(extra or {}),
        )
        self._window_start, self._excluded_seconds, self._data_wait_seconds, self._steps = now, 0.0, 0.0, 0
        self._window_tokens = 0
        return Reading(
            record=record,
            skipped_in_a_row=int(table[self._rank(), _IN_A_ROW]),
            slowest_data_rank=int(data_wait.argmax()),
            findings=findings,
        )

    def _record(
        self,
        step: int,
        lr: float,
        *,
        loss: float | None,
        grad_norm: float,
        step_seconds: float,
        data_wait_seconds: float,
        memory_gib: float,
        skipped: int,
        extra: Mapping[str, Metric],
    ) -> tuple[StepRecord, tuple[Finding, ...]]:
        tokens_per_second = self._window_tokens / self._steps / step_seconds / self.num_devices
        flops = self.rates.flops_per_token
        tflops = None if flops is None else flops * tokens_per_second / TERA
        mfu = None if tflops is None or self.rates.peak_tflops is None else tflops / self.rates.peak_tflops
        findings: tuple[Finding, ...] = ()
        if mfu is not None and mfu > 1:
            findings = (_impossible_mfu(mfu, tflops or 0.0, self.rates),)
            mfu = None
        record = StepRecord(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=self.tokens,
            tokens_per_second_per_gpu=tokens_per_second,
            tflops_per_gpu=tflops,
            mfu=mfu,
            step_seconds=step_seconds,
            data_wait_seconds=data_wait_seconds,
            memory_gib=memory_gib,
            skipped_steps=skipped,
            flops_convention=self.rates.flops_convention,
            peak_tflops=self.rates.peak_tflops,
            extra=extra,
        )
        return record, findings

    def _energy_metrics(self, joules: float, seconds: float) -> dict[str, Metric]:
        """Nothing where a rank does not know: a share of the energy would be taken for all of it."""
        if not joules > 0 or not seconds > 0:  # also nan
            return {}
        return {
            "tokens_per_joule": self._window_tokens / joules,
            "watts_per_gpu": joules / seconds / self.num_devices,
        }

    def _gather(self) -> Tensor:
        """[num_ranks, 6 + len(sums)] float64 on the host: what each rank knows."""
        host = torch.tensor(
            [self._data_wait_seconds, float(self._memory_bytes()), self._energy.take()], dtype=torch.float64
        )
        mine = torch.cat((host.to(self.device), self._grad_norm.reshape(1), self._skipped.double(), self._sums))
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return mine.cpu().reshape(1, -1)
        everyone = torch.empty(dist.get_world_size() * mine.numel(), dtype=torch.float64, device=self.device)
        _all_gather(everyone, mine)
        return everyone.cpu().reshape(dist.get_world_size(), -1)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0


_WAIT, _MEMORY, _ENERGY, _NORM, _SKIPPED, _IN_A_ROW, _SUMS = range(7)
"""Columns of ``Meter._gather``; the sums fill the rest."""


class _Energy:
    """Joules between two readings, which are taken at the same place of a step; nan where they are not known.

    The host takes them without waiting for the device, so each window is of the device's work some milliseconds before:
    of the same length, which is what counts.
    """

    def __init__(self, joules: Callable[[], float | None]) -> None:
        self._joules = joules
        self._since = math.nan
        self._excluded = 0.0

    def now(self) -> float:
        found = self._joules()
        return math.nan if found is None else found

    def exclude(self, joules: float) -> None:
        self._excluded += joules

    def take(self) -> float:
        """What was used since the last call, without what was excluded."""
        now = self.now()
        used = now - self._since - self._excluded
        self._since, self._excluded = now, 0.0
        return used


def _ratio(total: float, number: float) -> float | None:
    return total / number if number else None


def _impossible_mfu(mfu: float, tflops: float, rates: Rates) -> Finding:
    return Finding(
        id="observe.mfu-above-one",
        severity="error",
        subject=f"MFU would be {mfu:.0%}, which cannot be; it is left out.",
        evidence=f"{tflops:.1f} TFLOP/s per device by the {rates.flops_convention} convention, "
        f"against a peak of {rates.peak_tflops} TFLOP/s.",
        next_step="The peak is not this device's, or not this precision's: set the right one with "
        "--set observe.peak_tflops=VALUE (dense, not the figure for 2:4 sparsity).",
    )
