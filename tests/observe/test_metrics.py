from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from distributed import run
from paceline.observe.metrics import Meter, Rates

CPU = torch.device("cpu")
OFF, ON = torch.tensor(False), torch.tensor(True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def meter(clock: Clock, **changes: Any) -> Meter:
    rates = Rates(flops_per_token=6e9, flops_convention="causal", peak_tflops=changes.pop("peak_tflops", None))
    arguments: dict[str, Any] = {"tokens_per_step": 64, "num_devices": 1, "memory_bytes": lambda: 3 * 2**29}
    return Meter(CPU, rates, clock=clock, **(arguments | changes))


def step(meter: Meter, clock: Clock, losses: list[float], seconds: float = 0.5, skipped: torch.Tensor = OFF) -> None:
    for loss in losses:
        meter.add_micro_batch(torch.tensor(loss * 10), torch.tensor(10))
    clock.now += seconds
    meter.end_step(torch.tensor(1.5), skipped)


def test_a_record() -> None:
    clock = Clock()
    made = meter(clock, tokens_before=640, skipped_before=2, peak_tflops=2.0)
    clock.now += 50  # set-up is not the first step's
    made.start()
    for losses in ([9.0, 9.0], [8.0, 8.0], [3.0, 4.0]):
        made.add_data_wait(0.1)
        step(made, clock, losses)
    record = made.read(13, lr=1e-3).record
    assert record.loss == 3.5  # of the last step, so that a kill between two lines changes nothing
    assert record.grad_norm == 1.5 and record.lr == 1e-3 and record.step == 13
    assert record.tokens == 640 + 3 * 64 and record.skipped_steps == 2
    assert record.step_seconds == pytest.approx(0.5) and record.data_wait_seconds == pytest.approx(0.1)
    assert record.tokens_per_second_per_gpu == pytest.approx(128)
    assert record.tflops_per_gpu == pytest.approx(6e9 * 128 / 1e12) and record.mfu == pytest.approx(0.384)
    assert record.memory_gib == 1.5 and record.peak_tflops == 2.0


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_speed_counts_every_accumulated_token(accumulation: int) -> None:
    """Case 16: the same tokens in the same time give the same speed, whatever the accumulation."""
    clock = Clock()
    made = meter(clock)
    made.start()
    for _ in range(2):
        step(made, clock, [2.0] * accumulation, seconds=0.25)
    assert made.read(2, lr=0.0).record.tokens_per_second_per_gpu == pytest.approx(64 / 0.25)


def test_time_of_evaluations_is_left_out() -> None:
    clock = Clock()
    made = meter(clock)
    made.start()
    step(made, clock, [2.0])
    with made.excluded():
        clock.now += 30
    step(made, clock, [2.0])
    assert made.read(2, lr=0.0).record.step_seconds == pytest.approx(0.5)
    step(made, clock, [2.0], seconds=1.0)
    assert made.read(3, lr=0.0).record.step_seconds == pytest.approx(1.0)


def test_energy_of_the_steps_alone() -> None:
    clock = Clock()
    used = 1000.0

    def joules() -> float:
        return used

    made = meter(clock, joules=joules)
    used += 500  # set-up is not the first step's
    made.start()
    for _ in range(2):
        step(made, clock, [2.0], seconds=0.5)
        used += 100
    with made.excluded():
        clock.now += 30
        used += 7000
    record = made.read(2, lr=0.0).record
    assert record.extra["tokens_per_joule"] == pytest.approx(128 / 200)
    assert record.extra["watts_per_gpu"] == pytest.approx(200)
    step(made, clock, [2.0], seconds=1.0)
    used += 64
    assert made.read(3, lr=0.0).record.extra["tokens_per_joule"] == pytest.approx(1.0)


@pytest.mark.parametrize("joules", [lambda: None, lambda: 1000.0], ids=["unknown", "stands still"])
def test_no_energy_is_no_figure(joules: Callable[[], float | None]) -> None:
    clock = Clock()
    made = meter(clock, joules=joules)
    made.start()
    step(made, clock, [2.0])
    assert made.read(1, lr=0.0).record.extra == {}


def _energy_on_two_ranks(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The figures where both ranks know their energy, and where one does."""

    def figures(knows: bool) -> dict[str, Any]:
        clock, used = Clock(), [1000.0]
        made = meter(clock, num_devices=2, joules=lambda: used[0] if knows else None)
        made.start()
        step(made, clock, [2.0], seconds=1.0)
        used[0] += 30.0 + 4.0 * rank
        return dict(made.read(1, lr=0.0).record.extra)

    return [figures(True), figures(rank == 0)]


def test_energy_is_summed_over_ranks_and_unknown_where_one_is() -> None:
    for both, one in run(_energy_on_two_ranks, 2):
        assert both == {"tokens_per_joule": pytest.approx(1.0), "watts_per_gpu": pytest.approx(32.0)}
        assert one == {}


def test_mfu_is_never_guessed_and_never_above_one() -> None:
    """Case 2: an unknown peak gives no MFU; one above 100 % is an error, not a result."""
    clock = Clock()
    made = meter(clock)
    made.start()
    step(made, clock, [2.0])
    assert made.read(1, lr=0.0).record.mfu is None
    made = meter(clock, peak_tflops=0.1)
    made.start()
    step(made, clock, [2.0])
    reading = made.read(1, lr=0.0)
    assert reading.record.mfu is None and reading.record.tflops_per_gpu == pytest.approx(0.768)
    (finding,) = reading.findings
    assert finding.severity == "error" and "768%" in finding.subject and "0.1 TFLOP/s" in finding.evidence


def test_skipped_steps_are_counted_also_in_a_row() -> None:
    clock = Clock()
    made = meter(clock)
    made.start()
    counts = []
    for skipped in (ON, OFF, ON, ON):
        step(made, clock, [math.nan if skipped else 2.0], skipped=skipped)
        reading = made.read(1, lr=0.0)
        counts.append((reading.record.skipped_steps, reading.skipped_in_a_row))
    assert counts == [(1, 1), (1, 0), (2, 1), (3, 2)]
    assert reading.record.loss is not None and math.isnan(reading.record.loss)


def test_means_over_micro_batches() -> None:
    clock = Clock()
    made = meter(clock, mean_names=("moe/balance", "moe/z"))
    made.start()
    for value in (1.0, 2.0):
        made.add_micro_batch(torch.tensor(1.0), torch.tensor(1), {"moe/balance": (torch.tensor(value * 3), 3)})
    clock.now += 1
    made.end_step(torch.tensor(0.0), OFF)
    assert made.read(1, lr=0.0).record.extra == {"moe/balance": 1.5, "moe/z": None}


class NoSync(TorchFunctionMode):
    """Fails on whatever makes the host wait for a device."""

    WAITS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero", "to_dense")

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in self.WAITS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_not_logged_never_waits() -> None:
    clock = Clock()
    made = meter(clock, mean_names=("x",))
    made.start()
    loss, count, norm = torch.tensor(2.0), torch.tensor(10), torch.tensor(1.0)
    with NoSync():
        for _ in range(3):
            made.add_micro_batch(loss, count, {"x": (loss, count)})
            made.end_step(norm, OFF)
    clock.now += 1
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():
        made.read(3, lr=0.0)


@pytest.mark.gpu
def test_a_step_that_is_not_logged_never_waits_on_a_gpu() -> None:
    gpu = torch.device("cuda", 0)
    rates = Rates(flops_per_token=1.0, flops_convention="causal", peak_tflops=None)
    made = Meter(gpu, rates, tokens_per_step=1, num_devices=1, memory_bytes=lambda: 0, mean_names=("x",))
    made.start()
    value, flag = torch.ones((), device=gpu), torch.zeros((), dtype=torch.bool, device=gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made.add_micro_batch(value, value, {"x": (value, 1)})
            made.end_step(value, flag)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.read(3, lr=0.0).record.loss == 1.0


def _read(rank: int, world_size: int) -> tuple[Any, int]:
    clock = Clock()
    made = meter(clock, num_devices=world_size, memory_bytes=lambda: (rank + 1) * 2**30)
    made.start()
    # rank 3 is a pipeline stage without a loss; ranks 1 and 2 are copies of the same (tensor parallel), 0 stands twice
    if rank != 3:
        loss_sum, tokens = ((10.0, 10), (60.0, 20), (60.0, 20))[rank]
        for _ in range(2 if rank == 0 else 1):
            made.add_micro_batch(torch.tensor(loss_sum), torch.tensor(tokens))
    made.add_data_wait(0.1 * (rank == 2))
    clock.now += 1.0
    made.end_step(torch.tensor(1.5), OFF)
    reading = made.read(1, lr=0.1)
    return reading.record, reading.slowest_data_rank


def test_all_ranks_read_the_same() -> None:
    results = run(_read, 4)
    record, slowest = results[0]
    assert record.loss == (10 + 10 + 60 + 60) / (10 + 10 + 20 + 20)
    assert record.memory_gib == 4.0 and record.data_wait_seconds == pytest.approx(0.1) and slowest == 2
    assert record.tokens_per_second_per_gpu == pytest.approx(16) and record.tokens == 64
    assert all(result == results[0] for result in results)
